"""The one read of a step: the host learns loss and gradient norm while the device goes on with the update.

A read in front of the update leaves the device without work from the end of the backward pass until the host has seen
the norm and has launched the first kernel of the optimizer. PyTorch's fused Adam takes a number on the device by which
it leaves weights and moments as they are (`found_inf`, made for loss scaling), so that the host can launch the update
first and wait afterwards. By then the device has the update to compute, while the host prepares the next step.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from toolkit.engines.base import Update


class HostNumbers:
    """Totals and a gradient norm on their way to the host.

    `totals`: fp64 [numbers]. On a GPU the copy is queued behind what has been launched, and the host does not wait for
    it before `read`.
    """

    def __init__(self, totals: torch.Tensor, norm: torch.Tensor) -> None:
        self._numbers = torch.cat([totals, norm.detach().reshape(1).to(totals)])
        self._arrival: Any = None
        if self._numbers.device.type == "cuda":
            on_device = self._numbers
            self._numbers = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            self._numbers.copy_(on_device, non_blocking=True)
            self._arrival = torch.cuda.current_stream().record_event()

    def read(self) -> tuple[list[float], float]:
        """Wait until the device has got there; return the totals and the norm."""
        if self._arrival is not None:
            self._arrival.synchronize()
        *totals, norm = self._numbers.tolist()
        return totals, norm


def read_together(totals: torch.Tensor, norm: torch.Tensor) -> tuple[list[float], float]:
    """Copy `totals`, fp64, and a norm to the host at once: it waits for the device a single time."""
    return HostNumbers(totals, norm).read()


def skips_on_device(optimizer: Any) -> bool:
    """Whether the kernels of an optimizer can skip an update by a number on the device."""
    base = base_optimizer(optimizer)
    return isinstance(base, torch.optim.Adam) and all(group.get("fused") for group in base.param_groups)


@contextmanager
def skipping_unless(is_finite: torch.Tensor, optimizer: Any) -> Iterator[None]:
    """Let the steps of an optimizer inside leave all as it is where `is_finite`, a bool on the device, is false.

    The optimizer must be one that `skips_on_device`.
    """
    base = base_optimizer(optimizer)
    base.found_inf = (~is_finite).float()
    try:
        yield
    finally:
        del base.found_inf


def update_if_finite(optimizer: Any, totals: torch.Tensor, norm: torch.Tensor, step: Callable[[], object]) -> Update:
    """Take a `step` of an optimizer unless the norm is not finite.

    `totals`: fp64 [numbers], which the host reads with the norm: behind the step where the optimizer can skip it on the
    device, else in front of it.
    """
    if skips_on_device(optimizer):
        numbers = HostNumbers(totals, norm)
        with skipping_unless(torch.isfinite(norm), optimizer):
            step()
        values, grad_norm = numbers.read()
        return Update(totals=values, grad_norm=grad_norm, skipped=not math.isfinite(grad_norm))
    values, grad_norm = read_together(totals, norm)
    is_finite = math.isfinite(grad_norm)
    if is_finite:
        step()
    return Update(totals=values, grad_norm=grad_norm, skipped=not is_finite)


def base_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of DeepSpeed and accelerate."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
