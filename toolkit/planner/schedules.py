"""Pipeline schedules as tables: the order in which every rank runs forward and backward passes of micro-batches.

`pp` ranks with `virtual_stages` chunks of the model on each have pp * virtual_stages stages, numbered as data flows. A
table is what an engine executes, what `simulate_schedule` times, and what `dstk schedule` draws. The engine of this
toolkit trains with those in `TRAINED`; the others show what they would gain.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

from toolkit.errors import LayoutError

Pass = Literal["F", "B", "W", "D"]
"""Forward; backward for the input alone; backward for the weights alone; the whole backward, B and W in one."""
Operation = tuple[Pass, int, int]
"""A pass, the stage, and the micro-batch."""
Kind = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TRAINED: frozenset[Kind] = frozenset({"1f1b"})


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

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are a pass of their own."""
        return self.kind == "zero-bubble"

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
def schedule_of(kind: Kind, *, pp: int, micro_batches: int, virtual_stages: int | None = None) -> Schedule:
    """Make the table of a kind. Raises LayoutError where the kind does not exist for these numbers.

    `virtual_stages`: stages of a rank; by default 2 for interleaved and 1 for the others. A zero-bubble schedule with 1
    is ZB-H1, and with 2 ZB-V.
    """
    chunks = virtual_stages or (2 if kind == "interleaved" else 1)
    _check(kind, pp, micro_batches, chunks)
    ranks = range(pp)
    rank_of = tuple(rank for _ in range(chunks) for rank in ranks)
    orders: list[Iterable[Operation]]
    if kind == "gpipe":
        orders = [_gpipe(rank, micro_batches) for rank in ranks]
    elif kind == "1f1b":
        orders = [_one_f_one_b(rank, pp, micro_batches) for rank in ranks]
    elif kind == "interleaved":
        orders = [_interleaved(rank, pp, micro_batches, chunks) for rank in ranks]
    elif chunks == 1:
        orders = [_zb_h1(rank, pp, micro_batches) for rank in ranks]
    else:
        orders = [_zb_v(rank, pp, micro_batches) for rank in ranks]
        rank_of = (*ranks, *reversed(ranks))
    return Schedule(
        kind=kind,
        virtual_stages=chunks,
        micro_batches=micro_batches,
        rank_of=rank_of,
        orders=tuple(map(tuple, orders)),
    )


def _check(kind: Kind, pp: int, micro_batches: int, chunks: int) -> None:
    chosen = (("virtual_stages", chunks), ("kind", kind))
    most = {"gpipe": 1, "1f1b": 1, "zero-bubble": 2}.get(kind, chunks)
    if chunks > most:
        raise LayoutError.between(chosen, f"{kind} has at most {most} on a rank", ("kind", "interleaved"))
    if kind != "interleaved":
        return
    if chunks < 2:
        raise LayoutError.between(chosen, f"{kind} has at least 2 on a rank", ("kind", "1f1b"))
    if micro_batches % pp:
        above = -(-micro_batches // pp) * pp
        sizes = (("micro_batches", micro_batches), ("pp", pp))
        raise LayoutError.between(sizes, f"{kind} takes micro-batches in groups of pp", ("micro_batches", above))


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
    """Interleaved 1F1B (Narayanan et al. 2021): groups of pp micro-batches pass through one chunk after the other."""
    total = micro_batches * chunks

    def nth(kind: Pass, n: int) -> Operation:
        group, place = divmod(n, pp * chunks)
        chunk, within = divmod(place, pp)
        if kind != "F":
            chunk = chunks - 1 - chunk
        return kind, chunk * pp + rank, group * pp + within

    # Twice the distance to the last rank: a gradient must come back from it in each chunk.
    ahead = min(total, 2 * (pp - 1 - rank) + (chunks - 1) * pp)
    yield from (nth("F", n) for n in range(ahead))
    for n in range(total):
        if n + ahead < total:
            yield nth("F", n + ahead)
        yield nth("D", n)


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
