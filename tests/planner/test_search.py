"""The search: layouts that training accepts and that fit, in the order of their steps; reasons where there are none."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
from training_setups import changed

from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import OptimizerName
from toolkit.config.strategy import Strategy
from toolkit.errors import BatchError, LayoutError, ModelError
from toolkit.estimate.recorded.recording import RankPass
from toolkit.estimate.trainable import Trainable
from toolkit.hardware import gpu
from toolkit.models.shape import local_config
from toolkit.planner.auto.ranks import cluster_named
from toolkit.planner.cluster import Cluster
from toolkit.planner.costs import cost_of
from toolkit.planner.execution import Execution
from toolkit.planner.layout_candidates import layouts
from toolkit.planner.request import Plan, PlanRequest, predict
from toolkit.planner.run_memory import recipe_of
from toolkit.planner.search import Goal, candidates, evaluated, least_bytes, nearest_that_fits, search
from toolkit.planner.step_time import predict_step


def request(model: str = "llama-3-8b", gpus: int = 16, batch: int = 64, **changes: object) -> PlanRequest:
    fields = {"cluster": Cluster.of(gpu("H100-80")), "seq_len": 2048} | changes
    return PlanRequest.of(model, local_config(model), gpus=gpus, global_batch_size=batch, **fields)


def test_plans_fit_and_stand_in_the_order_of_their_steps() -> None:
    found = search(request(), top=6)
    assert len(found.plans) == 6 < found.candidates
    assert all(plan.fits and plan.layout.world_size == 16 for plan in found.plans)
    assert all(a.step.seconds <= b.step.seconds for a, b in pairwise(found.plans))


def test_nothing_that_fits_is_faster_than_the_first_choice() -> None:
    asked = request(gpus=8, batch=16, cluster=Cluster.of(gpu("A100-40")))
    best = search(asked, top=1).plans[0]
    faster = [one for one in candidates(asked) if one.step.seconds < best.step.seconds]
    assert faster
    assert not any(asked.estimated(one.layout, one.batch, one.step).fits for one in faster)


def test_what_a_search_prints_is_read_back_as_the_same_layout() -> None:
    asked = request(gpus=8, batch=16, cluster=Cluster.of(gpu("A100-40")))
    for plan in search(asked, top=20).plans:
        strategy = Strategy.parse(plan.strategy)
        assert asked.read_layout(plan.strategy) == (plan.layout, strategy.micro_batch_size)


def test_every_candidate_is_accepted_by_training() -> None:
    asked = request(gpus=8)
    found = list(layouts(asked))
    assert len(found) == len(set(found))
    assert {(layout.tp, layout.pp, layout.ulysses) for layout in found} >= {(1, 1, 1), (8, 1, 1), (2, 4, 1), (1, 1, 4)}
    assert all(asked.refusal(layout) is None for layout in found)


def test_weights_in_4_bits_are_planned_where_they_train() -> None:
    found = list(layouts(request(gpus=8, trainable=Trainable.parse("lora:r=8,4bit=yes"))))
    assert {layout.zero_stage for layout in found} == {1, 2}
    assert all(layout.model_size == 1 for layout in found)


def test_the_bound_on_states_is_never_above_the_estimate() -> None:
    asked = request(gpus=8, batch=16)
    for layout in layouts(asked):
        batch = Batch(global_batch_size=16, micro_batch_size=1, dp=layout.dp)
        assert least_bytes(asked, layout) < asked.memory(layout, batch).total


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_bound_on_states_holds_for_every_optimizer(optimizer: OptimizerName, zero_stage: int) -> None:
    layout = Layout(dp=1, zero_stage=zero_stage)
    base = recipe_of(
        "llama-3-8b",
        layout,
        micro_batch_size=1,
        seq_len=64,
        accumulation=1,
        precision="fp16",
        optimizer=optimizer,
    )
    asked = request(gpus=1, batch=1, seq_len=64, precision="fp16", base=base)
    batch = Batch(global_batch_size=1, micro_batch_size=1, dp=1)
    assert 0 < least_bytes(asked, layout) < asked.memory(layout, batch).total


@pytest.mark.parametrize("framework", ["megatron", "automodel", "fsdp"])
def test_the_bound_on_states_holds_for_other_frameworks(framework: str) -> None:
    layout = Layout(dp=2, zero_stage=1 if framework == "megatron" else 3)
    if framework == "fsdp":
        layout = replace(layout, recompute="selective")
    asked = request(gpus=2, batch=2, seq_len=64, execution=Execution(framework=framework))
    batch = Batch(global_batch_size=2, micro_batch_size=1, dp=2)
    assert least_bytes(asked, layout) < asked.memory(layout, batch).total


def test_a_search_makes_no_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded_now(*_: object) -> None:
        raise AssertionError("a recording was made")

    monkeypatch.setattr("toolkit.estimate.recorded.recordings._ask_recorder", recorded_now)
    monkeypatch.setattr("toolkit.estimate.recorded.recordings._read", lambda path: {})
    for model in ("llama-3.1-70b", "qwen3-0.6b"):  # neither has stages with sequence parallelism among its recordings
        plans = search(request(model, gpus=64, batch=512), top=100).plans
        assert any(plan.layout.pp > 1 and plan.layout.sequence_parallel for plan in plans)


@pytest.mark.parametrize("layout", ["tp2-pp2-z1-sp", "tp4-z2-sp-recompute", "pp4-z1"])
def test_a_stand_in_hardly_needs_less(layout: str) -> None:
    asked = request("llama-3-8b", gpus=8)
    read, _ = asked.read_layout(layout)
    batch = Batch(global_batch_size=64, micro_batch_size=2, dp=read.dp)
    exact = asked.memory(read, batch, stand_ins=False).total

    def simplest(rank_pass: RankPass, positions: int) -> RankPass:
        return changed(rank_pass, part="whole", sequence_parallel=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.estimate.rank_pass.stand_in", simplest)
        assert 0.97 * exact < asked.memory(read, batch).total < 2 * exact


def test_offloaded_states_have_to_fit_into_the_host() -> None:
    layout = Layout(dp=8, zero_stage=2, offload_optimizer="cpu", recompute="full")
    batch = Batch(global_batch_size=16, micro_batch_size=1, dp=8)
    asked = request(gpus=8)
    small = replace(asked, cluster=replace(asked.cluster, host_memory_bytes=1e9))
    assert asked.plan(layout, batch).fits
    assert not small.plan(layout, batch).fits


TINY = {
    "bloom": {"n_layer": 4, "hidden_size": 256, "n_head": 4, "vocab_size": 2048},
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "vocab_size": 512,
    },
}


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize(("name", "gpus"), [("H100-80", 8), ("L4", 2), ("V100-SXM2-32", 1)])
def test_what_fits_is_not_offloaded(family: str, name: str, gpus: int) -> None:
    config = {"model_type": family, **TINY[family]}
    cluster = Cluster.of(gpu(name))
    asked = PlanRequest.of("tiny", config, cluster=cluster, gpus=gpus, seq_len=512, global_batch_size=64)
    plans = search(asked, top=1000).plans
    places = {(plan.layout, plan.batch.micro_batch_size): place for place, plan in enumerate(plans)}
    offloaded = [plan for plan in plans if plan.layout.offload_optimizer != "none"]
    assert offloaded
    for plan in offloaded:
        plain = replace(plan.layout, offload_optimizer="none", offload_params="none")
        assert places[plain, plan.batch.micro_batch_size] < places[plan.layout, plan.batch.micro_batch_size]


def test_where_nothing_fits_more_gpus_or_a_shorter_sequence_are_named() -> None:
    asked = request("llama-2-13b", gpus=2, cluster=Cluster.of(gpu("L4"), host_memory_bytes=1e9))
    assert search(asked).plans == []
    needed, strategy = nearest_that_fits(asked)[0].split(" GPUs: ")
    assert search(replace(asked, gpus=int(needed)), top=1).plans[0].strategy == strategy
    assert search(replace(asked, gpus=int(needed) // 2)).plans == []


def test_gpus_that_nothing_divides_are_refused_with_the_nearest_number() -> None:
    with pytest.raises(LayoutError, match=r"--gpus 61: .* Set --gpus 60"):
        candidates(request(gpus=61, batch=512))


def test_a_batch_that_nothing_splits_is_refused_with_the_nearest_size() -> None:
    with pytest.raises(BatchError, match=r"--global-batch 3: .* 32 replicas .* Set --global-batch 32"):
        candidates(request("gpt2", gpus=1024, batch=3, seq_len=512))


def test_the_cheapest_goal_also_tries_fewer_gpus() -> None:
    plans = search(request("gpt2", gpus=8, batch=64, seq_len=512), goal="cost", top=30).plans
    assert len({plan.step.gpus for plan in plans}) > 1
    speeds = [plan.step.tokens_per_second_per_gpu for plan in plans]
    assert speeds == sorted(speeds, reverse=True)


def test_the_memory_goal_ranks_by_memory() -> None:
    totals = [plan.memory.total for plan in search(request(gpus=8), goal="memory", top=5).plans]
    assert totals == sorted(totals)
    assert totals[0] < search(request(gpus=8), top=1).plans[0].memory.total


def test_the_memory_goal_keeps_a_micro_batch_that_is_fixed() -> None:
    plans = search(request(gpus=8, fixed={"micro_batch_size": 4}), goal="memory", top=3).plans
    assert [plan.batch.micro_batch_size for plan in plans] == [4, 4, 4]


@pytest.mark.parametrize("goal", ["speed", "memory"])
def test_layouts_that_cannot_be_recorded_are_left_out(goal: Goal, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PlanRequest.estimated

    def estimated(asked: PlanRequest, layout: Layout, *rest: object, **options: object) -> Plan:
        if layout.tp > 1:
            raise ModelError.of("model_type", "llama", "its activations cannot be recorded", "choose another")
        return whole(asked, layout, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(PlanRequest, "estimated", estimated)
    asked = request("gpt2", gpus=4, batch=8, seq_len=512)
    for plans in (search(asked, goal=goal).plans, evaluated(asked, goal="speed").plans):
        assert {plan.layout.tp for plan in plans} == {1}
    with pytest.raises(ModelError, match="cannot be recorded"):
        search(replace(asked, fixed={"tp": 2}), goal=goal)


def test_a_mixtures_layouts_share_out_experts_over_every_divisor_of_both() -> None:
    found = {(layout.dp, layout.ep, layout.tp) for layout in layouts(request("mixtral-8x7b", gpus=8))}
    assert {ep for dp, ep, tp in found if dp == 8} == {1, 2, 4, 8}
    # 8 experts on 4 x 2 ranks are one each.
    assert {ep for dp, ep, tp in found if tp == 4} == {1, 2}
    assert all(layout.ep == 1 for layout in layouts(request("gpt2", gpus=8, seq_len=512)))


@pytest.mark.parametrize(
    ("strategy", "imbalance"), [("dp8-z3", 1), ("dp8-ep2-z1", 2), ("dp8-ep8-z1", 3), ("dp4-tp2-z1", 2), ("tp8-z1", 3)]
)
def test_imbalance_is_of_ranks_with_different_experts_in_time_and_memory(strategy: str, imbalance: float) -> None:
    asked = request("mixtral-8x7b", gpus=8, imbalance=3.0)
    layout, _ = asked.read_layout(strategy)
    batch = Batch(global_batch_size=64, micro_batch_size=1, dp=layout.dp)
    for asks in (asked.memory_request(layout, batch), asked.step_request(layout, batch)):
        assert asks.setup.computation.imbalance == imbalance


def test_a_family_whose_flops_are_not_those_of_its_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    request("mixtral-8x7b")
    monkeypatch.setattr("toolkit.planner.request.has_these_flops", lambda *_: False)
    with pytest.raises(ModelError, match="layers have others"):
        request("mixtral-8x7b")


def test_an_mlp_that_a_framework_does_not_have_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"--framework nanotron with --model gpt2: .* MLPs without a gate"):
        request("gpt2", gpus=8, seq_len=512, execution=Execution(framework="nanotron"))


def test_kernels_that_keep_scores_do_so_in_the_memory_of_another_framework() -> None:
    layout = Layout(dp=8, zero_stage=1)
    batch = Batch(global_batch_size=64, micro_batch_size=1, dp=8)
    flash = request(gpus=8, execution=Execution(framework="megatron"))
    unfused = request(gpus=8, execution=Execution(framework="megatron", attention="unfused"))
    assert unfused.memory(layout, batch).total > flash.memory(layout, batch).total
    selective = replace(layout, recompute="selective")
    assert unfused.memory(selective, batch).total < unfused.memory(layout, batch).total


def test_a_recipes_step_is_that_of_the_plan() -> None:
    asked = request("gpt2", gpus=8, batch=64, seq_len=512)
    layout, batch = Layout(dp=8, zero_stage=1), Batch(global_batch_size=64, micro_batch_size=2, dp=8)
    assert predict(asked.recipe(layout, batch), layout, batch, asked.cluster) == asked.step(layout, batch)
    assert asked.step(layout, batch) == predict_step(asked.step_request(layout, batch))


def test_costs_are_gpu_hours_times_what_they_take() -> None:
    asked = request("gpt2", gpus=8, batch=64, seq_len=512)
    step = asked.step(Layout(dp=8, zero_stage=1), Batch(global_batch_size=64, micro_batch_size=2, dp=8))
    cost = cost_of(step, asked.gpu, tokens=3600 / step.seconds * step.tokens, price=2.0, carbon=0.5)
    assert cost.days == pytest.approx(1 / 24)
    assert cost.usd == pytest.approx(16.0)
    assert cost.kwh == pytest.approx(8 * 0.7 * 1.9)
    assert cost.kg_co2 == pytest.approx(cost.kwh / 2)


def test_energy_without_carbon_is_a_figure_and_energy_that_nobody_knows_is_none() -> None:
    asked = request("gpt2", gpus=8, batch=64, seq_len=512)
    step = asked.step(Layout(dp=8, zero_stage=1), Batch(global_batch_size=64, micro_batch_size=2, dp=8))
    assert cost_of(step, asked.gpu, tokens=1e9, carbon=0.0).kg_co2 == 0.0
    cpu, _ = cluster_named("cpu", 2)
    cost = cost_of(step, cpu.gpu, tokens=1e9)
    assert (cost.kwh, cost.kg_co2) == (None, None)
