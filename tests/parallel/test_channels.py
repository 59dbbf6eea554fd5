"""Messages about the shapes of other messages have one length, whatever the shapes are."""

import pytest
import torch

from toolkit.parallel.pipeline import channels


@pytest.mark.parametrize("dims", [1, 3, channels._MOST_DIMS])
def test_shapes_of_three_tensors_arrive_as_they_were_sent(dims: int) -> None:
    formats = [(torch.Size([number] * dims), dtype) for number, dtype in ((2, torch.bfloat16), (3, torch.int64))]
    formats.append((torch.Size(()), torch.float32))
    numbers = channels._encoded(formats)
    assert len(numbers) == channels._HEADER
    assert list(channels._decoded(numbers)) == formats


def test_shapes_that_do_not_fit_are_not_sent() -> None:
    """Their receiver waits for a message of one length."""
    formats = [(torch.Size([1] * 20), torch.float32)] * 3
    with pytest.raises(AssertionError, match="one length"):
        channels._encoded(formats)
