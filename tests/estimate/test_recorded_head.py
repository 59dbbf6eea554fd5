"""Recordings of full logits, changed to the loss in chunks, against what that loss allocates on this CPU."""

from itertools import product
from typing import Any

import pytest
import torch
from daily import daily
from measured_activations import Case, peak_bytes

from toolkit.recorder.parameters import record_parameters

_LARGE = {"vocab_size": 4001}
"""So that the head is most of the peak."""
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"autocast": True, "dtype": torch.float32},
    {"dtype": torch.float32},
    {"samples": 1},
    {"trainable": "*layers*"},
)
CASES = [
    Case(family=family, chunk=chunk, drops=False, attention="eager", changes=_LARGE, **kind)
    for family, chunk, kind in product(("llama", "gpt2", "gemma2", "cohere"), (32, 96), _KINDS)
    if family == "llama" or "trainable" not in kind
]


@pytest.mark.parametrize("case", daily(CASES, lambda i, _: i % 8 == 1), ids=str)
def test_the_peak_of_a_pass_is_known_within_a_percent(case: Case) -> None:
    model = case.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers" in name or not case.trainable)
    measured = peak_bytes(case, model)
    held = record_parameters(case.rank_pass().config).rank_parameters()
    predicted = case.predicted_peak() + (2 * held.matrices if case.autocast else 0)
    assert predicted == pytest.approx(measured, rel=0.01), f"{predicted / measured - 1:+.2%}"


@pytest.mark.daily
@pytest.mark.parametrize("rows", [64, 128])
def test_logits_with_the_bytes_of_a_hidden_state_are_told_apart(rows: int) -> None:
    """A hidden state has 64 features, in 16 bits and, within norms, in fp32."""
    case = Case(family="llama", chunk=32, drops=False, changes={"vocab_size": rows})
    assert case.predicted_peak() == pytest.approx(peak_bytes(case, case.model()), rel=0.01)
