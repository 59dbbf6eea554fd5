"""Context parallelism beside compiled layers, bf16, dropout and a resume, and mistakes that other tools have made.

That its ranks train what one plain PyTorch process trains: test_context_cells.py.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from context_cells import ACTIVE_CLIP, ContextCell
from interrupted_runs import timeless
from matrix import Text

from toolkit.engines.context_slices import ContextSlices
from toolkit.parity import ParityResult, ParityRun, Tolerance, compare_curves
from toolkit.parity.parity_run import tensor_differences, tensor_table
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]
Caught = Callable[[], bool]

BOUND = 1e-6
STEPS = 4


def check_equal(run: ParityRun, baseline: ParityRun) -> None:
    ParityResult.of(run, baseline).check(has_replicas=bool(baseline.replicas_compared))
    assert run.eval_loss == pytest.approx(baseline.eval_loss, rel=BOUND)
    assert min(baseline.curve.grad_norms) > ACTIVE_CLIP


COMPILED = [
    ContextCell(strategy="cp2-z1", family="gemma3_text", data="documents", exchange="ring"),
    ContextCell(strategy="cp2-z3-recompute", data="documents"),
    ContextCell(strategy="cp2-tp2-z1-sp", family="gemma3_text"),
    ContextCell(strategy="cp2-tp2-z3-sp-recompute", data="documents", exchange="ring"),
    ContextCell(strategy="cp2-pp2-z1", family="gemma3_text", data="documents", exchange="ring"),
    ContextCell(strategy="cp2-pp2-z0-recompute", data="packed"),
    ContextCell(strategy="cp2-z2", family="gpt_oss"),
    ContextCell(strategy="cp2-ep2-z1", family="qwen3_moe", data="documents"),
    ContextCell(strategy="u2-cp2-z1", data="documents", exchange="ring"),
    ContextCell(strategy="u2-cp1-z1", family="gpt_oss"),
    ContextCell(strategy="z1", family="gemma2", data="documents"),
    ContextCell(strategy="tp2-z1", data="padded chats"),
]
WATCHED = ("gpt_oss", "qwen3_moe")
"""Mixtures, whose routers are watched here, which breaks graphs; not so in tests/engines/test_compiled_layers.py."""


@pytest.mark.daily
@pytest.mark.parametrize(
    ("backend", "cell"),
    [
        pytest.param(backend, cell, marks=[pytest.mark.whole] if backend == "inductor" or cell != COMPILED[0] else [])
        for backend in ("aot_eager", "inductor")
        for cell in COMPILED
    ],
    ids=str,
)
def test_compiled_layers_attend_in_their_graph_as_eager_ones_do(
    backend: str, cell: ContextCell, text: Text, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for all micro-batches, wherever their documents begin, and for layers with and without a window."""
    if backend == "aot_eager":
        monkeypatch.setattr("toolkit.engines.compiled_layers._OPTIONS", {"backend": backend})
    elif shutil.which("g++") is None:
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    recipe = cell.recipe(text, steps=STEPS)
    eager = ranks(train_in_memory, cell.ranks, recipe)[0]
    compiled = ranks(train_in_memory, cell.ranks, recipe.changed({"train": {"compile": True}}), _compiled)[0]
    check_equal(compiled, eager)
    if cell.family not in WATCHED:
        # A pipeline's stage has layers of its own kinds, and a validation another pass.
        assert compiled.inspected["graph_breaks"] == {}
        assert compiled.inspected["graphs"] <= (3 if "pp" in cell.strategy else 2)


def _compiled(engine: Any) -> dict[str, Any]:
    facts: dict[str, Any] = engine.compiled.facts()
    return facts


@pytest.mark.parametrize(
    "strategy",
    [
        *("cp2-z0", "cp2-z1"),
        *(pytest.param(s, marks=pytest.mark.whole) for s in ("u2-cp1-z0", "cp2-z3", "cp2-tp2-z1-sp", "cp2-pp2-z1")),
    ],
)
def test_bf16_trains_as_one_rank_that_rounds_alike(strategy: str, text: Text, ranks: Ranks) -> None:
    cell = ContextCell(strategy=strategy, exchange="ring", precision="bf16")
    run = ranks(train_in_memory, cell.ranks, cell.recipe(text, steps=STEPS))[0]
    plain = cell.mathematics.recipe(text, steps=STEPS)
    stage = min(1, cell.where.zero_stage)  # without ZeRO, autocast rounds weights of fp32
    alone = ranks(
        train_in_memory, 1, plain.changed({"train": {"engine": "deepspeed"}, "parallel": {"zero_stage": stage}})
    )[0]
    assert run.curve.losses == pytest.approx(alone.curve.losses, rel=1e-3)
    rows = tensor_differences(run.first_gradients, alone.first_gradients)
    assert rows[0].difference < 0.02, "\n" + tensor_table(rows)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["cp2-z0", "cp2-z2"])
def test_compiled_layers_round_to_bf16_as_eager_ones_do(
    strategy: str, text: Text, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast casts operands where a layer is traced, and is off where its graph runs."""
    monkeypatch.setattr("toolkit.engines.compiled_layers._OPTIONS", {"backend": "aot_eager"})
    cell = ContextCell(strategy=strategy, family="gemma2", exchange="ring", precision="bf16")
    recipe = cell.recipe(text, steps=STEPS)
    eager = ranks(train_in_memory, cell.ranks, recipe)[0]
    compiled = ranks(train_in_memory, cell.ranks, recipe.changed({"train": {"compile": True}}), _compiled)[0]
    assert compiled.inspected["graph_breaks"] == {}
    assert compiled.curve.losses == pytest.approx(eager.curve.losses, rel=1e-3)
    rows = tensor_differences(compiled.first_gradients, eager.first_gradients)
    assert rows[0].difference < 0.02, "\n" + tensor_table(rows)


class TestFaults:
    """Mistakes that other tools have made, each planted once."""

    @pytest.fixture
    def is_caught(self, text: Text, ranks: Ranks) -> Caught:
        """Returns whether the first step differs from that of one process."""

        def compare() -> bool:
            cell = ContextCell(strategy="cp2-z1", data="documents", exchange="gather")
            run = ranks(train_in_memory, cell.ranks, cell.recipe(text, steps=1))[0]
            alone = ranks(train_in_memory, 1, cell.mathematics.recipe(text, steps=1))[0]
            return compare_curves(run.curve, alone.curve, Tolerance.fp32()).first_diverging_step == 1

        return compare

    def test_positions_that_restart_in_a_slice(
        self, is_caught: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        take = ContextSlices.take

        def from_zero(slices: Any, micro_batch: Any, sequence: Any) -> Any:
            part = take(slices, micro_batch, sequence)
            return replace(part, position_ids=torch.arange(part.input_ids.shape[1]).expand_as(part.input_ids))

        monkeypatch.setattr(ContextSlices, "take", from_zero)
        assert is_caught()

    def test_documents_that_see_each_other(
        self, is_caught: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ContextSlices, "sequence", lambda slices, micro_batch: slices._plain)
        assert is_caught()

    def test_labels_that_are_shifted_in_a_slice(
        self, is_caught: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        take = ContextSlices.take

        def shifted(slices: Any, micro_batch: Any, sequence: Any) -> Any:
            part = take(slices, micro_batch, sequence)
            part.labels[:, :-1] = part.input_ids[:, 1:]
            return part

        monkeypatch.setattr(ContextSlices, "take", shifted)
        assert is_caught()


def test_ranks_take_the_first_and_the_last_chunks_of_a_sequence(text: Text, ranks: Ranks) -> None:
    cell = ContextCell(strategy="cp2-z1", exchange="gather")
    recipe = cell.recipe(text, steps=1).changed({"train": {"eval_every": 0}})
    taken = [run.inspected for run in ranks(train_in_memory, cell.ranks, recipe, _positions)]
    assert taken == [[*range(8), *range(24, 32)], [*range(8, 24)]]


def _positions(engine: Any) -> list[int]:
    return list(engine.context.positions.tolist())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_repeats_recomputed_or_not(recompute: str, text: Text, ranks: Ranks) -> None:
    recipe = ContextCell(strategy="cp2-z1", family="gpt2", exchange="gather").recipe(text, steps=STEPS)

    def losses(drop: float, recompute: str) -> Any:
        overrides = recipe.model.overrides | {"resid_pdrop": drop}
        changed = recipe.changed({"model": {"overrides": overrides}, "parallel": {"recompute": recompute}})
        return ranks(train_in_memory, 2, changed)[0].curve.losses

    dropped = losses(0.1, recompute)
    assert losses(0.1, "none") == dropped
    if recompute == "none":
        assert losses(0.0, recompute) != dropped


def test_a_run_resumes_in_another_layout_with_the_same_curve(train: Callable[..., str], tmp_path: Path) -> None:
    settings = ("train.steps=6", "checkpoint.every=3")
    model = {"name_or_path": "llama-tiny", "overrides": {"num_hidden_layers": 2, "vocab_size": 321}}
    fields: dict[str, Any] = {"model": model, "world_size": 2, "data__document_masking": True}
    train("run_dir=run", *settings, **fields, parallel={"cp": 2, "zero_stage": 2})
    train("run_dir=on", *settings, "--resume", "run/step-00000003", **fields, parallel={"tp": 2})
    train("run_dir=zero", *settings, "--resume", "run/step-00000003", **fields, parallel={"cp": 2, "zero_stage": 3})
    whole = timeless(tmp_path / "run")[3:]
    for folder in ("on", "zero"):
        resumed = timeless(tmp_path / folder)
        assert [step["batch"] for step in resumed] == [step["batch"] for step in whole]
        assert [step["loss"] for step in resumed] == pytest.approx([step["loss"] for step in whole], rel=BOUND)
