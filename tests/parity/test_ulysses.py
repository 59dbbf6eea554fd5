"""Ranks that share sequences (DeepSpeed-Ulysses) train what one plain PyTorch process trains."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from daily import daily

from toolkit.config.layout import Layout
from toolkit.config.parallel_rules import ULYSSES_FAMILIES
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines import deepspeed_patches, ulysses_engine
from toolkit.engines.base import Engine
from toolkit.errors import ModelError
from toolkit.model_init.document_masking import check_document_masking
from toolkit.parallel.loss import IGNORE
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity import ParityRun, Tolerance, compare_curves
from toolkit.parity.parity_run import tensor_differences, tensor_table, whole_difference
from toolkit.parity.run.train_in_memory import train_in_memory

MakeRecipe = Callable[..., Any]
Ranks = Callable[..., list[Any]]

BOUND = 1e-6
ACTIVE_CLIP = 0.2
"""Below every gradient norm of these runs, so that each step is clipped; a test checks that."""
GLOBAL_BATCH = 8
ACCUMULATION = 2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to train the same steps. `kv`: key-value heads, of 4 heads."""

    u: int
    dp: int = 1
    zero: int
    optimizer: str
    packing: str
    kv: int = 2
    documents: bool = False
    extra: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        packing = "documents" if self.documents else self.packing
        words = [f"u{self.u}-dp{self.dp}-z{self.zero}", self.optimizer, packing, f"kv{self.kv}"]
        return "-".join([*words, *(name for name, _ in self.extra)])

    def changes(self) -> dict[str, Any]:
        return self.mathematics() | {
            "batch": {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": GLOBAL_BATCH // (self.dp * ACCUMULATION)},
            "parallel": {"ulysses": self.u, "zero_stage": self.zero, **dict(self.extra)},
        }

    def mathematics(self) -> dict[str, Any]:
        small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 321}
        adam = self.optimizer == "adamw"
        return {
            "model": {"name_or_path": "llama-tiny", "overrides": small | {"num_key_value_heads": self.kv}},
            "data__packing": self.packing,
            "data__document_masking": self.documents,
            "optimizer": {"name": self.optimizer, "lr": 3e-4 if adam else 0.1, "weight_decay": 0.1},
            "train": {"steps": 10, "seed": 1, "grad_clip": ACTIVE_CLIP, "eval_every": 10, "eval_samples": 11},
        }


CELLS = [
    Cell(u=2, zero=0, optimizer="sgd", packing="padded", kv=1),
    Cell(u=2, zero=1, optimizer="adamw", packing="padded"),
    Cell(u=2, zero=2, optimizer="sgd", packing="packed", extra=(("offload_optimizer", "cpu"),)),
    Cell(u=2, zero=3, optimizer="sgd", packing="padded", extra=(("recompute", "full"),)),
    Cell(u=2, zero=3, optimizer="adamw", packing="packed", extra=(("offload_optimizer", "cpu"),)),
    Cell(u=2, dp=2, zero=0, optimizer="adamw", packing="packed", documents=True),
    Cell(u=2, dp=2, zero=1, optimizer="sgd", packing="padded", extra=(("recompute", "full"),)),
    Cell(u=2, dp=2, zero=2, optimizer="adamw", packing="padded", kv=1),
    Cell(u=2, dp=2, zero=3, optimizer="sgd", packing="padded", kv=1),
    Cell(u=4, zero=0, optimizer="sgd", packing="padded"),
    Cell(u=4, zero=1, optimizer="sgd", packing="padded", kv=1),
    Cell(u=4, zero=2, optimizer="sgd", packing="packed", kv=1, documents=True, extra=(("recompute", "full"),)),
    Cell(u=4, zero=2, optimizer="adamw", packing="padded"),
    Cell(u=4, zero=3, optimizer="adamw", packing="padded", kv=1),
]


@pytest.fixture(scope="module")
def reference(make_recipe: MakeRecipe, ranks: Ranks) -> Callable[[Cell], ParityRun]:
    """The oracle of a cell; each runs once."""
    known: dict[str, ParityRun] = {}

    def of(cell: Cell) -> ParityRun:
        key = repr(cell.mathematics())
        if key not in known:
            batch = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": GLOBAL_BATCH}
            changes = cell.mathematics() | {"batch": batch, "train__engine": "reference"}
            known[key] = ranks(train_in_memory, 1, make_recipe(**changes))[0]
        return known[key]

    return of


def bits(engine: Engine) -> list[bytes]:
    """What this rank holds of each parameter: the same on every rank, where ZeRO-3 does not shard."""
    whole = [p.detach() for p in engine.model.parameters() if not hasattr(p, "ds_tensor")]
    return [value.contiguous().view(torch.uint8).numpy().tobytes() for value in whole]


@pytest.mark.parametrize("cell", daily(CELLS, lambda i, _: i % 2 == 0), ids=str)
def test_shared_sequences_train_what_one_process_trains(
    cell: Cell, reference: Callable[[Cell], ParityRun], make_recipe: MakeRecipe, ranks: Ranks
) -> None:
    baseline = reference(cell)
    runs = ranks(train_in_memory, cell.u * cell.dp, make_recipe(**cell.changes()), bits)
    assert_the_same(runs[0], baseline)
    assert all(run.inspected == runs[0].inspected for run in runs)
    assert min(baseline.curve.grad_norms) > ACTIVE_CLIP


def assert_the_same(run: ParityRun, baseline: ParityRun) -> None:
    rows = tensor_differences(run.first_gradients, baseline.first_gradients)
    report = compare_curves(run.curve, baseline.curve, Tolerance.fp32())
    assert rows[0].difference <= BOUND, "\n" + tensor_table(rows)
    assert report.passed, str(report)
    assert whole_difference(run.parameters, baseline.parameters) <= BOUND
    assert run.eval_loss == (baseline.eval_loss and pytest.approx(baseline.eval_loss, rel=BOUND))


@pytest.mark.parametrize("documents", [False, pytest.param(True, marks=pytest.mark.whole)])
@pytest.mark.parametrize("family", ULYSSES_FAMILIES)
def test_a_family_trains_what_one_process_trains(
    family: str, documents: bool, tmp_path: Path, make_recipe: MakeRecipe, ranks: Ranks
) -> None:
    windows = {"sliding_window": None} if hasattr(tiny_config(family), "sliding_window") else {}
    config = tiny_config(family, vocab_size=321, **windows)
    config.save_pretrained(tmp_path)
    dropout = {name: 0.0 for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)}
    changes = {
        "model": {"name_or_path": str(tmp_path), "overrides": dropout},
        "data__document_masking": documents,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "schedule": {"name": "constant"},
        "train": {"steps": 2, "seed": 1, "grad_clip": ACTIVE_CLIP},
        "batch": {"global_batch_size": 4, "micro_batch_size": 4},
    }
    if documents:
        try:
            check_document_masking(make_recipe(**changes).model, config)
        except ModelError:
            pytest.skip("no layout keeps its documents apart")
    baseline = ranks(train_in_memory, 1, make_recipe(**changes, train__engine="reference"))[0]
    shared = make_recipe(**changes, parallel={"ulysses": 2, "zero_stage": 2})
    assert_the_same(ranks(train_in_memory, 2, shared)[0], baseline)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_gradients_have_the_size_of_those_of_one_rank(stage: int, make_recipe: MakeRecipe, ranks: Ranks) -> None:
    cell = Cell(u=2, zero=stage, optimizer="sgd", packing="padded")
    changes = cell.changes() | {"precision": "bf16", "train__steps": 3}
    shared = ranks(train_in_memory, 2, make_recipe(**changes))[0]
    alone = ranks(train_in_memory, 1, make_recipe(**changes | {"parallel": {"zero_stage": stage}}))[0]
    assert shared.curve.losses == pytest.approx(alone.curve.losses, rel=1e-3)
    assert shared.curve.grad_norms == pytest.approx(alone.curve.grad_norms, rel=1e-2)
    rows = tensor_differences(shared.first_gradients, alone.first_gradients)
    assert rows[0].difference < 0.02, "\n" + tensor_table(rows)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_wrong_divisor_is_caught(
    stage: int,
    reference: Callable[[Cell], ParityRun],
    make_recipe: MakeRecipe,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed's ZeRO-3 divides gradients by another number than its other stages do; Adam alone would hide it."""
    right = deepspeed_patches.gradient_divisor
    factor = 0.5 if stage == 3 else 2.0
    monkeypatch.setattr(deepspeed_patches, "gradient_divisor", lambda layout: right(layout) * factor)
    cell = Cell(u=2, zero=stage, optimizer="adamw", packing="padded")
    run = ranks(train_in_memory, 2, make_recipe(**cell.changes()))[0]
    report = compare_curves(run.curve, reference(cell).curve, Tolerance.fp32())
    rows = tensor_differences(run.first_gradients, reference(cell).first_gradients)
    assert report.first_diverging_step == 1
    assert [row.ratio for row in rows] == pytest.approx([factor] * len(rows), rel=1e-5)


def test_positions_of_the_slice_alone_are_caught(
    reference: Callable[[Cell], ParityRun], make_recipe: MakeRecipe, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = ulysses_engine.UlyssesEngine._local_micro_batch

    def from_zero(engine: Any, micro_batch: MicroBatch) -> MicroBatch:
        own = share(engine, micro_batch)
        assert own.position_ids is not None
        own.position_ids.sub_(own.position_ids[:, :1].clone())
        return own

    monkeypatch.setattr(ulysses_engine.UlyssesEngine, "_local_micro_batch", from_zero)
    cell = Cell(u=2, zero=1, optimizer="adamw", packing="padded")
    run = ranks(train_in_memory, 2, make_recipe(**cell.changes()))[0]
    assert compare_curves(run.curve, reference(cell).curve, Tolerance.fp32()).first_diverging_step == 1


def test_the_divisor_counts_shared_sequences_under_zero_3_alone() -> None:
    divisors = [deepspeed_patches.gradient_divisor(Layout(dp=3, ulysses=2, zero_stage=stage)) for stage in range(4)]
    assert divisors == [3, 3, 3, 6]


def shares(engine: Any) -> list[MicroBatch]:
    """What this rank takes of a micro-batch of two samples of 32 tokens, whose last three labels do not count."""
    tokens = torch.arange(64).reshape(2, 32)
    labels = tokens + 1
    labels[:, -3:] = IGNORE
    return [
        engine._local_micro_batch(MicroBatch(input_ids=tokens, labels=labels, dropout_seed=seed)) for seed in (3, 4)
    ]


def test_ranks_take_consecutive_slices_and_own_random_streams(make_recipe: MakeRecipe, ranks: Ranks) -> None:
    cell = Cell(u=2, dp=2, zero=1, optimizer="sgd", packing="packed")
    runs = ranks(train_in_memory, 4, make_recipe(**cell.changes() | {"train__steps": 1}), shares)
    for replica in (runs[:2], runs[2:]):
        first, second = (run.inspected[0] for run in replica)
        whole = {
            name: torch.cat([getattr(first, name), getattr(second, name)], dim=1)
            for name in ("input_ids", "labels", "position_ids")
        }
        assert whole["input_ids"].flatten().tolist() == list(range(64))
        assert whole["position_ids"].tolist() == [list(range(32))] * 2
        assert (whole["labels"] == IGNORE).sum() == 6
    assert len({share.dropout_seed for run in runs[:2] for share in run.inspected}) == 4


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_is_the_same_in_a_second_run_recomputed_or_not(
    recompute: str, make_recipe: MakeRecipe, ranks: Ranks
) -> None:
    drops = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}

    def curve(overrides: dict[str, float], recompute: str) -> Any:
        recipe = make_recipe(parallel={"ulysses": 2, "recompute": recompute}, train__steps=3)
        model = recipe.model.model_copy(update={"overrides": recipe.model.overrides | overrides})
        return ranks(train_in_memory, 2, recipe.model_copy(update={"model": model}))[0].curve

    dropped = curve(drops, "none")
    assert curve(drops, recompute).losses == dropped.losses
    if recompute == "none":
        assert curve(dict.fromkeys(drops, 0.0), "none").losses != dropped.losses
