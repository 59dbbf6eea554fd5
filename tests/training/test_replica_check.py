"""train.replica_check: a bit that flips in one replica is found, the rank is named, and the run rolls back."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interrupted_runs import assert_same_bits, timeless
from refusals import refused
from rehearsed_models import EXPERTS

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.full_forward import DataParallelEngine
from toolkit.engines.optimizer_states import MASTER
from toolkit.engines.replicas import BUFFER, PARTITION, WEIGHT, Replicas, _judge, _Mismatch, checksum
from toolkit.errors import ReplicaError, RunError
from toolkit.training.loop import TrainingRun
from toolkit.training.replica_check import ReplicaCheck

Train = Callable[..., str]
SETTINGS = ("checkpoint.every=4", "train.replica_check=2", "schedule.warmup_steps=6", "train.steps=8")
RANKS = 4
WRONG = 2
"""The rank in which a bit flips."""
NORM = "transformer.h.1.ln_2.weight"
"""Replicated over tensor-parallel ranks."""
MATRIX = "transformer.h.0.mlp.c_fc.weight"
EMBEDDING = "transformer.wte.weight"
"""Tied to the head: in a pipeline, the first and the last stage hold it."""


def settings_of(name: str, make_recipe: Callable[..., Recipe]) -> dict[str, Any]:
    """The changes of a recipe that train a strategy on four ranks."""
    strategy = Strategy.parse(name)
    return {
        "parallel": strategy.apply(make_recipe(), RANKS).parallel.model_dump(exclude_defaults=True),
        "train__engine": strategy.engine,
        "world_size": strategy.world_size(RANKS),
    }


def plant(monkeypatch: pytest.MonkeyPatch, kind: str, name: str, *, step: int, again: bool = False) -> None:
    """Flip a bit in a tensor of one rank as `step` begins, once or each time."""
    take_step, planted = TrainingRun._take_step, [False]

    def disturbed(run: TrainingRun, batches: Any) -> bool:
        if run.step + 1 == step and dist.get_rank() == WRONG and (again or not planted[0]):
            planted[0] = True
            parameter = dict(run.engine.named_parameters())[name]
            value = parameter.data
            if kind == PARTITION:
                value = parameter.ds_tensor.data  # type: ignore[attr-defined]
            elif kind != WEIGHT:
                value = run.engine.states.local(parameter, kind)
            bits = value.reshape(-1).view(torch.int32)
            bits[3] ^= 1 << 18
            assert bits.data_ptr() == value.data_ptr()
        return take_step(run, batches)

    monkeypatch.setattr(TrainingRun, "_take_step", disturbed)


def events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


DIFFERS = f"rank {WRONG} (HOST) differs from the other replicas in "
PLANTED = [
    # strategy, kind, name, step in which the bit flips, what the message says
    ("dp4-z0", "exp_avg_sq", MATRIX, 5, f"{DIFFERS}{MATRIX} (exp_avg_sq)"),
    ("dp4-z0", WEIGHT, MATRIX, 5, f"{DIFFERS}{MATRIX} (master), {MATRIX} (weight)"),
    ("ddp", WEIGHT, NORM, 5, f"{DIFFERS}{NORM} (master), {NORM} (weight)"),
    ("dp4-z2", WEIGHT, MATRIX, 6, f"{DIFFERS}{MATRIX} (weight)"),
    ("tp2-dp2-z1", WEIGHT, NORM, 6, f"{DIFFERS}{NORM} (weight)"),
    ("tp2-dp2-z1", WEIGHT, MATRIX, 6, f"ranks 0 (HOST), 2 (HOST) differ in {MATRIX} (weight)"),
    ("tp2-dp2-z0", "exp_avg", NORM, 5, f"{DIFFERS}{NORM} (weight)"),
    ("tp2-dp2-z3", WEIGHT, NORM, 6, f"{DIFFERS}{NORM} (weight)"),
    ("pp2-dp2-z1", WEIGHT, EMBEDDING, 6, f"{DIFFERS}{EMBEDDING} (weight)"),
]
DAILY = (1, 4)


@pytest.mark.parametrize(
    ("name", "kind", "parameter", "step", "message"),
    [
        pytest.param(*case, id=f"{case[0]} {case[1]} {case[2]}", marks=[] if number in DAILY else pytest.mark.whole)
        for number, case in enumerate(PLANTED)
    ],
)
def test_a_flipped_bit_is_found_named_and_undone(
    train: Train,
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    parameter: str,
    step: int,
    message: str,
) -> None:
    where = settings_of(name, make_recipe)
    train("run_dir=wanted", *SETTINGS, **where)
    monkeypatch.setattr("socket.gethostname", lambda: "HOST")
    plant(monkeypatch, kind, parameter, step=step)
    output = train("run_dir=run", *SETTINGS, **where).replace("\n", " ")
    assert f"step 6: {message}" in output
    assert "Rolled back to step-00000004; the steps since are taken again" in output
    [event] = events(tmp_path / "run")
    assert (event["kind"], event["step"], event["to"], event["skipped_batches"]) == ("rollback", 6, 4, 0)
    assert timeless(tmp_path / "run") == timeless(tmp_path / "wanted")
    assert_same_bits(tmp_path / "run" / "step-00000008", tmp_path / "wanted" / "step-00000008")
    assert events(tmp_path / "wanted") == []


NO_ALARMS = (
    *("ddp", "fsdp", "dp4-z1-offload", "dp4-z3", "dp4-z3-offload", "tp4-z0", "tp2-sp-dp2-z2", "tp2-sp-dp2-z3"),
    *("pp2-tp2-z1", "pp2-dp2-z0", "u2-dp2-z3"),
)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if name == "pp2-tp2-z1" else pytest.mark.whole)
        for name in NO_ALARMS
        for precision in ("fp32", "bf16")
        if not (name.endswith("z0") and precision == "bf16")  # which DeepSpeed cannot do with tp or pp
    ],
)
def test_replicas_that_agree_raise_no_alarm(
    train: Train, make_recipe: Callable[..., Recipe], tmp_path: Path, name: str, precision: str
) -> None:
    settings = ("train.replica_check=1", "train.steps=6", "checkpoint.every=3", "schedule.warmup_steps=2")
    train("run_dir=run", *settings, f"precision={precision}", **settings_of(name, make_recipe))
    assert len(timeless(tmp_path / "run")) == 6
    assert events(tmp_path / "run") == []


def test_a_bit_that_flips_again_and_again_ends_the_run(
    train: Train, make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = settings_of("dp4-z1", make_recipe)
    monkeypatch.setattr("socket.gethostname", lambda: "HOST")
    plant(monkeypatch, WEIGHT, MATRIX, step=6, again=True)
    with pytest.raises(ReplicaError) as raised:
        train("run_dir=run", *SETTINGS, "train.max_incidents=1", **where)
    assert str(raised.value).startswith(f"step 6: {DIFFERS}{MATRIX} (weight), again after 1 rollbacks to step 4. Take")


LABELS = [
    # strategy, and which kinds of a matrix and of a norm some other rank holds
    ("dp4-z0", {WEIGHT, MASTER, "exp_avg", "exp_avg_sq"}, {WEIGHT, MASTER, "exp_avg", "exp_avg_sq"}),
    ("dp4-z1", {WEIGHT}, {WEIGHT}),
    ("dp4-z3", set(), {WEIGHT}),
    ("tp4-z0", set(), {WEIGHT, MASTER, "exp_avg", "exp_avg_sq"}),
    ("tp2-dp2-z3", set(), {WEIGHT, PARTITION, MASTER, "exp_avg", "exp_avg_sq"}),
    ("fsdp", set(), set()),
]


@pytest.mark.parametrize(
    ("name", "matrix", "norm"),
    [pytest.param(*case, marks=[] if case[0] == "tp2-dp2-z3" else pytest.mark.whole, id=case[0]) for case in LABELS],
)
def test_what_is_compared_is_what_a_layout_replicates(
    train: Train,
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    matrix: set[str],
    norm: set[str],
) -> None:
    def written(check: ReplicaCheck, run: TrainingRun) -> None:
        labels = Replicas(run.engine).labels
        (tmp_path / f"labels-{dist.get_rank()}").write_text(json.dumps(sorted(labels)))

    monkeypatch.setattr(ReplicaCheck, "on_run_begin", written)
    where = settings_of(name, make_recipe)
    train("run_dir=run", "train.replica_check=5", "train.steps=1", "schedule.warmup_steps=0", **where)
    labels = set(json.loads((tmp_path / f"labels-{WRONG}").read_text()))
    kinds = (WEIGHT, PARTITION, MASTER, "exp_avg", "exp_avg_sq", BUFFER)
    assert {kind for kind in kinds if f"{MATRIX} ({kind})" in labels} == matrix
    assert {kind for kind in kinds if f"{NORM} ({kind})" in labels} == norm


class TestChecksum:
    def test_it_is_the_weighted_sum_of_the_bits(self) -> None:
        values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        bits = values.view(torch.int32).tolist()
        wanted = sum(value * (2 * index + 1) for index, value in enumerate(bits)) % 2**64
        assert int(checksum(values)) % 2**64 == wanted

    def test_long_tensors_are_summed_in_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        values = torch.randn(1001, generator=torch.Generator().manual_seed(0)).bfloat16()
        whole = int(checksum(values))
        monkeypatch.setattr("toolkit.engines.replicas._CHUNK", 64)
        assert int(checksum(values)) == whole

    def test_any_two_flipped_bits_change_it(self) -> None:
        values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
        whole = int(checksum(values))
        draw = random.Random(0)
        for _ in range(300):
            changed = values.clone()
            bits = changed.view(torch.int32)
            for index in draw.sample(range(4096), draw.choice((1, 2))):
                bits[index] ^= 1 << draw.randrange(31)
            assert int(checksum(changed)) != whole

    def test_two_elements_that_change_places_change_it(self) -> None:
        assert int(checksum(torch.tensor([1.0, 2.0]))) != int(checksum(torch.tensor([2.0, 1.0])))


class TestJudge:
    def test_a_minority_is_named(self) -> None:
        difference = _judge({_Mismatch(label="w", ranks=(0, 2, 4), sums=(7, 7, 8))}, list("abcde"))
        assert str(difference) == "rank 4 (e) differs from the other replicas in w"

    def test_of_two_replicas_the_wrong_one_cannot_be_told(self) -> None:
        difference = _judge({_Mismatch(label="w", ranks=(0, 2), sums=(7, 8))}, list("abcd"))
        assert str(difference) == "ranks 0 (a), 2 (c) differ in w"

    def test_the_rank_that_differs_along_two_axes_is_named(self) -> None:
        along_data = _Mismatch(label="w", ranks=(0, 2), sums=(7, 8))
        along_tensor = _Mismatch(label="w", ranks=(2, 3), sums=(8, 7))
        consequence = _Mismatch(label="v", ranks=(0, 1), sums=(3, 4))
        difference = _judge({along_data, along_tensor, consequence}, list("abcd"))
        assert str(difference) == "rank 2 (c) differs from the other replicas in w"


REPEATED = ("dp4-z1", "dp4-z0", "ddp", "dp2-tp2-z1", "dp2-tp2-z2-sp")


def plant_in_gradients(monkeypatch: pytest.MonkeyPatch, name: str, *, step: int, again: bool = False) -> None:
    """Have one rank compute a wrong gradient of a parameter in a step, once or each time."""
    take_step, planted = TrainingRun._take_step, [False]

    def disturbed(run: TrainingRun, batches: Any) -> bool:
        if run.step + 1 != step or dist.get_rank() != WRONG or (planted[0] and not again):
            return take_step(run, batches)
        planted[0] = True
        parameter = dict(run.engine.named_parameters())[name]
        hook = parameter.register_hook(lambda gradient: gradient * (1 + 2**-20))
        try:
            return take_step(run, batches)
        finally:
            hook.remove()

    monkeypatch.setattr(TrainingRun, "_take_step", disturbed)


REPEATS = ("checkpoint.every=4", "train.repeat_check=2", "schedule.warmup_steps=6", "train.steps=8")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "dp4-z1" else pytest.mark.whole) for name in REPEATED]
)
def test_a_wrong_gradient_of_one_rank_is_found_named_and_undone(
    train: Train, make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    where = settings_of(name, make_recipe)
    train("run_dir=wanted", *REPEATS[:1], *REPEATS[2:], **where)
    monkeypatch.setattr("socket.gethostname", lambda: "HOST")
    plant_in_gradients(monkeypatch, MATRIX, step=6)
    output = train("run_dir=run", *REPEATS, **where).replace("\n", " ")
    of_two = "tp2" in name
    named = (
        f"ranks 0 (HOST), {WRONG} (HOST) differ in"
        if of_two
        else f"rank {WRONG} (HOST) differs from the other replicas in"
    )
    assert f"step 6: {named} {MATRIX} (gradient) when all replicas compute the same micro-batch" in output
    assert "Rolled back to step-00000004; the steps since are taken again" in output
    [event] = events(tmp_path / "run")
    assert (event["kind"], event["step"], event["to"]) == ("rollback", 6, 4)
    assert timeless(tmp_path / "run") == timeless(tmp_path / "wanted")
    assert_same_bits(tmp_path / "run" / "step-00000008", tmp_path / "wanted" / "step-00000008")


@pytest.mark.whole
def test_a_wrong_gradient_of_an_expert_is_found_among_the_ranks_that_hold_it(
    train: Train, make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = settings_of("dp4-ep2-z1", make_recipe)
    monkeypatch.setattr("socket.gethostname", lambda: "HOST")
    plant_in_gradients(monkeypatch, "model.layers.1.mlp.experts.down_proj", step=6)
    output = train("run_dir=run", *REPEATS, model=EXPERTS, **where).replace("\n", " ")
    assert f"step 6: ranks 0 (HOST), {WRONG} (HOST) differ in model.layers.1.mlp.experts.down_proj (gradient)" in output
    assert [(event["kind"], event["step"], event["to"]) for event in events(tmp_path / "run")] == [("rollback", 6, 4)]


@pytest.mark.whole
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_micro_batch_leaves_no_trace(
    train: Train, make_recipe: Callable[..., Recipe], tmp_path: Path, name: str, precision: str
) -> None:
    where = settings_of(name, make_recipe)
    train("run_dir=wanted", *REPEATS[2:], f"precision={precision}", **where)
    train("run_dir=run", *REPEATS[2:], "train.repeat_check=1", f"precision={precision}", **where)
    assert events(tmp_path / "run") == []
    assert timeless(tmp_path / "run") == timeless(tmp_path / "wanted")


def test_gradients_that_no_rank_computes_twice_alike_are_refused(
    train: Train, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat = DataParallelEngine.repeat
    calls = [0]

    def nearly(engine: DataParallelEngine, micro_batch: Any) -> dict[str, torch.Tensor]:
        calls[0] += 1
        return {name: value * (1 + calls[0] * 2**-20) for name, value in repeat(engine, micro_batch).items()}

    monkeypatch.setattr(DataParallelEngine, "repeat", nearly)
    with refused(RunError, "train.repeat_check", remedy=("train.repeat_check", 0)):
        train("run_dir=run", *REPEATS, **settings_of("dp4-z1", make_recipe))
