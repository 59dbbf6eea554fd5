"""Pipeline schedules as tables: the order in which every rank runs forward and backward passes of micro-batches.

`pp` ranks with `virtual_stages` chunks of the model on each have pp * virtual_stages stages, numbered as data flows. A
table is what the engine executes, what `simulate_schedule` times, what the estimate of memory counts, and what
`dstk schedule` draws.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, Self, get_args

from toolkit.errors import LayoutError

Pass = Literal["F", "B", "W", "D"]
"""Forward; backward for the input alone; backward for the weights alone; the whole backward, B and W in one."""
PASS_NAMES: dict[Pass, str] = {
    "F": "forward pass",
    "B": "backward pass for the input",
    "W": "backward pass for the weights",
    "D": "backward pass",
}
"""What passes are called where a rank says what it does: to the watchdog, and in a trace."""
Operation = tuple[Pass, int, int]
"""A pass, the stage, and the micro-batch."""
Kind = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CHUNKS: dict[Kind, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
"""Chunks of the model on a rank: of interleaved the least, of the others the only number."""
SPLITTING: tuple[Kind, ...] = ("zb-h1", "zb-v")
"""Kinds with gradients of weights as a pass of their own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The order of operations on every rank. Each operation runs when its input is there."""

    kind: Kind
    virtual_stages: int
    micro_batches: int
    rank_of: tuple[int, ...]
    """Rank of each stage."""
    orders: tuple[tuple[Operation, ...], ...]
    """Operations of each rank, in the order in which it runs them."""
    max_pending_weights: int | None = None
    """The most passes W that wait on a rank; None: as many as the kind lets wait."""

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are a pass of their own."""
        return self.kind in SPLITTING

    @cached_property
    def only_forward(self) -> Self:
        """The forward passes alone, in the same order, as validation runs them."""
        orders = (tuple(operation for operation in order if operation[0] == "F") for order in self.orders)
        return replace(self, orders=tuple(orders))

    def shortened(self) -> "Schedule":
        """Return the schedule of fewer micro-batches with the same bubble and, but for gpipe, the same peaks.

        In the steady state nothing new is held, and no rank waits longer. The rest that the ranks do not divide is
        kept, because the groups of interleaved depend on it.
        """
        pp = self.pp
        enough = 4 * pp + self.micro_batches % pp
        if self.micro_batches <= enough:
            return self
        return schedule_of(
            self.kind,
            pp=pp,
            micro_batches=enough,
            virtual_stages=self.virtual_stages,
            max_pending_weights=self.max_pending_weights,
        )

    @cached_property
    def in_flight(self) -> tuple[float, ...]:
        """The most micro-batches whose activations a rank holds, each counted as all layers of the rank."""
        return tuple(sum(held) for held in self.held())

    def held(self, waiting_share: float = 1.0) -> list[tuple[float, float]]:
        """Return each rank's peak: micro-batches between F and B, and those between B and W.

        `waiting_share` is the share of a micro-batch's activations that its W still needs.
        """
        most = []
        for order in self.orders:
            whole = 0
            rest = 0
            peak = (0, 0)
            for kind, _, _ in order:
                if kind == "F":
                    whole += 1
                elif kind == "D":
                    whole -= 1
                elif kind == "B":
                    whole -= 1
                    rest += 1
                else:
                    rest -= 1
                peak = max(peak, (whole, rest), key=lambda held: (held[0] + waiting_share * held[1], held[0]))
            most.append((peak[0] / self.virtual_stages, peak[1] / self.virtual_stages))
        return most


@lru_cache(maxsize=64)
def schedule_of(
    kind: Kind,
    *,
    pp: int,
    micro_batches: int,
    virtual_stages: int | None = None,
    max_pending_weights: int | None = None,
) -> Schedule:
    """Make the table of a kind. Raises LayoutError where the kind does not exist for these numbers.

    `virtual_stages`: stages of a rank; by default 2 for interleaved and zb-v, and 1 for the others.
    `max_pending_weights`: the most passes W that wait on a rank, each of a micro-batch in a stage.
    """
    chunks = virtual_stages or CHUNKS[kind]
    check_chunks(kind, chunks)
    check_pending_weights(kind, max_pending_weights)
    ranks = range(pp)
    orders: list[Iterable[Operation]]
    if kind == "gpipe":
        orders = [_gpipe(rank, micro_batches) for rank in ranks]
    elif kind == "1f1b":
        orders = [_one_f_one_b(rank, pp, micro_batches) for rank in ranks]
    elif kind == "interleaved":
        orders = [_interleaved(rank, pp, micro_batches, chunks) for rank in ranks]
    elif kind == "zb-h1":
        orders = [_zb_h1(rank, pp, micro_batches) for rank in ranks]
    else:
        orders = [_zb_v(rank, pp, micro_batches) for rank in ranks]
    return Schedule(
        kind=kind,
        virtual_stages=chunks,
        micro_batches=micro_batches,
        rank_of=stage_ranks(kind, pp, chunks),
        orders=tuple(tuple(_with_fewer_pending(tuple(order), max_pending_weights)) for order in orders),
        max_pending_weights=max_pending_weights,
    )


def check_chunks(kind: Kind, chunks: int, *, field: str = "virtual_stages", kind_field: str = "kind") -> None:
    """Raise LayoutError where a kind of schedule does not have that many chunks of the model on a rank.

    `field` and `kind_field` are the names of the two settings in the error.
    """
    least = CHUNKS[kind]
    if chunks == least or (kind == "interleaved" and chunks > least):
        return
    bound = "at least " if kind == "interleaved" else ""
    other = "1f1b" if chunks == 1 else "interleaved"
    reason = f"{kind} has {bound}{least} on a rank"
    raise LayoutError.between(((field, chunks), (kind_field, kind)), reason, (field, least), (kind_field, other))


def check_pending_weights(kind: Kind | None, most: int | None, *, kind_field: str = "kind") -> None:
    """Raise LayoutError where a kind of schedule has no passes W that could wait, or none may. None: no bound."""
    if most is None or (most >= 1 and kind in SPLITTING):
        return
    field = "max_pending_weights"
    if most < 1:
        reason = "B leaves a pass W, which waits at least until B is over"
        raise LayoutError.of(field, most, reason, (field, "1 or more"))
    reason = f"only {' and '.join(SPLITTING)} have weight gradients that wait"
    settings = ((field, most), (kind_field, kind))
    raise LayoutError.between(settings, reason, (kind_field, " or ".join(SPLITTING)))


def stage_ranks(kind: Kind, pp: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage: zb-v goes down the ranks and up again, the others start anew at rank 0."""
    ranks = range(pp)
    if kind == "zb-v":
        return (*ranks, *reversed(ranks))
    return tuple(rank for _ in range(chunks) for rank in ranks)


def _with_fewer_pending(order: Sequence[Operation], most: int | None) -> Iterable[Operation]:
    """Yield the operations of a rank with its passes W so early that at most so many wait; None: as they are.

    Where a B makes them as many, a W follows at once: of those that wait, the one that the order has first. So the
    gradient that other ranks wait for is sent before.
    """
    if most is None:
        yield from order
        return
    left = dict.fromkeys(operation for operation in order if operation[0] == "W")
    """Passes W that are still to come, in the order that they have without a bound."""
    pending: set[tuple[int, int]] = set()
    for operation in order:
        kind, stage, micro_batch = operation
        if kind == "W":
            if operation in left:
                del left[operation]
                pending.remove((stage, micro_batch))
                yield operation
            continue
        yield operation
        if kind == "B":
            pending.add((stage, micro_batch))
        if len(pending) == most:
            first = next(of_weights for of_weights in left if of_weights[1:] in pending)
            del left[first]
            pending.remove(first[1:])
            yield first


def _gpipe(rank: int, micro_batches: int) -> Iterable[Operation]:
    """All forward passes, then all backward passes (Huang et al. 2019), the first micro-batch first."""
    yield from (("F", rank, micro_batch) for micro_batch in range(micro_batches))
    yield from (("D", rank, micro_batch) for micro_batch in range(micro_batches))


def _one_f_one_b(rank: int, pp: int, micro_batches: int) -> Iterable[Operation]:
    """Yield as many forward passes as fill the ranks behind this one, then one forward and one backward in turn."""
    ahead = pp - 1 - rank
    yield from (("F", rank, micro_batch) for micro_batch in range(min(ahead, micro_batches)))
    for micro_batch in range(micro_batches):
        if micro_batch + ahead < micro_batches:
            yield "F", rank, micro_batch + ahead
        yield "D", rank, micro_batch


def _interleaved(rank: int, pp: int, micro_batches: int, chunks: int) -> Iterable[Operation]:
    """Interleaved 1F1B (Narayanan et al. 2021): groups of pp micro-batches pass through one chunk after the other.

    Where pp does not divide the micro-batches, the last group is larger by the rest, as in Megatron-LM.
    """
    groups = max(1, micro_batches // pp)
    starts = [*(group * pp for group in range(groups)), micro_batches]
    forward: list[Operation] = []
    backward: list[Operation] = []
    for start, stop in pairwise(starts):
        for chunk in range(chunks):
            forward += [("F", chunk * pp + rank, micro_batch) for micro_batch in range(start, stop)]
        for chunk in reversed(range(chunks)):
            backward += [("D", chunk * pp + rank, micro_batch) for micro_batch in range(start, stop)]
    # Twice the distance to the last rank: a gradient must come back from it in each chunk.
    ahead = 2 * (pp - 1 - rank) + (chunks - 1) * (starts[-1] - starts[-2])
    yield from forward[:ahead]
    for n, operation in enumerate(backward):
        yield from forward[n + ahead : n + ahead + 1]
        yield operation


def _zb_h1(rank: int, pp: int, micro_batches: int) -> Iterable[Operation]:
    """ZB-H1 (Qi et al. 2023): 1F1B's order of F and B, and W as late as pp micro-batches in memory allow.

    Where no forward pass is left, a W fills each wait for the next gradient.
    """
    ahead = pp - 1 - rank
    done = 0
    yield from (("F", rank, micro_batch) for micro_batch in range(min(ahead, micro_batches)))
    for micro_batch in range(micro_batches):
        forward = micro_batch + ahead
        if forward < micro_batches:
            if forward >= pp:
                yield "W", rank, done
                done += 1
            yield "F", rank, forward
        yield "B", rank, micro_batch
        if forward >= micro_batches - 1:
            yield "W", rank, done
            done += 1
    yield from (("W", rank, micro_batch) for micro_batch in range(done, micro_batches))


def _zb_v(rank: int, pp: int, micro_batches: int) -> Iterable[Operation]:
    """ZB-V (Qi et al. 2024): two chunks a rank, down the ranks and up again, so that losses arise on rank 0.

    The phases fit together for at least 2 pp - 1 micro-batches; of fewer, those that do not exist are left out.
    """
    stages = {"down": rank, "up": 2 * pp - 1 - rank}
    done: dict[tuple[str, str], int] = {}
    rounds = max(micro_batches, 2 * pp - 1)
    operations: list[Operation] = []

    def run(chunk: str, *kinds: Pass) -> None:
        for kind in kinds:
            micro_batch = done.get((chunk, kind), 0)
            done[chunk, kind] = micro_batch + 1
            if micro_batch < micro_batches:
                operations.append((kind, stages[chunk], micro_batch))

    for _ in range(2 * (pp - rank) - 1):
        run("down", "F")
    for _ in range(rank):
        run("up", "F")
        run("down", "F")
    for _ in range(pp - rank):
        run("up", "F", "B", "W")
    for _ in range(rounds - pp):
        if done["down", "F"] < rounds:
            run("down", "F")
        run("down", "B", "W")
        run("up", "F", "B", "W")
    for _ in range(rank):
        run("down", "B")
        run("up", "B")
    for _ in range(pp - rank):
        run("down", "B", "W")
    for chunk in ("up", "down"):
        while done.get((chunk, "W"), 0) < rounds:
            run(chunk, "W")
    return operations
