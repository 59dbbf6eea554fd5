"""Models make the masks that they would make if they looked for documents on the device, which they no longer do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.data.tokens.token_cache import prepare
from toolkit.parallel.packed_documents import documents_known

ROWS = {
    "one document each": [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]],
    "the rest of a document each": [[4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4, 5]],
    "two documents and one": [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]],
    "documents of one token": [[0, 0, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3]],
}


@pytest.mark.parametrize("name", ROWS)
def test_documents_are_those_that_transformers_finds(name: str) -> None:
    positions = torch.tensor(ROWS[name])
    batch = MicroBatch(input_ids=positions, labels=positions, position_ids=positions)
    wanted = masking_utils.find_packed_sequence_indices(positions)
    assert batch.is_packed is (wanted is not None)
    with documents_known(are_packed=bool(batch.is_packed)):
        documents = masking_utils.find_packed_sequence_indices(positions)
    assert (documents is None) is (wanted is None)
    assert wanted is None or torch.equal(documents, wanted)


def test_transformers_looks_for_documents_again_behind_a_forward_pass() -> None:
    find = masking_utils.find_packed_sequence_indices
    with pytest.raises(KeyError), documents_known(are_packed=True):
        raise KeyError
    assert masking_utils.find_packed_sequence_indices is find


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_stage_that_reads_no_tokens_knows_which_micro_batches_are_packed(
    make_recipe: Callable[..., Recipe], packing: str
) -> None:
    changes: dict[str, Any] = {"parallel": {"pp": 4}, "overrides__n_layer": 4, "batch__micro_batch_size": 1}
    data = {"packing": packing, "document_masking": packing == "packed"}
    recipe = make_recipe(**changes, train__steps=3, train__eval_every=1).changed({"data": data})
    job = Job.of(recipe, 4)
    tokens = prepare(recipe.data, progress=False)
    known = []
    for rank in (0, 1):
        loader = MicroBatchLoader.open(job, tokens, rank=rank)
        with loader.prefetch() as ahead:
            known.append([batch.is_packed for batch in ahead])
        known[-1] += [batch.is_packed for batch in loader.validation_batches()]
    assert known[0] == known[1]
    assert any(known[0]) is (packing == "packed")
