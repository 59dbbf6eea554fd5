"""The same tokens as text, as rows of ids and as a dataset of Megatron-LM train the same curve."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolkit.config.recipe import Recipe
from toolkit.data.megatron.write import write_megatron
from toolkit.data.tokens.token_cache import prepare
from toolkit.parity import ParityResult
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]
LARGEST_DIFFERENCE = 1e-6
"""Of a loss, over the loss of one process."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "z1": {"dp": 2, "zero_stage": 1},
    "tp2-pp2": {"tp": 2, "pp": 2, "zero_stage": 1},
}
FIELDS = {"data__eval_fraction": 0.0, "train__steps": 6, "batch__micro_batch_size": 2}


@pytest.fixture(scope="module")
def sources(make_recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Fields of `data` for each way to name the tokens of the small corpus."""
    folder = tmp_path_factory.mktemp("tokens")
    text = make_recipe(**FIELDS).data
    files = write_megatron(text, str(folder / "corpus"), progress=False)
    corpus = prepare(text, progress=False)
    documents = np.split(corpus.tokens("train"), corpus.document_offsets("train")[1:-1])
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": document.tolist()}) + "\n" for document in documents))
    tokenizer = {"data__tokenizer": str(files.tokenizer)}
    return {
        "text": {},
        "pretokenized": {**tokenizer, "data__source": str(rows), "data__format": "pretokenized"},
        "megatron": {**tokenizer, "data__source": str(files.prefix)},
    }


@pytest.mark.parametrize("packing", [{}, {"data__document_masking": True}], ids=["packed", "masked"])
def test_one_process_trains_the_same_curve_to_the_last_bit(
    packing: dict[str, Any], make_recipe: Callable[..., Recipe], ranks: Ranks, sources: dict[str, dict[str, Any]]
) -> None:
    def losses(fields: dict[str, Any]) -> list[float]:
        run = ranks(train_in_memory, 1, make_recipe(**FIELDS, **packing, **fields, train__engine="reference"))[0]
        return list(run.curve.losses)

    text, *others = (losses(fields) for fields in sources.values())
    assert len(text) == 6
    assert others == [text, text]


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", ["pretokenized", "megatron"])
def test_layouts_train_what_one_process_trains_from_the_text(
    source: str, layout: str, make_recipe: Callable[..., Recipe], ranks: Ranks, sources: dict[str, dict[str, Any]]
) -> None:
    section = LAYOUTS[layout]
    size = math.prod(section.get(axis, 1) for axis in ("dp", "tp", "pp"))
    baseline = ranks(train_in_memory, 1, make_recipe(**FIELDS, train__engine="reference"))[0]
    recipe = make_recipe(**FIELDS, **sources[source], parallel=section)
    run = ranks(train_in_memory, size, recipe)[0]
    result = ParityResult.of(run, baseline)
    result.check(has_replicas=True)
    assert result.curves.max_loss_difference < LARGEST_DIFFERENCE
