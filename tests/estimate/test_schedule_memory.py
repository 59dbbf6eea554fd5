"""The estimate of a rank's peak under pipeline schedules, against what live engines allocate in a whole step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
from nonempty import nonempty

from toolkit.config.pipeline_schedules import KINDS, SPLITTING, schedule_of
from toolkit.estimate.memory_request import MemoryRequest
from toolkit.estimate.schedule_memory import StageBytes, schedule_peak

LAYOUTS = ("pp2-gpipe", "pp3-gpipe", "pp3-1f1b", "pp2x2", "pp3-zbh1", "pp2-zbv", "u2-cp1-pp4", "u2-cp1-pp2-zbh1")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "pp2-zbv" else pytest.mark.whole) for name in LAYOUTS]
)
def test_the_peak_of_every_rank_of_a_schedule_is_known_within_three_percent(
    make_recipe: Callable[..., Any],
    ranks: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    from live_pipeline import MICRO_BATCHES, SAMPLES, one_more_step

    from toolkit.config.job import Job
    from toolkit.config.strategy import Strategy
    from toolkit.dsconfig.build import build
    from toolkit.planner.run_memory import memory_request, settings_of

    strategy = Strategy.parse(layout)
    world_size = strategy.world_size(1)
    fields = strategy.sections(1)["parallel"]
    recipe = make_recipe(
        parallel={name: value for name, value in fields.items() if name != "dp"},
        batch={"global_batch_size": MICRO_BATCHES * SAMPLES, "micro_batch_size": SAMPLES},
        train__steps=1,
        overrides__n_layer=8,
        overrides__n_positions=128,
        overrides__attn_pdrop=0.0,
        data__seq_len=32 * strategy.cp * strategy.cp_ulysses,
    )
    measured = ranks(partial(one_more_step, updates=True), world_size, recipe)
    job = Job.of(recipe, world_size)
    asked = memory_request(recipe, job.layout, job.batch)
    cpu = replace(asked.setup, computation=replace(asked.setup.computation, device="cpu"))
    config = build(job, hidden_size=cpu.model.shape.hidden, device="cpu")
    request = replace(asked, setup=cpu, framework=settings_of(config, recipe, "cpu"))
    bounds = list(accumulate(measured[0].stage_layers, initial=0))
    monkeypatch.setattr(MemoryRequest, "_stage_layers", lambda self: [range(*edge) for edge in pairwise(bounds)])
    estimated = {breakdown.stage: breakdown for breakdown in request.stages()}
    assert {rank.pipe for rank in measured} == set(estimated)
    errors = {}
    for rank in measured:
        breakdown = estimated[rank.pipe]
        errors[rank.pipe] = (breakdown.allocated - breakdown.static) / rank.peak - 1
    assert max(errors.values(), key=abs) == pytest.approx(0, abs=0.03), errors


@pytest.mark.parametrize("layout", ["pp2-z1", "pp2-zbv-z1"])
def test_a_frozen_reference_is_in_the_peak_of_every_rank(make_recipe: Callable[..., Any], layout: str) -> None:
    from toolkit.config.job import Job
    from toolkit.config.strategy import Strategy
    from toolkit.planner.run_memory import memory_request

    fields = Strategy.parse(layout).sections(1)["parallel"]
    recipe = make_recipe(parallel={name: value for name, value in fields.items() if name != "dp"}, overrides__n_layer=4)
    job = Job.of(recipe, recipe.parallel.pp)
    alone = replace(memory_request(recipe, job.layout, job.batch), stand_ins=True)
    beside = replace(alone, setup=replace(alone.setup, keeps_reference=True))
    for without, having in nonempty(list(zip(alone.stages(), beside.stages(), strict=True))):
        assert without.reference == 0
        assert having.reference > 0
        assert having.static - without.static == having.reference
        assert having.allocated - without.allocated == having.reference


def test_a_stage_keeps_the_outputs_of_exchanged_heads_of_its_own_layers(make_recipe: Callable[..., Any]) -> None:
    """Of each micro-batch in flight: as many as there are stages from it to the end."""
    from toolkit.config.job import Job
    from toolkit.planner.run_memory import memory_request

    kept = []
    layers: list[int] = []
    for heads in (1, 2):
        recipe = make_recipe(
            parallel={"pp": 4, "cp": 2, "cp_ulysses": heads},
            batch={"global_batch_size": 8, "micro_batch_size": 1},
            overrides__n_layer=8,
        )
        job = Job.of(recipe, 8)
        request = replace(memory_request(recipe, job.layout, job.batch), stand_ins=True)
        kept.append([stage.activations["attention"] for stage in request.stages()])
        layers = [stage.layers for stage in request.stages()]
    outputs = 16 * 48 * 4  # positions of a rank, hidden size, fp32
    differences = [exchanged - alone for alone, exchanged in nonempty(list(zip(*kept, strict=True)))]
    assert differences == [count * in_flight * outputs for count, in_flight in zip(layers, (4, 3, 2, 1), strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_walk_holds_as_many_micro_batches_as_the_table_says(kind: Any, pp: int) -> None:
    """Stages that keep one byte between F and B, and one between B and W, and nothing else."""
    bounds = (None, 1, 2) if kind in SPLITTING else (None,)
    for micro_batches, bound in nonempty(list(product((2 * pp - 1, 2 * pp, 5 * pp + 1, 9 * pp), bounds))):
        schedule = schedule_of(kind, pp=pp, micro_batches=micro_batches, max_pending_weights=bound)
        one = StageBytes(forward=1, kept=1, backward=1, waiting=1, weights=1)
        for rank in range(pp):
            own = {stage: one for stage, place in enumerate(schedule.rank_of) if place == rank}
            counted = schedule if kind == "gpipe" else schedule.shortened()
            peak = schedule_peak(counted, rank, own, hidden=0)
            assert peak.live == schedule.virtual_stages * schedule.in_flight[rank], (micro_batches, bound, rank)
