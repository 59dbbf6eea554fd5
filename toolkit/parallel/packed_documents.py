"""Tells transformers whether rows hold several packed documents, so that it does not read that from the GPU in every
forward pass.

transformers masks other documents where position ids restart inside a row. Whether some do decides which mask a model
makes, so transformers 5.23 reads the answer from the device in every forward pass (transformers/masking_utils.py
`find_packed_sequence_indices`), also where the ids are those that it has counted up itself: the host waits until all
that it has launched is computed. A micro-batch is made on the host, which looks there.

Dims: b samples, s positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import masking_utils


@contextmanager
def documents_known(*, are_packed: bool) -> Iterator[None]:
    """Let models make their masks inside without looking for documents: there are some in a row, or none at all."""
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _number_documents if are_packed else _no_documents
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def _number_documents(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's document in its row, from 0, [b, s]."""
    starts = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
    return starts.cumsum(dim=-1)


def _no_documents(position_ids: torch.Tensor) -> None:
    """Return what transformers returns for rows of one document each."""
