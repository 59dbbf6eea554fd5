"""Pipeline schedules as an axis of plans: their waits against closed forms, and what `schedule: auto` chooses."""

from dataclasses import replace
from typing import Any

import pytest
from nonempty import nonempty

from toolkit.config.layout import Batch, Layout
from toolkit.config.pipeline_schedules import KINDS, schedule_of
from toolkit.config.recipe import Recipe
from toolkit.config.simulate_schedule import ScheduleCosts, simulate
from toolkit.hardware import gpu
from toolkit.models.shape import find_config
from toolkit.planner.auto.plan_recipe import planned
from toolkit.planner.bubble import waiting_seconds
from toolkit.planner.cluster import Cluster
from toolkit.planner.layout_candidates import layouts
from toolkit.planner.request import PlanRequest
from toolkit.planner.run_memory import recipe_of
from toolkit.planner.schedule_choice import compared, fastest_schedule, schedule_plans

CLUSTER = Cluster.of(gpu("H100-80"))


def costs_of(kind: Any, pp: int, *, f: float, b: float, w: float, transfer: float = 0.0) -> tuple[int, ScheduleCosts]:
    """Costs of equal stages; f, b and w are of all chunks of a rank."""
    chunks = schedule_of(kind, pp=pp, micro_batches=1).virtual_stages
    stages = pp * chunks
    return chunks, ScheduleCosts(
        forward=[f / chunks] * stages,
        backward=[b / chunks] * stages,
        weight=[w / chunks] * stages,
        transfer=[transfer] * (stages - 1),
    )


@pytest.mark.parametrize("micro_batches", [8, 9, 64, 513])
def test_waits_are_those_of_the_closed_forms(micro_batches: int) -> None:
    f, b, w = 3.0, 4.0, 2.0
    expected = {"gpipe": 3 * (f + b + w), "1f1b": 3 * (f + b + w), "zb-h1": 3 * (f + b - w)}
    for kind, wait in expected.items():
        _, costs = costs_of(kind, 4, f=f, b=b, w=w)
        schedule = schedule_of(kind, pp=4, micro_batches=micro_batches)  # type: ignore[arg-type]
        assert waiting_seconds(schedule, costs) == pytest.approx(wait, rel=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_micro_batches_stand_for_many(kind: Any) -> None:
    """Unequal stages and messages: the wait of all micro-batches, simulated, against that of the shortened schedule."""
    for pp in (2, 3, 4):
        chunks, equal = costs_of(kind, pp, f=1.0, b=1.2, w=0.8, transfer=0.05)
        costs = replace(equal, forward=[0.2 * (stage % 3) + time for stage, time in enumerate(equal.forward)])
        for micro_batches in nonempty(range(6 * pp, 7 * pp + 1)):
            schedule = schedule_of(kind, pp=pp, micro_batches=micro_batches, virtual_stages=chunks)
            passes = list(zip(costs.forward, costs.backward, costs.weight, strict=True))
            busy = [
                sum(sum(passes[stage]) for stage, place in enumerate(schedule.rank_of) if place == rank)
                for rank in range(pp)
            ]
            whole = simulate(schedule, costs).makespan - micro_batches * max(busy)
            # Costs are rounded to thousandths of a micro-batch.
            assert waiting_seconds(schedule, costs) == pytest.approx(whole, abs=0.02 * max(busy)), micro_batches


def request(**changes: Any) -> PlanRequest:
    config = find_config("llama-3-8b") or {}
    fields: dict[str, Any] = {"cluster": CLUSTER, "gpus": 16, "seq_len": 2048, "global_batch_size": 16, **changes}
    return PlanRequest.of("llama-3-8b", config, **fields)


def test_a_search_tries_schedules_where_it_is_asked_to() -> None:
    assert {layout.schedule for layout in layouts(request())} == {None}
    tried = {(layout.schedule, layout.chunks) for layout in layouts(request(schedules=True)) if layout.pp > 1}
    assert tried == {(None, 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2)}


def test_few_micro_batches_are_faster_with_less_bubble_and_many_hardly_differ() -> None:
    asked = request()
    layout = Layout(tp=4, pp=4, zero_stage=1)
    shares = {}
    for samples in (8, 256):
        batch = Batch(global_batch_size=samples, micro_batch_size=1, dp=1)
        plans = schedule_plans(asked, asked.estimated(layout, batch, asked.step(layout, batch)))
        by_name = {plan.layout.pipeline_text: plan for plan in plans}
        assert set(by_name) == {"pp4", "pp4-1f1b", "pp4x2", "pp4x4", "pp4-zbh1", "pp4-zbv"}
        chosen = fastest_schedule(plans)
        assert chosen.step.seconds <= 1.01 * min(plan.step.seconds for plan in plans if plan.fits)
        assert all(name in compared(plans) for name in by_name)
        shares[samples] = chosen.step.seconds / by_name["pp4"].step.seconds
    assert shares[8] < 0.9 < shares[256] <= 1


def auto_recipe(**parallel: Any) -> Recipe:
    layout = Layout(tp=4, pp=4, zero_stage=1)
    recipe = recipe_of("llama-3-8b", layout, micro_batch_size=1, seq_len=2048, accumulation=8, precision="bf16")
    return recipe.changed({"parallel": {"schedule": "auto", **parallel}})


def test_an_automatic_schedule_is_written_into_the_recipe_and_said() -> None:
    plan = planned(auto_recipe(), CLUSTER, 16, on="16 x H100")
    section = plan.recipe.parallel
    assert section.schedule in ("interleaved", "zb-h1", "zb-v")
    assert (section.tp, section.pp, section.auto) == (4, 4, False)
    assert plan.recipe.layout(16) == plan.plan.layout
    assert all(f"{name} " in plan.note for name in ("pp4 (DeepSpeed's own)", "pp4-1f1b", "pp4x2", "pp4-zbv"))
    assert "waits" in plan.note


def test_an_automatic_schedule_takes_none_that_training_refuses() -> None:
    recipe = auto_recipe(offload_activations=True)
    plan = planned(recipe, CLUSTER, 16, on="16 x H100")
    assert plan.recipe.parallel.schedule is None


def test_a_bound_on_pending_weights_leaves_the_schedules_that_have_them() -> None:
    config = find_config("gpt2")
    assert config is not None
    asked = PlanRequest.of("gpt2", config, cluster=CLUSTER, gpus=4, seq_len=512, global_batch_size=64)
    fixed = replace(asked, schedules=True, fixed={"max_pending_weights": 2})
    found = list(layouts(fixed))
    assert {layout.schedule for layout in found} == {"zb-h1", "zb-v"}
    assert {layout.max_pending_weights for layout in found} == {2}
