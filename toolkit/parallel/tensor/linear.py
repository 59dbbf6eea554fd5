"""Column- and row-parallel linear layers (Shoeybi et al. 2019, sec. 3), for `nn.Linear` and GPT-2's `Conv1D`.

Dims: i input features, o output features, t tensor-parallel ranks. A column layer holds o/t of the outputs, a row layer
i/t of the inputs. Weights keep the orientation of the layer they replace: Linear [o, i], Conv1D [i, o].
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from toolkit.parallel.linear_product import Defer, multiply
from toolkit.parallel.shard import Block, Shard, mark, pieces_of, source_of
from toolkit.parallel.split_product import SplitsBackward, multiply_in_graph
from toolkit.parallel.tensor import collectives as c
from toolkit.parallel.tensor.region import Region


class ParallelLinear(nn.Module):
    """A shard of a linear layer. Weight and bias have a `Shard`."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    split: SplitsBackward | None = None
    """What takes the weight's gradient in a split backward pass, where there are such passes."""
    number: torch.Tensor | None = None
    """The number by which the operations of a compiled layer look this one up, where there are such passes."""

    def __init__(self, whole: nn.Module, region: Region) -> None:
        super().__init__()
        self.region = region
        self.input_major = isinstance(whole, Conv1D)
        self.register_parameter("bias", None)

    def _keep(self, key: str, whole: nn.Parameter, shard: Shard) -> None:
        parameter = nn.Parameter(shard.take(source_of(whole)), requires_grad=whole.requires_grad)
        setattr(self, key, mark(parameter, shard))

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        input_major = self.input_major
        if torch.compiler.is_compiling():
            return multiply_in_graph(
                x, self.weight, bias, input_major=input_major, split=self.split, number=self.number
            )
        return multiply(x, self.weight, bias, input_major=input_major, defer=self._defer(x))

    def _defer(self, x: torch.Tensor) -> Defer | None:
        for later in (self.split, self.region.later):
            defer = None if later is None else later.taking(x, self.weight)
            if defer is not None:
                return defer
        return None


class ColumnParallelLinear(ParallelLinear):
    """y = x W + b for this rank's outputs. x [.., i] -> [.., o/t], or [.., o] with `gather_output`.

    `enters`: whether the layer itself enters the region, because no block around it does.
    """

    def __init__(
        self,
        whole: nn.Module,
        blocks: Sequence[Block],
        *,
        name: str,
        region: Region,
        offset: int = 0,
        gather_output: bool = False,
        enters: bool = False,
    ) -> None:
        super().__init__(whole, region)
        self.gather_output = gather_output
        self.enters = enters
        self._blocks = blocks
        self._offset = offset
        region.columns.append(self)
        rank = region.group.rank()
        size = region.group.size()
        pieces = tuple((offset + start, length) for start, length in pieces_of(blocks, rank, size))
        owner = not blocks[0].is_shared(size) or rank % (size // blocks[0].units) == 0
        self.out_features = sum(length for _, length in pieces)
        for key, dim in (("weight", 1 if self.input_major else 0), ("bias", 0)):
            parameter = getattr(whole, key)
            if parameter is not None:
                shape = tuple(parameter.shape)
                shard = Shard(name=f"{name}.{key}", shape=shape, dim=dim, pieces=pieces, owner=owner)
                self._keep(key, parameter, shard)
                self.sum_over_sharers(getattr(self, key))

    def sum_over_sharers(self, parameter: nn.Parameter) -> None:
        """Sum the gradient of a parameter, sharded over outputs, over the ranks that share them."""
        group = self.region.group
        units = self._blocks[0].units
        if self._blocks[0].is_shared(group.size()):
            sum_over_sharers(parameter, group, units)

    def split_like(self, whole: nn.Module, name: str) -> "ColumnParallelLinear":
        """Shard another layer with as many outputs in the same way, to be used inside the region."""
        gather = self.gather_output
        return ColumnParallelLinear(
            whole, self._blocks, name=name, region=self.region, offset=self._offset, gather_output=gather
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.enters:
            x = self.region.enter(x, self)
        y = self._multiply(x, self.bias)
        return c.gather_from_tensor_ranks(y, self.region.group) if self.gather_output else y


class FusedColumnParallelLinear(nn.Module):
    """A fused projection in which some blocks are sharded and others shared by ranks (multi-query attention).

    Shared and sharded blocks are separate parameters, because their gradients are reduced and counted differently.
    """

    def __init__(self, whole: nn.Module, blocks: Sequence[Block], *, name: str, region: Region, enters: bool) -> None:
        super().__init__()
        self.region = region
        self.enters = enters
        self._blocks = blocks
        size = region.group.size()
        self.parts = nn.ModuleList()
        offset = 0
        while blocks:
            kind = [block for block in blocks if block.is_shared(size) == blocks[0].is_shared(size)]
            run = list(blocks[: len(kind)])
            assert run == kind, "sharded and shared blocks alternate"
            self.parts.append(ColumnParallelLinear(whole, run, name=name, region=region, offset=offset))
            offset += sum(block.features for block in run)
            blocks = blocks[len(run) :]

    def split_like(self, whole: nn.Module, name: str) -> "FusedColumnParallelLinear":
        """Shard another layer with as many outputs in the same way, to be used inside the region."""
        return FusedColumnParallelLinear(whole, self._blocks, name=name, region=self.region, enters=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., i] -> [.., this rank's features of every block]."""
        if self.enters:
            x = self.region.enter(x, self)
        return torch.cat([part(x) for part in self.parts], dim=-1)


class RowParallelLinear(ParallelLinear):
    """y = sum over ranks of x_r W_r, then + b once. x [.., i/t] (or [.., i] with `split_input`) -> [.., o].

    With `is_partial` it returns x_r W_r: a layer around it adds something of the rank, and then calls `complete`.
    """

    is_partial = False

    def __init__(
        self, whole: nn.Module, blocks: Sequence[Block], *, name: str, region: Region, split_input: bool = False
    ) -> None:
        super().__init__(whole, region)
        self.split_input = split_input
        self.pieces = pieces_of(blocks, region.group.rank(), region.group.size())
        weight = whole.weight
        assert isinstance(weight, nn.Parameter)
        dim = 0 if self.input_major else 1
        shard = Shard(name=f"{name}.weight", shape=tuple(weight.shape), dim=dim, pieces=self.pieces)
        self._keep("weight", weight, shard)
        bias = whole.bias
        if isinstance(bias, nn.Parameter):
            self._keep("bias", bias, Shard(name=f"{name}.bias", shape=tuple(bias.shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_partial:
            return self._multiply(x, None)
        return self.complete(self._multiply(self.take_input(x), None))

    def take_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the input, [.., i/t]."""
        return c.scatter_to_tensor_ranks(x, self.region.group) if self.split_input else x

    def complete(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' parts and add the bias, [.., o] -> [.., o]."""
        y = self.region.leave(partial, self)
        return y if self.bias is None else y + self.bias


def sum_over_ranks(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """All-reduce a replicated parameter's gradient: each rank computed it from its part of the activations.

    A stage's backward pass runs once for each tensor that it sent, and one of them may not depend on the parameter:
    then the gradient is None, on every rank.
    """

    def reduce(gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else c.all_reduce(gradient, group)

    if parameter.requires_grad:
        parameter.register_hook(reduce)


def sum_over_sharers(parameter: nn.Parameter, group: dist.ProcessGroup, units: int) -> None:
    """Sum the gradient over the t/units neighboring ranks that share one of `units` units."""
    unit = group.rank() * units // group.size()

    def reduce(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        every = gradient.new_zeros(units, *gradient.shape)
        every[unit] = gradient
        dist.all_reduce(every, group=group)
        return every[unit]

    if parameter.requires_grad:
        parameter.register_hook(reduce)
