"""What a rank keeps under context parallelism: the recording of its share of positions, against live ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measured_activations import SEQ_LEN, Case, kept_bytes

from toolkit.parallel.context.attention import NAME, attending, register
from toolkit.parallel.context.exchange import make_exchange
from toolkit.parallel.context.sequence import SequenceSlice


def _kept(case: Case) -> int:
    """On one of the ranks that share each sequence."""
    register()
    group: Any = dist.group.WORLD
    starts = tuple(range(0, 2 * SEQ_LEN, 2 * SEQ_LEN // case.documents))
    sequence = SequenceSlice(rank=group.rank(), ranks=2, length=2 * SEQ_LEN, starts=(starts,) * case.samples)
    model = case.model()
    model.set_attn_implementation(NAME)
    with attending(sequence, make_exchange(group, "gather")):
        return kept_bytes(case, model)


@pytest.mark.parametrize(
    "case",
    [
        Case(family="llama"),
        Case(family="qwen3", dtype=torch.float32, samples=1),
        Case(family="llama", recompute="full"),
        Case(family="llama", documents=3),
        Case(family="mistral"),
        Case(family="gemma3_text"),
        Case(family="gpt_oss", attention="eager", changes={"attention_dropout": 0.0}),
        Case(family="deepseek_v3"),
    ],
    ids=str,
)
def test_a_rank_keeps_what_its_share_of_positions_keeps(case: Case, ranks: Callable[..., list[Any]]) -> None:
    share = Case(**{**vars(case), "documents": 1, "attention": "blocks"})  # there is no mask
    for measured in ranks(_kept, 2, case):
        assert share.predicted_kept() == pytest.approx(measured, rel=0.01)
