"""Links between local ranks: latency and bandwidth of sends and all-reduces, and how ranks slow each other down."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from toolkit.calibrate.layers import layer_times
from toolkit.planner.collectives import LINK_SHARE

_LARGE_BYTES = 1 << 21


def measure_links(seconds: float, device: torch.device) -> dict[str, float]:
    """Measure the facts of Cluster about links, on two or more ranks at once, by the formulas of collectives.py."""
    ranks = dist.get_world_size()
    small = torch.ones(8, device=device)
    large = torch.ones(_LARGE_BYTES // 4, device=device)
    calls = _agreed_calls(lambda: dist.all_reduce(large), seconds)
    latency = _collective_seconds(small, calls)
    transfer = _collective_seconds(large, calls)
    hop = _ping_pong(small, calls)
    moved = 2 * _LARGE_BYTES * (ranks - 1) / ranks
    return {
        "link_latency_seconds": hop,
        "collective_seconds": max(0.0, latency - 2 * (ranks - 1) * hop),
        "link_bytes_per_second": moved / LINK_SHARE / max(transfer - latency, 1e-9),
    }


def _agreed_calls(call: Callable[[], object], seconds: float) -> int:
    """Return how many calls rank 0 takes for about `seconds`: from 3 to 2000, the same on every rank."""
    start = time.perf_counter()
    call()
    count = torch.tensor([max(3.0, seconds / max(time.perf_counter() - start, 1e-6))])
    dist.broadcast(count, 0)
    return min(2000, int(count))


def _collective_seconds(tensor: torch.Tensor, calls: int) -> float:
    """Return the median seconds of all-reduces between which ranks compute, as in training.

    Then gloo's threads have to be woken, compete with ranks for cores, and find nothing in the caches: such a call is
    several times as slow as one that follows another.
    """
    a = torch.ones(256, 512)
    b = torch.ones(512, 512)
    beyond_caches = torch.ones(1 << 21)
    times = []
    for _ in range(calls):
        for _ in range(4):
            torch.mm(a, b)
        beyond_caches.mul_(1.0)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return median(times)


def _quiet_seconds(call: Callable[[], None], calls: int) -> float:
    """Return the seconds of the fastest of `calls` calls that all ranks begin together: other load only ever adds."""
    times = []
    for _ in range(calls):
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _ping_pong(tensor: torch.Tensor, calls: int) -> float:
    """Return half of the seconds until a message between ranks 0 and 1 is back."""
    rank = dist.get_rank()

    def call() -> None:
        for turn in (0, 1):
            if rank == turn:
                dist.send(tensor, 1 - turn)
            elif rank < 2:
                dist.recv(tensor, turn)

    return _quiet_seconds(call, calls) / 2


def measure_alongside(hidden: int, size: tuple[int, int], seconds: float) -> float:
    """Measure a layer's seconds while as many ranks compute as there are cores; every rank calls it."""
    dist.barrier()
    return layer_times(hidden, size, seconds)
