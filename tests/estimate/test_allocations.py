"""The two counters that the activation estimate is compared with, on passes that can be counted by hand."""

import torch
from allocations import LiveBytes, SavedForBackward
from torch import nn

KIB = 1024


def _kib(size: int) -> torch.Tensor:
    return torch.ones(size * KIB // 4)


def test_a_storage_that_is_saved_twice_counts_once() -> None:
    x = _kib(4).requires_grad_()
    with SavedForBackward(nn.Identity()) as saved:
        y = x.sin() + x.view(-1, 4).cos().view(-1)
    del y
    assert saved.bytes == 4 * KIB


def test_parameters_are_not_counted() -> None:
    linear = nn.Linear(256, 256, bias=False)
    x = torch.ones(4, 256, requires_grad=True)
    with SavedForBackward(linear) as saved:
        y = linear(x)
    del y
    assert saved.bytes == x.nbytes


def test_the_peak_counts_live_bytes_not_allocations() -> None:
    with LiveBytes() as live:
        for _ in range(5):
            x = _kib(8)
            del x
        y = _kib(2)
    assert live.peak_bytes == 8 * KIB
    assert live.live_bytes == 2 * KIB
    del y
    assert live.live_bytes == 0


def test_earlier_storages_and_their_views_are_not_counted() -> None:
    x = _kib(8)
    with LiveBytes() as live:
        y = x.view(-1, 2).t()
        x.add_(1.0)
    assert live.peak_bytes == 0
    del y


def test_the_peak_of_a_backward_pass_can_be_measured_alone() -> None:
    x = _kib(4).requires_grad_()
    with LiveBytes() as live:
        y = (x.exp() * 2.0).sum()
        del y
        live.start_peak()
        z = x.sin()
    assert live.peak_bytes == 4 * KIB
    del z
