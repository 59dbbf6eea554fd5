"""Whole matrices out of the pieces that ranks hold of them: each is worked on by one rank, which sends the result back.

ZeRO partitions flat tensors, tensor parallelism splits dimensions, expert parallelism stacks of experts: a Fragment
says which elements of a matrix a rank holds. Matrices are assigned to owners by the cost of orthogonalizing them, and
exchanged in rounds, so that a rank holds a few whole ones at a time.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from toolkit.config.update_chunk import UPDATE_CHUNK_ELEMENTS
from toolkit.parallel.shard import Shard

Matrix = tuple[str, int]
"""Name of a parameter, and index in its stack of experts."""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Consecutive elements of this rank's part of one matrix, in a flat tensor."""

    index: int
    """Index of the matrix in its stack of experts; 0 for a single matrix."""
    part: Shard
    """The part of the single matrix that tensor parallelism leaves on this rank."""
    start: int
    """First element of the flattened part."""
    length: int
    tensor: int
    """Index, among the tensors of a step, of the tensor that has the elements."""
    offset: int
    """First element in that tensor."""

    @property
    def matrix(self) -> Matrix:
        return self.part.name, self.index

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that is the same on ranks that hold the same elements."""
        return self.matrix, self.part.dim, self.part.pieces, self.start, self.length

    @property
    def part_shape(self) -> tuple[int, ...]:
        shape = list(self.part.shape)
        if self.part.dim is not None:
            shape[self.part.dim] = sum(length for _, length in self.part.pieces)
        return tuple(shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of the fragment's elements in the flat tensor that has them."""
        return flat.narrow(0, self.offset, self.length)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's elements of a parameter in a tensor that is updated; maybe none."""

    tensor: torch.Tensor
    shard: Shard
    start: int
    """First element of the flattened shard."""
    length: int
    offset: int
    """First element in the tensor."""


def fragments_of(shard: Shard, *, start: int, length: int, tensor: int, offset: int) -> Iterator[Fragment]:
    """Yield the fragments of [start, start + length) of a flattened local parameter: one for each matrix of a stack."""
    is_stack = len(shard.shape) == 3
    if is_stack and shard.dim == 0:
        stack_pieces = shard.pieces
    elif is_stack:
        stack_pieces = ((0, shard.shape[0]),)
    else:
        stack_pieces = ((0, 1),)
    indices = [index for begin, count in stack_pieces for index in range(begin, begin + count)]
    shape = shard.shape[1:] if is_stack else shard.shape
    dim = shard.dim
    if is_stack and dim is not None:
        dim = None if dim == 0 else dim - 1
    part = Shard(name=shard.name, shape=shape, dim=dim, pieces=() if dim is None else shard.pieces)
    width = sum(count for _, count in part.pieces)
    size = math.prod(shape) if dim is None else math.prod(shape) // shape[dim] * width
    for position, index in enumerate(indices):
        begin = max(start, position * size)
        end = min(start + length, (position + 1) * size)
        if begin < end:
            yield Fragment(
                index=index,
                part=part,
                start=begin - position * size,
                length=end - begin,
                tensor=tensor,
                offset=offset + begin - start,
            )


@dataclass
class _Round:
    """The fragments that this rank exchanges at once. Lists are in the order of the other ranks."""

    lent: list[tuple[int, Fragment]] = field(default_factory=list)
    """Fragments that are sent to owners."""
    borrowed: list[tuple[int, Fragment]] = field(default_factory=list)
    """Fragments that are received as an owner."""
    returned: list[tuple[int, Fragment]] = field(default_factory=list)
    """Fragments that are sent back as an owner."""
    updated: list[tuple[int, Fragment]] = field(default_factory=list)
    """Fragments that are received from owners."""


class MatrixExchange:
    """The exchange of the matrices of one optimizer step over the ranks of `group`; None: this process alone.

    Building it is collective: every rank must do so with its own fragments of the same matrices.
    """

    def __init__(self, fragments: Sequence[Fragment], group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        held = self._held_by_all(fragments)
        shapes = {fragment.matrix: fragment.part.shape for of_rank in held for fragment in of_rank}
        self.rounds = _rounds(held, _assign(shapes, self.size), shapes, rank)

    def _held_by_all(self, fragments: Sequence[Fragment]) -> list[list[Fragment]]:
        """Return the fragments of each rank of the group. A collective call."""
        held = [list(fragments)]
        if self.group is not None and self.size > 1:
            held = [[] for _ in range(self.size)]
            dist.all_gather_object(held, list(fragments), group=self.group)
        return held

    def run(
        self,
        read: Callable[[Fragment], torch.Tensor],
        work: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        write: Callable[[Fragment, torch.Tensor], None],
        like: torch.Tensor,
    ) -> None:
        """Assemble whole matrices of what `read` returns, hand them to `work`, and `write` its results everywhere.

        `read` returns one-dimensional tensors of the dtype and device of `like`, and so does `work` for matrices.
        """
        for turn in self.rounds:
            arrived = self._exchange([(to, read(fragment)) for to, fragment in turn.lent], turn.borrowed, like)
            whole = _assemble([fragment for _, fragment in turn.borrowed], arrived, like)
            done = dict(zip(whole, work(list(whole.values())), strict=True))
            parts: dict[tuple[object, ...], torch.Tensor] = {}
            replies = []
            for to, fragment in turn.returned:
                key = fragment.identity[:3]
                if key not in parts:
                    parts[key] = fragment.part.take(done[fragment.matrix]).reshape(-1)
                replies.append((to, parts[key].narrow(0, fragment.start, fragment.length)))
            results = self._exchange(replies, turn.updated, like)
            for (_, fragment), result in zip(turn.updated, results, strict=True):
                write(fragment, result)

    def _exchange(
        self, sent: list[tuple[int, torch.Tensor]], awaited: list[tuple[int, Fragment]], like: torch.Tensor
    ) -> list[torch.Tensor]:
        """Send tensors to ranks; return the awaited ones."""
        if self.size == 1:
            return [tensor for _, tensor in sent]
        give = [0] * self.size
        take = [0] * self.size
        for rank, tensor in sent:
            give[rank] += tensor.numel()
        for rank, fragment in awaited:
            take[rank] += fragment.length
        outgoing = torch.cat([tensor for _, tensor in sent]) if sent else like.new_empty(0)
        incoming = like.new_empty(sum(take))
        dist.all_to_all_single(incoming, outgoing, take, give, group=self.group)
        return list(torch.split(incoming, [fragment.length for _, fragment in awaited])) if awaited else []


def _assign(shapes: Mapping[Matrix, Sequence[int]], ranks: int) -> dict[Matrix, int]:
    """Give each matrix an owner: the costliest first, to the rank with the least work so far."""

    def cost(matrix: Matrix) -> int:
        return math.prod(shapes[matrix]) * min(shapes[matrix])

    loads = [(0, rank) for rank in range(ranks)]
    owners = {}
    for matrix in sorted(shapes, key=lambda matrix: (-cost(matrix), matrix)):
        load, rank = heapq.heappop(loads)
        owners[matrix] = rank
        heapq.heappush(loads, (load + cost(matrix), rank))
    return owners


def _rounds(
    held: Sequence[Sequence[Fragment]], owners: Mapping[Matrix, int], shapes: Mapping[Matrix, Sequence[int]], rank: int
) -> list[_Round]:
    """Return what `rank` exchanges in each round."""
    turns = _turns(owners, shapes)
    holders = _holders_of_fragments(held)
    rounds = [_Round() for _ in range(1 + max(turns.values(), default=-1))]
    # All ranks go through the same fragments in the same order, so a sender and its receiver agree on theirs.
    for holder, fragments in enumerate(held):
        for fragment in sorted(fragments, key=_order):
            owner = owners[fragment.matrix]
            is_lender = holder == _lender(holders[fragment.identity], owner)
            _note_exchange(rounds[turns[fragment.matrix]], fragment, holder, owner, rank, is_lender=is_lender)
    for turn in rounds:
        for exchanged in (turn.lent, turn.borrowed, turn.returned, turn.updated):
            exchanged.sort(key=lambda pair: pair[0])  # stable
    return rounds


def _turns(owners: Mapping[Matrix, int], shapes: Mapping[Matrix, Sequence[int]]) -> dict[Matrix, int]:
    """Return the round in which each matrix is updated: an owner has UPDATE_CHUNK_ELEMENTS in one, or one matrix."""
    turns: dict[Matrix, int] = {}
    filled: dict[int, tuple[int, int]] = {}
    for matrix, owner in owners.items():
        index, elements = filled.get(owner, (0, 0))
        size = math.prod(shapes[matrix])
        if elements and elements + size > UPDATE_CHUNK_ELEMENTS:
            index += 1
            elements = 0
        turns[matrix] = index
        filled[owner] = index, elements + size
    return turns


def _holders_of_fragments(held: Sequence[Sequence[Fragment]]) -> dict[tuple[object, ...], list[int]]:
    """Return the ranks that hold the same elements, by the identity of the fragment."""
    holders: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for holder, fragments in enumerate(held):
        for fragment in fragments:
            holders[fragment.identity].append(holder)
    return holders


def _lender(holders: Sequence[int], owner: int) -> int:
    """Return the rank that sends a fragment to the owner of its matrix: the owner itself where it has the fragment."""
    return owner if owner in holders else holders[owner % len(holders)]


def _note_exchange(turn: _Round, fragment: Fragment, holder: int, owner: int, rank: int, *, is_lender: bool) -> None:
    """Note in a round of `rank` what it does with a fragment of `holder`, whose matrix `owner` updates."""
    if is_lender and rank == holder:
        turn.lent.append((owner, fragment))
    if is_lender and rank == owner:
        turn.borrowed.append((holder, fragment))
    if rank == owner:
        turn.returned.append((holder, fragment))
    if rank == holder:
        turn.updated.append((owner, fragment))


def _order(fragment: Fragment) -> tuple[object, ...]:
    return fragment.matrix, fragment.part.pieces, fragment.start


def _assemble(
    fragments: Sequence[Fragment], values: Sequence[torch.Tensor], like: torch.Tensor
) -> dict[Matrix, torch.Tensor]:
    """Put fragments together to whole matrices."""
    parts: dict[tuple[object, ...], tuple[Fragment, torch.Tensor]] = {}
    for fragment, value in zip(fragments, values, strict=True):
        key = fragment.identity[:3]
        if key not in parts:
            parts[key] = fragment, like.new_empty(math.prod(fragment.part_shape))
        parts[key][1].narrow(0, fragment.start, fragment.length).copy_(value)
    whole: dict[Matrix, torch.Tensor] = {}
    for fragment, flat in parts.values():
        part = flat.view(fragment.part_shape)
        if fragment.part.dim is None:
            whole[fragment.matrix] = part
            continue
        if fragment.matrix not in whole:
            whole[fragment.matrix] = like.new_empty(fragment.part.shape)
        fragment.part.put(part, whole[fragment.matrix])
    return whole
