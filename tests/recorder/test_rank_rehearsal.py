"""Rehearsals: what one process predicts of all ranks is what live ranks do, and planted faults are found and named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import LiveBytes
from rehearsed_models import EXPERTS, LLAMA

from toolkit.config.job import Job
from toolkit.config.layout import Layout
from toolkit.config.pipeline_schedules import Schedule
from toolkit.config.recipe import Recipe
from toolkit.config.stage_balance import CPU_FLOPS_PER_BYTE
from toolkit.config.strategy import Strategy
from toolkit.engines.factory import create_engine
from toolkit.engines.optimizer_states import MASTER
from toolkit.engines.second_weights import SecondWeights
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.parallel.context import heads
from toolkit.parallel.distilled_loss import TopTokens
from toolkit.parallel.tensor import collectives
from toolkit.planner.run_memory import memory_request
from toolkit.recorder.rehearsal import host_values
from toolkit.recorder.rehearsal.channel_messages import messages_named
from toolkit.recorder.rehearsal.collectives import Collective, CollectiveRecorder
from toolkit.recorder.rehearsal.depth import fewer_layers
from toolkit.recorder.rehearsal.match import find_mismatch
from toolkit.recorder.rehearsal.rank_kinds import rank_kinds
from toolkit.recorder.rehearsal.rank_step import STEPS, ask_teacher, build_engine, take_step
from toolkit.recorder.rehearsal.rehearse import rehearse, rehearsed_config, rehearsed_job, rehearsed_teacher

MakeRecipe = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]


def job_in(make_recipe: MakeRecipe, layout: str, model: dict[str, Any] = LLAMA, **changes: Any) -> Job:
    """The job of a small recipe on four ranks."""
    strategy = Strategy.parse(layout)
    batch = {"global_batch_size": 48, "micro_batch_size": 2}
    changes = {"parallel": {"cp_exchange": "ring"}} | changes
    recipe = strategy.apply(make_recipe(model=model, batch=batch, **changes), 1)
    return Job.of(recipe, strategy.world_size(1))


def live(job: Job) -> tuple[list[Collective], int, int]:
    """Do on a live rank what a rehearsal does: collectives, first call of the last step, and its peak."""
    small = rehearsed_job(job)
    config = rehearsed_config(small, hidden_size=48, on_gpu=False)
    recorder = CollectiveRecorder(job.layout, dist.get_rank())
    with LiveBytes() as memory, recorder, messages_named(recorder):
        engine = build_engine(small, torch.device("cpu"), config)
        for _ in range(STEPS):
            memory.start_peak()
            take_step(engine, small)
        peak = memory.peak_bytes
        for kind in (MASTER, *engine.states.kinds):
            shapes = dict(engine.saved_names(kind))
            engine.load_states(kind, lambda name, shapes=shapes: torch.zeros(shapes[name]))  # type: ignore[misc]
    return recorder.recorded, peak, len(recorder.recorded)


FOUR_LAYERS = {**LLAMA, "overrides": {**LLAMA["overrides"], "num_hidden_layers": 4}}
LAYOUTS = [
    ("tp2-pp2-z1", LLAMA),
    ("dp2-tp2-z1-sp", LLAMA),
    ("dp4-ep2-z1", EXPERTS),
    ("dp4-z3", LLAMA),
    ("cp2-tp2-z1", LLAMA),
    pytest.param("u2-cp2-z1", LLAMA, marks=pytest.mark.whole),
    pytest.param("dp2-pp2-z1", LLAMA, marks=pytest.mark.whole),
    pytest.param("pp2-gpipe-z1", LLAMA, marks=pytest.mark.whole),
    pytest.param("pp2x2-z1", FOUR_LAYERS, marks=pytest.mark.whole),
    pytest.param("pp2-zbv-z1", FOUR_LAYERS, marks=pytest.mark.whole),
    pytest.param("tp2-pp2-zbh1-z1", LLAMA, marks=pytest.mark.whole),
    pytest.param("dp2-pp2-ep2-zbh1-z1", EXPERTS, marks=pytest.mark.whole),
]


@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_predicted_collectives_are_those_of_live_ranks(
    make_recipe: MakeRecipe, ranks: Ranks, layout: str, model: dict[str, Any]
) -> None:
    check_against_live_ranks(job_in(make_recipe, layout, model), ranks)


ONLINE = {"name": "dpo", "reference": "online"}
OTHER_LOSSES: dict[str, dict[str, Any]] = {
    "online": {"data__format": "preference", "train__objective": ONLINE},
    "orpo": {"data__format": "preference", "train__objective": {"name": "orpo"}},
    "kto": {"data__format": "unpaired", "train__objective": {"name": "kto", "reference": "online"}},
    "teacher": {"train__distill": {"teacher": "some/teacher", "top_k": 8}},
}


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        ("dp2-z3", "online"),
        *(
            pytest.param(layout, loss, marks=pytest.mark.whole)
            for layout in ("dp4-z1", "dp2-tp2-z1-sp", "tp2-pp2-z1", "dp4-z3")
            for loss in OTHER_LOSSES
        ),
    ],
)
def test_objectives_and_teachers_are_rehearsed_as_live_ranks_compute_them(
    make_recipe: MakeRecipe, ranks: Ranks, layout: str, loss: str
) -> None:
    check_against_live_ranks(job_in(make_recipe, layout, **OTHER_LOSSES[loss]), ranks)


def stages_on_cpu(job: Job) -> tuple[MemoryBreakdown, ...]:
    """Estimate the pipeline stages that training has on CPUs."""
    request = memory_request(job.recipe, job.layout, job.batch)
    return replace(request, flops_per_byte=CPU_FLOPS_PER_BYTE).stages()


def bytes_of_reference(job: Job) -> tuple[int, int]:
    """Copy the weights of a live rank, as an objective does that keeps its reference: its stage, and bytes."""
    small = rehearsed_job(job)
    engine = create_engine(small, torch.device("cpu"), rehearsed_config(small, hidden_size=48, on_gpu=False))
    with LiveBytes() as memory:
        reference = SecondWeights.frozen(engine)
    assert reference is not None  # it lives until the bytes are counted
    return job.layout.coordinate(dist.get_rank()).pipe, memory.live_bytes


@pytest.mark.parametrize(
    "layout", ["dp2-z3", *(pytest.param(x, marks=pytest.mark.whole) for x in ("z0", "dp2-tp2-z1", "tp2-pp2-z1"))]
)
def test_a_reference_in_memory_takes_what_is_estimated(make_recipe: MakeRecipe, ranks: Ranks, layout: str) -> None:
    job = job_in(make_recipe, layout, **OTHER_LOSSES["online"])
    initial = job_in(make_recipe, layout, **OTHER_LOSSES["online"] | {"train__objective": {"name": "dpo"}})
    online_stages = stages_on_cpu(job)
    initial_stages = stages_on_cpu(initial)
    for stage, measured in ranks(bytes_of_reference, job.layout.world_size, job):
        online = online_stages[stage]
        without = initial_stages[stage]
        assert online.reference == measured > 0
        assert without.reference == 0
        assert online.allocated - without.allocated == measured


def job_with_teacher(make_recipe: MakeRecipe, folder: Path, layout: str, **changes: Any) -> Job:
    """A job whose teacher has more layers and wider ones than its student, and a vocabulary that is padded further."""
    config = {
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 324,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return job_in(make_recipe, layout, train__distill={"teacher": str(folder), "top_k": 8}, **changes)


def live_teacher(job: Job) -> tuple[list[Collective], int]:
    """Ask the teacher of a job on a live rank what a rehearsal asks it; return collectives and peak."""
    small = rehearsed_teacher(job)
    config = rehearsed_config(small, hidden_size=192, on_gpu=False)
    top = TopTokens(8, 1.0, vocabulary=322)
    with LiveBytes() as memory, CollectiveRecorder(small.layout, dist.get_rank()) as recorder:
        engine = create_engine(small, torch.device("cpu"), config)
        memory.start_peak()
        ask_teacher(engine, small, top)
        return recorder.recorded, memory.peak_bytes


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=pytest.mark.whole) for x in ("z0", "dp2-z3", "dp2-tp2-z1-sp", "u2-z1")],
)
def test_a_teacher_takes_before_training_what_is_rehearsed_and_estimated(
    make_recipe: MakeRecipe, ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    job = job_with_teacher(make_recipe, tmp_path, layout)
    measured = ranks(live_teacher, job.layout.world_size, job)
    rehearsal = rehearse(job, on_gpu=False)
    assert not rehearsal.problem
    assert rehearsal.teacher
    for rehearsed in rehearsal.teacher:
        calls, peak = measured[rehearsed.kind.rank]
        differing = [pair for pair in zip(rehearsed.step.calls, calls, strict=True) if not is_same(*pair)]
        assert not differing
        assert rehearsed.peak == pytest.approx(peak, rel=0.08)
        assert rehearsed.estimated == pytest.approx(peak, rel=0.1)


def check_against_live_ranks(job: Job, ranks: Ranks) -> None:
    measured = ranks(live, job.layout.world_size, job)
    rehearsal = rehearse(job, on_gpu=False)
    assert not rehearsal.problem
    for rehearsed in rehearsal.kinds:
        calls, peak, count = measured[rehearsed.kind.rank]
        predicted = rehearsed.step.calls
        differing = [i for i, pair in enumerate(zip(predicted, calls, strict=False)) if not is_same(*pair)]
        assert not differing, f"{predicted[differing[0]]} | {calls[differing[0]]}"
        assert len(predicted) == count > 0
        assert rehearsed.step.peak == pytest.approx(peak, rel=0.08)


def is_same(predicted: Collective, measured: Collective) -> bool:
    same_message = predicted.message == measured.message
    return predicted.group == measured.group and predicted.fits(measured) and same_message


def rehearse_faulty(make_recipe: MakeRecipe, layout: str) -> str:
    return rehearse(job_in(make_recipe, layout), on_gpu=False).problem


def test_a_model_with_more_parameters_than_a_tensor_has_values_is_rehearsed_under_zero_3(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_values, "_MOST_REAL", 16)  # as 1,092 modules are more than 1,024
    assert not rehearse(job_in(make_recipe, "dp2-z3", LLAMA), on_gpu=False).problem


def test_inner_stages_meet_in_the_order_of_each(make_recipe: MakeRecipe) -> None:
    """Stages 1 and 2 are one kind, and stage 1 runs one more forward pass ahead."""
    rehearsal = rehearse(job_in(make_recipe, "pp4-z1", FOUR_LAYERS), on_gpu=False)
    assert [rehearsed.kind.stages for rehearsed in rehearsal.kinds] == [(0,), (1, 2), (3,)]
    assert not rehearsal.problem


DEEP = {**LLAMA, "overrides": {**LLAMA["overrides"], "num_hidden_layers": 8}}


def test_fewer_layers_have_the_calls_of_all_layers_but_fewer(make_recipe: MakeRecipe) -> None:
    job = job_in(make_recipe, "tp2-pp2-z1", DEEP)
    whole = rehearse(job, on_gpu=False)
    few = rehearse(job, layers=1, on_gpu=False)
    assert not few.problem
    assert (few.layers, few.all_layers, whole.layers) == (2, 8, 8)
    for rehearsed, complete in zip(few.kinds, whole.kinds, strict=True):
        assert rehearsed.kind == complete.kind
        assert rehearsed.peak is None
        assert rehearsed.estimate == complete.estimate
        calls, all_calls = ({call.where for call in kind.step.calls} for kind in (rehearsed, complete))
        assert calls == all_calls
        assert len(rehearsed.step.calls) < len(complete.step.calls)


def test_fewer_layers_have_a_layer_of_every_kind_and_leave_no_stage_empty() -> None:
    assert fewer_layers((0, 20, 40), (0,) * 40, 2) == (0, 2, 4)
    assert fewer_layers((0, 20, 40), (0,) * 5 + (1,) * 35, 2) == (0, 3, 6)
    assert fewer_layers((0, 1, 3), (0, 1, 1), 2) == (0, 1, 3)


@pytest.mark.parametrize("layout", ["dp4-z2", "dp2-tp2-z1"])
def test_muon_exchanges_matrices_as_live_ranks_do(make_recipe: MakeRecipe, ranks: Ranks, layout: str) -> None:
    """What other ranks hold is assumed: with the sizes of an exchange, which nobody compares, it changes no call."""
    job = job_in(make_recipe, layout)
    recipe = job.recipe.changed({"optimizer": {"name": "muon", "lr": 1e-3, "adamw_lr": 1e-3}})
    job = replace(job, recipe=recipe)
    measured = ranks(live, job.layout.world_size, job)
    rehearsal = rehearse(job, on_gpu=False)
    assert not rehearsal.problem
    for rehearsed in rehearsal.kinds:
        live_calls, _, _ = measured[rehearsed.kind.rank]
        kinds, live_kinds = (
            [call.kind for call in calls if call.kind == "all_to_all"] for calls in (rehearsed.step.calls, live_calls)
        )
        assert kinds == live_kinds
        assert kinds


def test_the_config_of_a_gpu_is_rehearsed_without_zero(make_recipe: MakeRecipe) -> None:
    assert not rehearse(job_in(make_recipe, "dp4-z0"), on_gpu=True).problem


def test_a_job_with_adapters_is_rehearsed(make_recipe: MakeRecipe) -> None:
    adapters = {**LLAMA, "lora": {"r": 4, "dropout": 0.1}}
    assert not rehearse(job_in(make_recipe, "dp2-z1", adapters), on_gpu=False).problem


def test_a_rank_that_skips_an_all_reduce_is_named(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [0]

    def skipping(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        seen[0] += 1
        is_skipped = dist.get_rank() == 1 and seen[0] == 4
        return x.clone() if is_skipped else collectives.all_reduce(x, group, dim)

    monkeypatch.setitem(collectives._PAIRS, "reduce", (skipping, collectives._identity))
    problem = rehearse_faulty(make_recipe, "tp2-z1")
    # All ranks are tensor-parallel ones here, which are then called the world.
    assert problem.startswith("call 5 of group world: rank 0 (first rank) has all_reduce [2, 32, 48] float32 in")
    assert "; rank 1 (tensor-parallel 1) has " in problem


def test_a_rank_that_exchanges_heads_in_another_dtype_is_named(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that exchange heads are half of the context-parallel ones."""
    exchange = heads._exchange

    def exchanging(tensor: torch.Tensor, group: Any, *, splits_heads: bool) -> torch.Tensor:
        sent = tensor.double() if dist.get_rank() == 1 else tensor
        return exchange(sent, group, splits_heads=splits_heads).to(tensor.dtype)

    monkeypatch.setattr(heads, "_exchange", exchanging)
    problem = rehearse_faulty(make_recipe, "u2-cp2-z1")
    assert problem.startswith("call 1 of group heads: ")
    assert "rank 0 (first rank) has all_to_all [2, 2, 2, 8, 12] float32" in problem
    assert "rank 1 (context-parallel 1 to 3) has all_to_all [2, 2, 2, 8, 12] float64" in problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensor: tensor[:, 1:].contiguous(), ("[2, 31, 48] float32", "[2, 32, 48] float32")),
        (lambda tensor: tensor.to(torch.bfloat16), ("[2, 32, 48] bfloat16", "[2, 32, 48] float32")),
    ],
    ids=["shape", "dtype"],
)
def test_a_gradient_that_the_stage_before_does_not_expect_is_named(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, change: Any, words: tuple[str, ...]
) -> None:
    from deepspeed.runtime.pipe import p2p

    send = p2p.send

    def sending(tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> Any:
        is_gradient = dest_stage == 0 and tensor.is_floating_point()
        return send(change(tensor) if is_gradient else tensor, dest_stage, async_op)

    monkeypatch.setattr(p2p, "send", sending)
    problem = rehearse_faulty(make_recipe, "pp2-z1")
    assert "of group pipeline" in problem
    assert "first stage" in problem
    assert "last stage" in problem
    assert all(word in problem for word in words)


def test_a_stage_that_receives_before_it_sends_is_named(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.parallel.pipeline.pipeline_module import StepWithoutUpdate

    steps = StepWithoutUpdate.steps

    def swapped(schedule: Any) -> Any:
        for instructions in steps(schedule):
            names = [type(instruction).__name__ for instruction in instructions]
            if schedule.stage_id == 1 and names[:2] == ["SendGrad", "RecvActivation"]:
                instructions = [instructions[1], instructions[0], *instructions[2:]]
            yield instructions

    monkeypatch.setattr(StepWithoutUpdate, "steps", swapped)
    problem = rehearse_faulty(make_recipe, "pp2-z1")
    assert "pipeline" in problem
    assert "stage" in problem


def rehearse_faulty_schedule(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Schedule], Schedule]
) -> str:
    """Rehearse ZB-V on two ranks, of which the second one has a fault in its table."""

    table = Layout.table

    def planted(layout: Layout, micro_batches: int) -> Schedule:
        schedule = table(layout, micro_batches)
        return fault(schedule) if dist.is_initialized() and dist.get_rank() == 1 else schedule

    monkeypatch.setattr(Layout, "table", planted)
    return rehearse(job_in(make_recipe, "pp2-zbv-z1", FOUR_LAYERS), on_gpu=False).problem


def test_a_wrong_order_of_micro_batches_is_named(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages have the same shape: no rank would wait, and the second one would train the wrong micro-batches."""

    def swapped(schedule: Schedule) -> Schedule:
        other = {0: 1, 1: 0}
        orders = tuple(
            tuple((kind, stage, other.get(micro_batch, micro_batch)) for kind, stage, micro_batch in order)
            for order in schedule.orders
        )
        return replace(schedule, orders=orders)

    problem = rehearse_faulty_schedule(make_recipe, monkeypatch, swapped)
    assert problem.startswith("call 1 of group pipeline: rank 0 (pipeline rank 0, first rank) has send ")
    assert "(activation of micro-batch 0 to stage 1)" in problem
    assert "(activation of micro-batch 1 to stage 1)" in problem


@pytest.mark.whole
def test_a_chunk_on_the_wrong_rank_is_named(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank takes the chunks of interleaved 1F1B, 1 and 3, for those of ZB-V, which are 1 and 2."""

    def places(layout: Layout) -> tuple[int, ...]:
        return (0, 1, 0, 1) if dist.is_initialized() and dist.get_rank() == 1 else (0, 1, 1, 0)

    def placed(schedule: Schedule) -> Schedule:
        other = {2: 3, 3: 2}
        orders = tuple(
            tuple((kind, other.get(stage, stage), micro_batch) for kind, stage, micro_batch in order)
            for order in schedule.orders
        )
        return replace(schedule, orders=orders, rank_of=(0, 1, 0, 1))

    monkeypatch.setattr(Layout, "stage_ranks", property(places))
    problem = rehearse_faulty_schedule(make_recipe, monkeypatch, placed)
    assert problem.startswith("rank 1 (pipeline rank 1, first rank) fails in pipeline: waits for the activation of ")
    assert "at stage 3" in problem


def test_code_that_fails_on_one_rank_is_named(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        return collectives.all_reduce(x[:, : 32 - dist.get_rank()], group, dim)

    monkeypatch.setitem(collectives._PAIRS, "reduce", (failing, collectives._identity))
    problem = rehearse_faulty(make_recipe, "tp2-z1")
    assert problem.startswith("rank 1 (tensor-parallel 1) fails in ")
    assert "\n" not in problem


def calls_of(*texts: str) -> list[Collective]:
    """Calls from `all_reduce tensor 4`: kind, group, elements; of a message also `+1` or `-1`."""
    calls = []
    for text in texts:
        kind, group, size, *peer = text.split()
        calls.append(
            Collective(
                kind=kind,
                group=group,
                shapes=((int(size),),),
                dtype="float32",
                nbytes=4 * int(size),
                peer=int(peer[0]) if peer else None,
            )
        )
    return calls


def mismatch(layout: str, *calls: list[Collective]) -> str:
    shape = Layout.parse(layout)
    kinds = rank_kinds(shape, range(shape.pp + 1), (0,) * shape.pp)
    programs = zip(kinds, calls, strict=True)
    difference = find_mismatch(shape, {(kind, stage): program for kind, program in programs for stage in kind.stages})
    return "" if difference is None else str(difference)


def message_calls(*texts: str) -> list[Collective]:
    """Calls of a pipeline schedule from `send 1 F0`: kind, other end, and what the message carries."""
    calls = []
    for text in texts:
        kind, peer, message = text.split()
        (call,) = calls_of(f"{kind} pipeline 4 {peer}")
        calls.append(replace(call, message=message))
    return calls


def test_messages_of_a_schedule_wait_for_nobody() -> None:
    first = message_calls("send 1 F0", "send 1 F1", "receive 1 B0", "wait 1 B0")
    last = message_calls("receive -1 F0", "receive -1 F1", "wait -1 F0", "send -1 B0", "wait -1 F1")
    assert not mismatch("pp2-1f1b", first, last)


def test_ranks_of_a_schedule_that_wait_for_each_other_are_named() -> None:
    first = message_calls("receive 1 B0", "wait 1 B0", "send 1 F0")
    last = message_calls("receive -1 F0", "wait -1 F0", "send -1 B0")
    text = mismatch("pp2-1f1b", first, last)
    assert text.startswith("call 2 of group pipeline: rank 0 (pipeline rank 0, first rank) has wait [4] float32 (B0)")
    assert "rank 1 (pipeline rank 1, first rank) has wait [4] float32 (F0)" in text


def test_ranks_whose_calls_fit_come_to_their_ends() -> None:
    first = calls_of("send pipeline 4 1", "receive pipeline 4 1", "all_reduce world 1")
    inner = calls_of(
        "receive pipeline 4 -1", "send pipeline 4 1", "receive pipeline 4 1", "send pipeline 4 -1", "all_reduce world 1"
    )
    last = calls_of("receive pipeline 4 -1", "send pipeline 4 -1", "all_reduce world 1")
    assert not mismatch("pp4", first, inner, last)


def test_two_ranks_that_both_send_first_wait_for_ever() -> None:
    first = calls_of("send pipeline 4 1", "receive pipeline 4 1")
    text = mismatch("pp2", first, calls_of("send pipeline 4 -1", "receive pipeline 4 -1"))
    assert text.startswith("call 1 of group pipeline: rank 0 (first stage, first rank) has send [4] float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [4, 5])
def test_a_message_is_received_in_the_shape_and_dtype_in_which_it_was_sent(size: int, dtype: str) -> None:
    first = calls_of("send pipeline 4 1", "receive pipeline 4 1")
    received, sent = calls_of("receive pipeline 4 -1", f"send pipeline {size} -1")
    text = mismatch("pp2", first, [received, replace(sent, dtype=dtype)])
    if (size, dtype) == (4, "float32"):
        assert not text
    else:
        assert text.startswith("call 2 of group pipeline: ")
        assert f"rank 1 (last stage, first rank) has send [{size}] {dtype}" in text


def test_groups_that_are_called_in_another_order_wait_for_ever() -> None:
    one = calls_of("all_reduce tensor 4", "all_reduce world 1")
    text = mismatch("tp2-dp2", one, calls_of("all_reduce world 1", "all_reduce tensor 4"), one)
    assert text.startswith(
        "call 1 of group tensor: rank 0 (first rank) has all_reduce [4] float32 of group tensor next"
    )
    assert text.endswith("rank 1 (tensor-parallel 1) has all_reduce [1] float32 of group world next")


@pytest.mark.parametrize(
    ("received", "words"),
    [
        ([4, 2], ""),
        ([4], "rank 0 (first rank) has send [2] float32; rank 1 (context-parallel 1, 2) has none"),
        ([4, 3], "rank 0 (first rank) has send [2] float32; rank 1 (context-parallel 1, 2) has receive [3] float32"),
    ],
)
def test_what_a_rank_sends_round_the_ring_is_what_the_next_receives(received: list[int], words: str) -> None:
    first = calls_of("send context 4 1", "receive context 4 2", "send context 2 1", "receive context 2 2")
    second = calls_of("send context 4 1", *(f"receive context {size} 2" for size in received), "send context 2 1")
    text = mismatch("cp3", first, second)
    assert text == (f"call 2 of group context: {words}" if words else "")


def test_calls_of_a_group_along_no_axis_are_compared() -> None:
    """As of DeepSpeed's quantized gradients, whose ranks are those of a node."""
    calls = [replace(call, ranks=(0, 1)) for call in calls_of("all_reduce node 4", "all_reduce node 5")]
    assert not mismatch("tp2", calls[:1], calls[:1])
    text = mismatch("tp2", calls[:1], calls[1:])
    assert text.startswith("call 1 of group node: rank 0 (first rank) has all_reduce [4] float32; rank 1 ")


def test_a_call_too_few_is_found_at_the_end() -> None:
    text = mismatch("tp2", calls_of("all_reduce world 4", "all_reduce world 4"), calls_of("all_reduce world 4"))
    assert text.startswith("call 2 of group world")
    assert text.endswith("rank 1 (tensor-parallel 1) has none")


def test_inner_stages_with_the_same_layers_are_one_kind() -> None:
    layout = Layout.parse("dp2-tp2-pp4")
    kinds = rank_kinds(layout, (0, 1, 3, 5, 6), (0,) * 6)
    assert [kind.stages for kind in kinds[::3]] == [(0,), (1, 2), (3,)]
    assert sum(kind.count for kind in kinds) == layout.world_size


def test_kinds_count_every_rank_of_context_parallelism_once() -> None:
    kinds = rank_kinds(Layout.parse("dp3-cp2-tp2"), (0, 2), (0,) * 2)
    assert [(kind.name, kind.count, kind.rank) for kind in kinds] == [
        ("first rank", 1, 0),
        ("tensor-parallel 1", 6, 1),
        ("context-parallel 1", 1, 2),
        ("replica 1, 2", 4, 10),
    ]


def test_stages_with_other_layers_are_other_kinds() -> None:
    kinds = rank_kinds(Layout.parse("pp4"), (0, 1, 2, 3, 4), (0, 1, 0, 0))
    assert [kind.stages for kind in kinds] == [(0,), (1,), (2,), (3,)]


def test_peak_counts_all_micro_batches_in_flight(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_in(make_recipe, "pp4-z1", {**LLAMA, "overrides": {**LLAMA["overrides"], "num_hidden_layers": 4}})
    few = rehearse(job, on_gpu=False)
    monkeypatch.setattr("toolkit.recorder.rehearsal.rehearse.rehearsed_micro_batches", lambda job: 24)
    every = rehearse(job, on_gpu=False)
    assert few.micro_batches < every.micro_batches == 24
    for rehearsed, whole in zip(few.kinds, every.kinds, strict=True):
        assert rehearsed.peak == pytest.approx(whole.peak, rel=0.02)
