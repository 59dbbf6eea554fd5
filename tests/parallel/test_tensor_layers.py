"""Every tensor-parallel linear layer against the layer it replaces: output, and the gradients of input and parameters.

All in fp64, where two orders of summation differ by 1e-15 and a wrong term by far more.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nonempty import nonempty
from torch import nn
from transformers.pytorch_utils import Conv1D

from toolkit.parallel.shard import Block, Shard, pieces_of, shard_of
from toolkit.parallel.tensor import collectives as c
from toolkit.parallel.tensor.linear import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    RowParallelLinear,
    sum_over_ranks,
    sum_over_sharers,
)
from toolkit.parallel.tensor.region import Region

Ranks = Callable[..., list[Any]]
KINDS = pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
HEAD = 3
"""Features of an attention head."""


def linear(kind: str, inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
    """A layer with random values, the same on every rank."""
    layer = nn.Linear(inputs, outputs, bias=bias) if kind == "Linear" else Conv1D(outputs, inputs)
    layer = layer.double()
    chance = torch.Generator().manual_seed(inputs * outputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=chance)
    return layer


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def region(*, sequence_parallel: bool = False) -> Region:
    return Region(dist.group.WORLD, sequence_parallel=sequence_parallel, dropout=False)


def run(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, gradient of the input); parameters keep their gradients."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(gradient)
    assert x.grad is not None
    return y.detach(), x.grad


def own(whole: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """This rank's features of an activation [.., features]."""
    pieces = pieces_of(blocks, dist.get_rank(), dist.get_world_size())
    return Shard(name="", shape=tuple(whole.shape), dim=whole.dim() - 1, pieces=pieces).take(whole)


def part_of(whole: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """This rank's gradient of its features, where those that ranks share get a part of theirs from each."""
    size = dist.get_world_size()
    parts, offset = [], 0
    for block in blocks:
        mine = own(whole[..., offset : offset + block.features], [block])
        if block.is_shared(size):
            sharers = size // block.units
            mine = mine * 2 * (1 + dist.get_rank() % sharers) / (sharers * (sharers + 1))
        parts.append(mine)
        offset += block.features
    return torch.cat(parts, -1)


def assert_parameters_learn_alike(layer: nn.Module, whole: nn.Module) -> None:
    """Each local gradient is the whole gradient's part."""
    for parameter in layer.parameters():
        shard = shard_of(parameter)
        torch.testing.assert_close(parameter.grad, shard.take(whole.get_parameter(shard.name.split(".")[1]).grad))


def check_column(kind: str, blocks: Sequence[Block], *, inputs: int = 5, bias: bool = True) -> bool:
    whole = linear(kind, inputs, sum(block.features for block in blocks), bias=bias)
    build = ColumnParallelLinear
    if len({block.is_shared(dist.get_world_size()) for block in blocks}) > 1:
        build = FusedColumnParallelLinear  # type: ignore[assignment]
    layer = build(copy.deepcopy(whole), blocks, name="layer", region=region(), enters=True)
    x, gradient = draw(2, 3, inputs), draw(2, 3, sum(block.features for block in blocks), seed=1)
    y, x_gradient = run(whole, x, gradient)
    own_y, own_x_gradient = run(layer, x, part_of(gradient, blocks))
    torch.testing.assert_close(own_y, own(y, blocks))
    torch.testing.assert_close(own_x_gradient, x_gradient)
    assert_parameters_learn_alike(layer, whole)
    return True


@KINDS
@pytest.mark.parametrize(("size", "outputs"), [(2, 6), (3, 3), (4, 12)])
def test_a_column_layer_computes_its_outputs_of_the_whole(ranks: Ranks, kind: str, size: int, outputs: int) -> None:
    assert all(nonempty(ranks(check_column, size, kind, [Block(units=outputs)])))


@KINDS
@pytest.mark.parametrize("size", [2, 4])
def test_a_column_layer_splits_query_key_and_value_each_by_heads(ranks: Ranks, kind: str, size: int) -> None:
    blocks = [Block(units=8, width=HEAD), Block(units=4, width=HEAD), Block(units=4, width=HEAD)]
    assert all(nonempty(ranks(check_column, size, kind, blocks)))


def test_a_column_layer_without_bias_has_none(ranks: Ranks) -> None:
    def check() -> bool:
        return check_column("Linear", [Block(units=4)], bias=False)

    assert all(nonempty(ranks(check, 2)))


@KINDS
@pytest.mark.parametrize(("size", "units"), [(2, 1), (4, 1), (4, 2), (3, 1)])
def test_ranks_that_share_a_key_head_sum_its_gradient(ranks: Ranks, kind: str, size: int, units: int) -> None:
    assert all(nonempty(ranks(check_column, size, kind, [Block(units=units, width=HEAD)])))


@KINDS
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 1), (4, 1), (4, 2)])
def test_a_fused_layer_splits_queries_and_shares_keys_and_values(
    ranks: Ranks, kind: str, size: int, kv_heads: int
) -> None:
    blocks = [Block(units=4, width=HEAD), *[Block(units=kv_heads, width=HEAD)] * 2]
    assert all(nonempty(ranks(check_column, size, kind, blocks)))


@pytest.mark.parametrize(("size", "kv_heads", "owners"), [(2, 1, [0]), (4, 1, [0]), (4, 2, [0, 2])])
def test_one_of_the_ranks_that_share_a_head_owns_it(ranks: Ranks, size: int, kv_heads: int, owners: list[int]) -> None:
    def owns() -> bool:
        block = Block(units=kv_heads, width=HEAD)
        whole = linear("Linear", 5, block.features)
        layer = ColumnParallelLinear(whole, [block], name="layer", region=region())
        return shard_of(layer.weight).owner

    assert [rank for rank, is_owner in enumerate(ranks(owns, size)) if is_owner] == owners


@pytest.mark.parametrize("size", [2, 4])
def test_the_owned_parts_of_a_fused_layer_are_the_whole_once(ranks: Ranks, size: int) -> None:
    blocks = [Block(units=4, width=HEAD), Block(units=1, width=HEAD), Block(units=1, width=HEAD)]

    def owned() -> list[int]:
        layer = FusedColumnParallelLinear(linear("Linear", 5, 18), blocks, name="layer", region=region(), enters=True)
        shards = [shard_of(part.weight) for part in layer.parts]  # type: ignore[arg-type]
        return [i for s in shards if s.owner for start, length in s.pieces for i in range(start, start + length)]

    assert sorted(index for found in ranks(owned, size) for index in found) == list(range(18))


@KINDS
@pytest.mark.parametrize("size", [2, 3])
def test_a_gathering_column_layer_computes_all_outputs_on_every_rank(ranks: Ranks, kind: str, size: int) -> None:
    def check() -> bool:
        whole, blocks = linear(kind, 5, 12), [Block(units=12)]
        layer = ColumnParallelLinear(
            copy.deepcopy(whole), blocks, name="layer", region=region(), enters=True, gather_output=True
        )
        x, gradient = draw(2, 3, 5), draw(2, 3, 12, seed=1)
        torch.testing.assert_close(run(layer, x, gradient), run(whole, x, gradient))
        assert_parameters_learn_alike(layer, whole)
        return True

    assert all(nonempty(ranks(check, size)))


@KINDS
@pytest.mark.parametrize(
    ("size", "blocks"), [(2, [Block(units=6)]), (3, [Block(units=3)]), (4, [Block(units=4, width=HEAD)])]
)
def test_a_row_layer_sums_the_ranks_to_the_whole_output(
    ranks: Ranks, kind: str, size: int, blocks: list[Block]
) -> None:
    def check() -> bool:
        inputs = blocks[0].features
        whole = linear(kind, inputs, 5)
        layer = RowParallelLinear(copy.deepcopy(whole), blocks, name="layer", region=region())
        x, gradient = draw(2, 3, inputs), draw(2, 3, 5, seed=1)
        y, x_gradient = run(whole, x, gradient)
        torch.testing.assert_close(run(layer, own(x, blocks), gradient), (y, own(x_gradient, blocks)))
        assert_parameters_learn_alike(layer, whole)
        return True

    assert all(nonempty(ranks(check, size)))


@KINDS
def test_a_row_layer_splits_its_input_itself_where_all_of_it_is_there(ranks: Ranks, kind: str) -> None:
    def check() -> bool:
        whole = linear(kind, 6, 5)
        layer = RowParallelLinear(
            copy.deepcopy(whole), [Block(units=6)], name="layer", region=region(), split_input=True
        )
        x, gradient = draw(2, 3, 6), draw(2, 3, 5, seed=1)
        torch.testing.assert_close(run(layer, x, gradient), run(whole, x, gradient))
        assert_parameters_learn_alike(layer, whole)
        return True

    assert all(nonempty(ranks(check, 3)))


def test_a_row_layer_adds_its_bias_once(ranks: Ranks) -> None:
    def output_of_zero() -> torch.Tensor:
        layer = RowParallelLinear(linear("Linear", 4, 5), [Block(units=4)], name="layer", region=region())
        return layer(torch.zeros(1, 1, 1, dtype=torch.float64)).detach().flatten()

    bias = linear("Linear", 4, 5).bias
    assert all(torch.equal(found, bias.detach()) for found in nonempty(ranks(output_of_zero, 4)))  # type: ignore[union-attr]


def test_a_frozen_layer_stays_frozen(ranks: Ranks) -> None:
    def needs_gradient() -> list[bool]:
        whole = linear("Linear", 4, 2).requires_grad_(False)
        made = [
            ColumnParallelLinear(whole, [Block(units=1, width=2)], name="layer", region=region()),
            RowParallelLinear(whole, [Block(units=4)], name="layer", region=region()),
        ]
        return [parameter.requires_grad for layer in made for parameter in layer.parameters()]

    assert not any(flag for found in nonempty(ranks(needs_gradient, 2)) for flag in nonempty(found))


class Mlp(nn.Module):
    """What lies between the two ends of a region, in a model."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def split_mlp(whole: Mlp, *, sequence_parallel: bool) -> Mlp:
    place = region(sequence_parallel=sequence_parallel)
    blocks = [Block(units=12)]
    layer = Mlp(
        ColumnParallelLinear(copy.deepcopy(whole.up), blocks, name="up", region=place, enters=True),
        RowParallelLinear(copy.deepcopy(whole.down), blocks, name="down", region=place),
    )
    if sequence_parallel:
        assert layer.down.bias is not None
        sum_over_ranks(layer.down.bias, place.group)  # type: ignore[arg-type]
    return layer


@KINDS
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence-parallel"])
def test_a_region_computes_what_the_whole_block_does(
    ranks: Ranks, kind: str, size: int, sequence_parallel: bool
) -> None:
    def check() -> bool:
        whole = Mlp(linear(kind, 5, 12), linear(kind, 12, 5))
        layer = split_mlp(whole, sequence_parallel=sequence_parallel)
        x, gradient = draw(2, 12, 5), draw(2, 12, 5, seed=1)

        def slice_of(all_positions: torch.Tensor) -> torch.Tensor:
            if not sequence_parallel:
                return all_positions
            return c.scatter_to_tensor_ranks(all_positions, dist.group.WORLD, dim=1)

        y, x_gradient = run(whole, x, gradient)
        torch.testing.assert_close(run(layer, slice_of(x), slice_of(gradient)), (slice_of(y), slice_of(x_gradient)))
        for parameter in layer.parameters():
            shard = shard_of(parameter)
            torch.testing.assert_close(parameter.grad, shard.take(whole.get_parameter(shard.name).grad))
        return True

    assert all(nonempty(ranks(check, size)))


def test_a_column_layer_enters_the_region_only_where_no_block_does_it(ranks: Ranks) -> None:
    def input_gradients() -> tuple[torch.Tensor, torch.Tensor]:
        x, found = draw(1, 2, 5), []
        for enters in (True, False):
            layer = ColumnParallelLinear(
                linear("Linear", 5, 4), [Block(units=4)], name="layer", region=region(), enters=enters
            )
            found.append(run(layer, x, torch.ones(1, 2, 2, dtype=torch.float64))[1])
        return found[0], found[1]

    first, second = ranks(input_gradients, 2)
    torch.testing.assert_close(first[0], first[1] + second[1])


class _WithoutGradient(torch.autograd.Function):
    """The identity of its first argument; the second gets no gradient, as of an output that does not depend on it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def gradients_of_replicated_parameters() -> list[Any]:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    group: Any = dist.group.WORLD
    sum_over_ranks(parameters[0], group)
    sum_over_sharers(parameters[1], group, units=1)
    x = torch.ones(3, requires_grad=True)
    gradients: list[Any] = []
    for parameter in parameters:
        _WithoutGradient.apply(x, parameter).sum().backward()
        gradients.append(parameter.grad)
    return gradients


def test_a_replicated_parameter_may_get_no_gradient_in_a_backward_pass(ranks: Ranks) -> None:
    assert ranks(gradients_of_replicated_parameters, 2) == [[None, None]] * 2
