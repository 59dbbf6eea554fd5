"""Gather full parameters from the shards of all ranks, one at a time, under Hugging Face names."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from toolkit.parallel.groups import ParallelGroups, transfer_device
from toolkit.parallel.shard import Shard, shard_of

Names = Sequence[tuple[str, torch.Size]]
"""Every parameter of the full model with its shape, in model order, tied ones once."""

_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
"""All dtypes, in an order that is the same on every rank: ranks send each other their numbers."""

Opened = Callable[[list[nn.Parameter]], AbstractContextManager[object]]
"""A context in which these local parameters are readable."""


def open_local(parameters: list[nn.Parameter]) -> AbstractContextManager[object]:
    """Do nothing: the values are on this rank."""
    return nullcontext()


def gather_parameters(
    names: Names,
    parameters: Iterable[nn.Parameter],
    groups: ParallelGroups,
    *,
    opened: Opened = open_local,
    values: Callable[[nn.Parameter], torch.Tensor | None] = lambda parameter: parameter.detach(),
    dtype: torch.dtype | None = None,
    shard: Callable[[nn.Parameter], Shard] = shard_of,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full value) on every rank, in the order of `names`. A collective call; one value at a time.

    `opened`: what ZeRO-3 needs to read parameters. `values`: what to gather of a parameter,
    its value or a tensor of its shape such as its gradient; None gathers as zeros. `dtype`: of all results, if not the
    parameter's own. `shard`: what a rank has of that tensor.
    """
    local: dict[str, list[nn.Parameter]] = {}
    every = list(parameters)
    for parameter in every:
        local.setdefault(shard_of(parameter).name, []).append(parameter)
    dtypes = {name: here[0].dtype for name, here in local.items()}
    holders = _holders([name for name, _ in names], dtypes, groups, every[0].device)
    for (name, shape), (stage, own_dtype) in zip(names, holders, strict=True):
        here = local.get(name, [])
        like = every[0].new_empty(0, dtype=dtype or own_dtype)
        with opened(here):
            whole = None
            if groups.coordinate.pipe == stage:
                shards = [(shard(parameter), values(parameter)) for parameter in here]
                whole = _over_tensor_ranks(shards, like.new_zeros(shape), groups)
        yield name, _from_stage(whole, stage, shape, groups, like)


def gather_buffers(
    names: Sequence[tuple[str, torch.Tensor]], buffers: Mapping[str, torch.Tensor], groups: ParallelGroups
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of the buffers of all stages, on every rank. `names`: each with a tensor like it."""
    device = next(iter(buffers.values())).device if buffers else transfer_device(groups.pipe)
    dtypes = {name: buffer.dtype for name, buffer in buffers.items()}
    holders = _holders([name for name, _ in names], dtypes, groups, device)
    for (name, like), (stage, _) in zip(names, holders, strict=True):
        held = buffers[name].clone() if groups.coordinate.pipe == stage else None
        yield name, _from_stage(held, stage, like.shape, groups, torch.empty(0, dtype=like.dtype, device=device))


def _over_tensor_ranks(
    shards: list[tuple[Shard, torch.Tensor | None]], whole: torch.Tensor, groups: ParallelGroups
) -> torch.Tensor:
    """Fill `whole`, which is zero, from the shards of the tensor-parallel ranks."""
    first, values = shards[0]
    if not first.is_split:
        return whole if values is None else whole.copy_(values)
    for shard, value in shards:
        if shard.owner and value is not None:
            shard.put(value, whole)
    dist.all_reduce(whole, group=groups.tensor)
    if first.over_experts:
        dist.all_reduce(whole, group=groups.expert)
    return whole


def _holders(
    names: Sequence[str], local: Mapping[str, torch.dtype], groups: ParallelGroups, device: torch.device
) -> list[tuple[int, torch.dtype]]:
    """Return the first stage that has each name, and the dtype that it has there. `local`: the names of this stage."""
    if groups.layout.pp == 1:
        return [(0, local[name]) for name in names]
    # One number for both, whose minimum over the stages is that of the first stage.
    nobody = groups.layout.pp * len(_DTYPES)
    numbers = [nobody] * len(names)
    for place, name in enumerate(names):
        if name in local:
            numbers[place] = groups.coordinate.pipe * len(_DTYPES) + _DTYPES.index(local[name])
    first = torch.tensor(numbers, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=groups.pipe)
    return [(number // len(_DTYPES), _DTYPES[number % len(_DTYPES)]) for number in first.tolist()]


def _from_stage(
    whole: torch.Tensor | None, stage: int, shape: torch.Size, groups: ParallelGroups, like: torch.Tensor
) -> torch.Tensor:
    if groups.layout.pp == 1:
        assert whole is not None
        return whole
    if whole is None:
        whole = like.new_empty(shape)
    place = groups.coordinate
    dist.broadcast(whole, src=groups.layout.rank(pipe=stage, data=place.data, model=place.model), group=groups.pipe)
    return whole
