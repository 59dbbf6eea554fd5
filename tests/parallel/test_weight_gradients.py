"""Weight gradients that are computed while the gradient of the input is summed have the bits of autograd's.

How much is computed meanwhile is counted in tests/engines/test_step_counts.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nonempty import nonempty
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from toolkit.parallel.pipeline.weight_gradients import WeightGradients
from toolkit.parallel.shard import Block
from toolkit.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from toolkit.parallel.tensor.overlapped_gradients import OverlappedGradients
from toolkit.parallel.tensor.region import Region

Ranks = Callable[..., list[Any]]
INPUTS = 24
WIDE = 64


class Gated(nn.Module):
    """A block with two column-parallel layers, the first of which is used twice, and a row-parallel one."""

    def __init__(self, kind: str, dtype: torch.dtype, place: Region) -> None:
        super().__init__()
        blocks = [Block(units=WIDE)]
        self.place = place
        self.gate = ColumnParallelLinear(linear(kind, INPUTS, WIDE, dtype), blocks, name="gate", region=place)
        self.up = ColumnParallelLinear(linear(kind, INPUTS, WIDE, dtype), blocks, name="up", region=place)
        self.down = RowParallelLinear(linear(kind, WIDE, INPUTS, dtype), blocks, name="down", region=place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.place.enter(x, self)
        return self.down(F.silu(self.gate(x)) * self.up(x) + self.gate(x.sin()))


def linear(kind: str, inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
    layer = nn.Linear(inputs, outputs) if kind == "Linear" else Conv1D(outputs, inputs)
    chance = torch.Generator().manual_seed(outputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=chance)
    return layer.to(dtype)


def gradients(block: Gated, *, recompute: bool) -> list[torch.Tensor]:
    """Gradients of the input and of all parameters, of two micro-batches."""
    chance = torch.Generator().manual_seed(1 + dist.get_rank() * block.place.sequence_parallel)
    dtype = block.down.weight.dtype
    x = torch.randn(2, 8, INPUTS, generator=chance).to(dtype).requires_grad_()
    for _ in range(2):
        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        y.backward(torch.randn(y.shape, generator=chance).to(dtype))
    return [tensor.grad for tensor in (x, *block.parameters()) if tensor.grad is not None]


def of_both(kind: str, dtype: torch.dtype, sequence_parallel: bool, recompute: bool, frozen: str) -> bool:
    place = Region(dist.group.WORLD, sequence_parallel=sequence_parallel, dropout=False)
    block = Gated(kind, dtype, place)
    if frozen:
        block.get_submodule(frozen).requires_grad_(False)
    found = gradients(block, recompute=recompute)
    assert place.later is not None
    block.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlappedGradients, "of", lambda *_: None)
        expected = gradients(block, recompute=recompute)
    assert len(found) == len(expected) == 7 - 2 * bool(frozen)
    assert all(map(torch.equal, found, expected))
    return True


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence-parallel"])
def test_all_gradients_have_the_bits_of_autograd(
    ranks: Ranks, kind: str, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    assert all(nonempty(ranks(of_both, 2, kind, dtype, sequence_parallel, False, "")))


def test_a_recomputed_block_leaves_its_weight_gradients_too(ranks: Ranks) -> None:
    assert all(nonempty(ranks(of_both, 2, "Linear", torch.float32, False, True, "")))


@pytest.mark.parametrize("frozen", ["gate", "up"])
def test_a_frozen_layer_has_no_weight_gradient_to_leave(ranks: Ranks, frozen: str) -> None:
    assert all(nonempty(ranks(of_both, 2, "Linear", torch.float32, False, False, frozen)))


def events(frozen: bool) -> list[str]:
    """What happens in a backward pass, in order: products of weight gradients, and the sum of the input's gradient."""
    place = Region(dist.group.WORLD, sequence_parallel=False, dropout=False)
    block = Gated("Linear", torch.float32, place).requires_grad_(not frozen)
    seen: list[str] = []
    start = dist.all_reduce

    class Waited:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            seen.append("wait")
            self.work.wait()

    def reduce(tensor: torch.Tensor, *arguments: Any, async_op: bool = False, **named: Any) -> Any:
        seen.append("start" if async_op else "sum")
        work = start(tensor, *arguments, async_op=async_op, **named)
        return Waited(work) if async_op else None

    compute = OverlappedGradients.compute

    def computed(later: OverlappedGradients) -> Any:
        seen.append("weight gradients")
        return compute(later)

    y = block(torch.ones(1, 2, INPUTS, requires_grad=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", reduce)
        patch.setattr(OverlappedGradients, "compute", computed)
        y.sum().backward()
    return seen


def test_the_sum_is_started_before_the_weight_gradients_and_awaited_behind_them(ranks: Ranks) -> None:
    assert ranks(events, 2, False) == [["start", "weight gradients", "wait"]] * 2


def test_without_weight_gradients_the_sum_is_not_asynchronous(ranks: Ranks) -> None:
    assert ranks(events, 2, True) == [["sum"]] * 2


def split_and_whole(is_split: bool) -> tuple[list[str], bool]:
    """Events of a backward pass of a block that a queue may split, and whether all gradients are autograd's.

    To the bit, if not split: W adds the two gradients of a weight that is used twice one by one.
    """
    place = Region(dist.group.WORLD, sequence_parallel=False, dropout=False)
    block = Gated("Linear", torch.float32, place)
    expected = gradients(block, recompute=False)
    block.zero_grad()
    queue = WeightGradients()
    queue.connect(block)
    seen: list[str] = []
    compute = OverlappedGradients.compute

    def computed(later: OverlappedGradients) -> Any:
        seen.append("beside the sum")
        return compute(later)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlappedGradients, "compute", computed)
        chance = torch.Generator().manual_seed(1)
        x = torch.randn(2, 8, INPUTS, generator=chance).requires_grad_()
        for micro_batch in range(2):
            with queue.splitting(is_split=is_split), queue.collecting(0, micro_batch):
                y = block(x)
                y.backward(torch.randn(y.shape, generator=chance))
            if is_split:
                assert block.gate.weight.grad is None or micro_batch > 0
                seen.append("W")
            queue.compute(0, micro_batch)
    found = [tensor.grad for tensor in (x, *block.parameters()) if tensor.grad is not None]
    same = torch.allclose if is_split else torch.equal
    return seen, len(found) == len(expected) == 7 and all(map(same, found, expected))


@pytest.mark.parametrize(("is_split", "events"), [(True, ["W"] * 2), (False, ["beside the sum"] * 2)])
def test_the_weight_pass_of_a_schedule_comes_before_the_sum(ranks: Ranks, is_split: bool, events: list[str]) -> None:
    assert ranks(split_and_whole, 2, is_split) == [(events, True)] * 2


def test_hooks_of_a_weight_run_once_with_its_whole_gradient(ranks: Ranks) -> None:
    def hooked() -> bool:
        place = Region(dist.group.WORLD, sequence_parallel=False, dropout=False)
        block = Gated("Linear", torch.float32, place)
        seen: list[torch.Tensor] = []
        block.gate.weight.register_hook(lambda gradient: seen.append(copy.copy(gradient)))
        block(torch.ones(1, 2, INPUTS, requires_grad=True)).sum().backward()
        (gradient,) = seen
        assert block.gate.weight.grad is not None
        return torch.equal(gradient, block.gate.weight.grad)

    assert all(nonempty(ranks(hooked, 2)))
