"""Conversations, of which only some tokens are targets, train what one plain process trains, whatever the layout."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import SETTINGS, timeless
from small_chats import write_chats, write_tokenizer

from toolkit.config.recipe import Recipe
from toolkit.data.samples.document_samples import DocumentSamples
from toolkit.parallel.loss import IGNORE
from toolkit.parity import ParityResult, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]
LARGEST_DIFFERENCE = 1e-6
"""Of a loss, over the loss of one process."""
MODEL = {
    "name_or_path": "llama-tiny",
    "overrides": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 321,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "z1": {"dp": 2, "zero_stage": 1},
    "z3": {"dp": 2, "zero_stage": 3},
    "pp2": {"pp": 2, "zero_stage": 1},
    "tp2-pp2": {"tp": 2, "pp": 2, "zero_stage": 1},
    "z1-u2": {"ulysses": 2, "zero_stage": 1},
    "z3-u2": {"ulysses": 2, "zero_stage": 3},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Chats, most of them shorter than a row and some longer."""
    folder = tmp_path_factory.mktemp("chats")
    return {
        "source": str(write_chats(folder / "chats.jsonl")),
        "tokenizer": str(write_tokenizer(folder / "tokenizer")),
        "format": "chat",
        "seq_len": 64,
        "workers": 1,
        "cache_dir": str(folder / "cache"),
        "eval_fraction": 0.0,
    }


@pytest.fixture(scope="module")
def chats(make_recipe: Callable[..., Recipe], data: dict[str, Any]) -> Callable[..., Recipe]:
    """A small recipe of them."""

    def make(**changes: Any) -> Recipe:
        fields = {"model": MODEL, "data": {**data}, "train__steps": 6, "batch__micro_batch_size": 2}
        return make_recipe(**{**fields, **changes})

    return make


def check_equal(run: ParityRun, baseline: ParityRun, layout: str) -> None:
    result = ParityResult.of(run, baseline)
    result.check(has_replicas=layout in ("z1", "tp2-pp2", "z1-u2"))
    assert result.curves.max_loss_difference < LARGEST_DIFFERENCE


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        ("z3", {}),
        ("tp2-pp2", {"train_on": "last_assistant"}),
        ("z3-u2", {}),
        pytest.param("z1-u2", {"overlong": "split"}, marks=pytest.mark.whole),
        pytest.param("z1", {"packing": "padded"}, marks=pytest.mark.whole),
        pytest.param("pp2", {"overlong": "split"}, marks=pytest.mark.whole),
    ],
    ids=str,
)
def test_chats_train_what_one_process_trains(
    chats: Callable[..., Recipe], ranks: Ranks, layout: str, choice: dict[str, Any]
) -> None:
    fields = {f"data__{name}": value for name, value in choice.items()}
    section = LAYOUTS[layout]
    size = math.prod(section.get(axis, 1) for axis in ("dp", "tp", "pp", "ulysses"))
    baseline = ranks(train_in_memory, 1, chats(**fields, train__engine="reference"))[0]
    run = ranks(train_in_memory, size, chats(**fields, parallel=section))[0]
    check_equal(run, baseline, layout)


def test_chats_resume_in_another_layout_with_the_same_curve(
    train: Callable[..., str], tmp_path: Path, data: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"model": MODEL, "world_size": 2, "batch__micro_batch_size": 2}
    shown = train("run_dir=run", *SETTINGS, **changes, data={**data}, parallel={"zero_stage": 2})
    assert "longer than 65 tokens truncated" in shown
    train("run_dir=on", *SETTINGS, "--resume", "run/step-00000005", **changes, data={**data}, parallel={"tp": 2})
    resumed, whole = timeless(tmp_path / "on"), timeless(tmp_path / "run")[5:]
    assert [step["batch"] for step in resumed] == [step["batch"] for step in whole]
    assert [step["loss"] for step in resumed] == pytest.approx([step["loss"] for step in whole], rel=LARGEST_DIFFERENCE)


def _without_every_other_target(recipe: Recipe) -> ParityRun:
    """Train with rows that have no target at all, where each is a micro-batch and every other one is a rank's."""
    tokens = DocumentSamples.tokens

    def masked(self: DocumentSamples, index: int, held: Any = None) -> Any:
        input_ids, labels = tokens(self, index, held)
        if index % 2:
            labels[:] = IGNORE
        return input_ids, labels

    def counted(self: DocumentSamples, step: int, positions: Any) -> int:
        return sum(int((masked(self, index)[1] != IGNORE).sum()) for index in self.sample_ids(step, positions).tolist())

    DocumentSamples.tokens = masked  # type: ignore[method-assign]
    DocumentSamples.target_count = counted  # type: ignore[method-assign]
    return train_in_memory(recipe)


@pytest.mark.parametrize("layout", ["z1", "pp2"])
def test_micro_batches_and_ranks_without_a_target_count_for_nothing(
    chats: Callable[..., Recipe], ranks: Ranks, layout: str
) -> None:
    small = {"batch": {"global_batch_size": 8, "micro_batch_size": 1}, "train__steps": 4}
    baseline = ranks(_without_every_other_target, 1, chats(**small, train__engine="reference"))[0]
    run = ranks(_without_every_other_target, 2, chats(**small, parallel=LAYOUTS[layout]))[0]
    check_equal(run, baseline, layout)
