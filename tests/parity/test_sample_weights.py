"""Weights of rows: the losses of a row's targets, or that of a pair, are multiplied by it, in every layout."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_fine_tuning import save_base
from small_chats import turns, write_tokenizer
from small_preferences import make_pairs, words, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.config import recipe_problems
from toolkit.config.recipe import Recipe
from toolkit.data.documents.rows import RowReader
from toolkit.data.tokens.token_cache import prepare
from toolkit.errors import DataError
from toolkit.parity import ParityResult
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]
Make = Callable[..., Recipe]
LARGEST_DIFFERENCE = 1e-6
ROWS = 24


def write_weighted(folder: Path, row_format: str, weight: Callable[[int], float]) -> Path:
    """Rows of this format with the weights that `weight` returns for their numbers."""
    rng = random.Random(3)
    rows: list[dict[str, Any]] = [{"text": words(rng)} for _ in range(ROWS)]
    if row_format == "chat":
        rows = [{"messages": turns(words(rng, 5), words(rng))} for _ in range(ROWS)]
    if row_format == "preference":
        rows = make_pairs(ROWS)
    return write_rows(folder / f"{row_format}.jsonl", [row | {"score": weight(i)} for i, row in enumerate(rows)])


@pytest.fixture
def weighted(make_recipe: Make, tmp_path: Path) -> Make:
    """A small recipe of weighted rows; `weight` is a function of the number of a row."""
    made = iter(range(100))

    def make(row_format: str, weight: Callable[[int], float], **changes: Any) -> Recipe:
        folder = tmp_path / str(next(made))
        folder.mkdir()
        own = {name.removeprefix("data__"): changes.pop(name) for name in [*changes] if name.startswith("data__")}
        data = {
            "source": str(write_weighted(folder, row_format, weight)),
            "tokenizer": str(write_tokenizer(folder / "tokenizer")),
            "format": row_format,
            "weight_field": "score",
            "seq_len": 64,
            "packing": "packed" if row_format == "preference" else "padded",
            "workers": 1,
            "cache_dir": str(folder / "cache"),
            "eval_fraction": 0.0,
        }
        fields = {
            "model": {"name_or_path": str(save_base(tmp_path / "base", "llama")), "init": "pretrained"},
            "data": data | own,
            "train__steps": 6,
            "batch": {"global_batch_size": 8, "micro_batch_size": 2},
            "optimizer": {"name": "adamw", "lr": 3e-4},
            "schedule": {"name": "constant"},
        }
        return make_recipe(**{**fields, **changes})

    return make


def some_weight(number: int) -> float:
    return (0.0, 0.5, 1.0, 2.5)[number % 4]


def losses_by_row(recipe: Recipe) -> tuple[list[torch.Tensor], list[int]]:
    """The summed token losses of each row, which goes through Hugging Face's model alone, and its targets."""
    model = AutoModelForCausalLM.from_pretrained(recipe.model.name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(recipe.data.tokenizer)
    sums, counts = [], []
    for line in Path(recipe.data.source).read_text().splitlines():
        ids = torch.tensor([*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id])
        logits = model(input_ids=ids[None, :-1]).logits[0]
        sums.append(torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="sum"))
        counts.append(len(ids) - 1)
    return sums, counts


def first_gradients(recipe: Recipe, ranks: Ranks) -> tuple[float, dict[str, Any]]:
    run = ranks(train_in_memory, 1, recipe)[0]
    return run.curve.losses[0], dict(run.first_gradients)


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_losses_of_a_row_are_multiplied_by_its_weight(weighted: Make, ranks: Ranks, packing: str) -> None:
    batch = {"global_batch_size": ROWS, "micro_batch_size": 4}
    data: dict[str, Any] = {"data__packing": packing}
    if packing == "packed":  # the whole text is one window: its last token is a target
        data |= {"data__document_masking": True}
    recipe = weighted("text", some_weight, train__steps=1, train__engine="reference", batch=batch, **data)
    if packing == "packed":
        tokens = prepare(recipe.data, progress=False).train_tokens
        recipe = recipe.changed(
            {"data": {"seq_len": tokens - 1}, "batch": {"global_batch_size": 1, "micro_batch_size": 1}}
        )
    loss, gradients = first_gradients(recipe, ranks)
    sums, counts = losses_by_row(recipe)
    expected = sum(some_weight(i) * each for i, each in enumerate(sums)) / sum(counts)
    assert loss == pytest.approx(float(expected), rel=LARGEST_DIFFERENCE)
    other, _ = first_gradients(recipe.changed({"data": {"weight_field": None}}), ranks)
    assert other == pytest.approx(float(sum(sums) / sum(counts)), rel=LARGEST_DIFFERENCE)
    assert abs(other - loss) > 0.01
    assert gradients


def test_weights_of_one_are_no_weights(weighted: Make, ranks: Ranks) -> None:
    recipe = weighted("chat", lambda _: 1.0, train__engine="reference")
    weights = ranks(train_in_memory, 1, recipe)[0].curve.losses
    none = ranks(train_in_memory, 1, recipe.changed({"data": {"weight_field": None}}))[0].curve.losses
    assert weights == pytest.approx(none, rel=LARGEST_DIFFERENCE)


LAYOUTS: dict[str, dict[str, Any]] = {
    "z0": {"dp": 2, "zero_stage": 0},
    "z3": {"dp": 2, "zero_stage": 3},
    "tp2-sp": {"tp": 2, "zero_stage": 1, "sequence_parallel": True},
    "pp2": {"pp": 2, "zero_stage": 1},
    "u2": {"ulysses": 2, "zero_stage": 1},
    "cp2": {"cp": 2, "zero_stage": 1},
    "pp2-zbh1": {"pp": 2, "zero_stage": 1, "schedule": "zb-h1"},
}
DAILY = (("text", "pp2-zbh1"), ("chat", "u2"), ("chat", "cp2"), ("preference", "tp2-sp"))
CELLS = [
    pytest.param(row_format, layout, marks=() if (row_format, layout) in DAILY else pytest.mark.whole)
    for row_format in ("text", "chat", "preference")
    for layout in LAYOUTS
    if (row_format, layout) != ("preference", "pp2-zbh1")  # refused
]


@pytest.mark.parametrize(("row_format", "layout"), CELLS)
def test_weights_train_what_they_do_in_one_process(weighted: Make, ranks: Ranks, row_format: str, layout: str) -> None:
    changes: dict[str, Any] = {}
    if row_format == "preference":
        changes = {"train__objective": {"name": "dpo"}, "data__seq_len": 128}
    baseline = ranks(train_in_memory, 1, weighted(row_format, some_weight, train__engine="reference", **changes))[0]
    run = ranks(train_in_memory, 2, weighted(row_format, some_weight, parallel=LAYOUTS[layout], **changes))[0]
    result = ParityResult.of(run, baseline)
    assert result.passed, str(result)
    assert result.curves.max_loss_difference < LARGEST_DIFFERENCE


@pytest.mark.whole
def test_full_logits_give_the_same_as_chunks_of_them(weighted: Make, ranks: Ranks) -> None:
    recipe = weighted("text", some_weight, parallel={"pp": 2, "zero_stage": 1})
    chunked = ranks(train_in_memory, 2, recipe)[0].curve.losses
    plain = ranks(train_in_memory, 2, recipe.changed({"model": {"loss": "plain"}}))[0].curve.losses
    assert plain == pytest.approx(chunked, rel=LARGEST_DIFFERENCE)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "a"}, "has no such field"),
        ({"text": "a", "score": None}, "score is None. A weight is a finite number of at least 0."),
        ({"text": "a", "score": -1}, "score is -1."),
        ({"text": "a", "score": "2"}, "score is '2'."),
        ({"text": "a", "score": True}, "score is True."),
        ({"text": "a", "score": float("nan")}, "score is nan."),
    ],
    ids=str,
)
def test_a_row_without_a_weight_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError) as refused:
        RowReader(weight_field="score").read(row, lambda: "rows.jsonl:1")
    assert problem in str(refused.value)


def test_a_text_that_is_no_row_is_refused(weighted: Make, tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    path.write_text("one two three")
    with pytest.raises(DataError, match="a text that is not a row of a table or of JSONL has no fields"):
        prepare(weighted("text", some_weight, data__source=str(path)).data, progress=False)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"data__format": "pretokenized"}, "rows of ids have no weights"),
        ({"data__source": "stdlib", "data__text_field": "text"}, "it has no rows with fields"),
        ({"data__sources": [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]}, "rows of a mixture have no"),
    ],
    ids=str,
)
def test_data_without_weighted_rows_is_refused(make_recipe: Make, data: dict[str, Any], problem: str) -> None:
    problems = recipe_problems(make_recipe(data__weight_field="score", **data))
    assert any(problem in line for line in problems), problems
