"""Kernels of one rank: matrix products over shapes and dtypes, attention, memory, and what a kernel takes at least.

Times are the smallest of many, and of a single thread those in which it had a core: whatever else runs on the machine
only ever adds to them.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F

Product = tuple[int, int, int]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU_PRODUCTS: tuple[Product, ...] = (
    *((32, 128, 128), (64, 256, 256), (128, 384, 128), (256, 256, 1024), (512, 256, 256), (512, 512, 512)),
    *((128, 1024, 256), (256, 1024, 4096), (1024, 768, 768), (1024, 256, 512), (256, 4096, 256), (512, 2048, 1024)),
)
GPU_PRODUCTS: tuple[Product, ...] = tuple((m, n, 4096) for m in (2048, 4096, 8192) for n in (4096, 8192, 16384))

_TURNS = 5


def clock(device: torch.device) -> Callable[[], float]:
    """Of the thread where only that computes; of the wall where other threads or a GPU do."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def least_seconds(call: Callable[[], object], seconds: float, device: torch.device, *, calls: int = 1) -> float:
    """The least time of `calls` calls in a row, by one of them, found within `seconds`."""
    now, best = clock(device), float("inf")
    call()
    end = time.perf_counter() + seconds
    while True:
        _wait(device)
        start = now()
        for _ in range(calls):
            call()
        _wait(device)
        best = min(best, (now() - start) / calls)
        if time.perf_counter() > end:
            return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_rates(
    products: Sequence[Product], precision: str, device: torch.device, seconds: float
) -> list[tuple[int, int, int, float]]:
    """FLOP/s of each product [m, k] x [k, n]."""
    dtype, best = DTYPES[precision], dict.fromkeys(products, float("inf"))
    for _ in range(_TURNS):  # all shapes in turn, so that a busy moment of the machine meets none of them each time
        for m, n, k in products:
            left, right = (torch.randn(*size, device=device).to(dtype) for size in ((m, k), (k, n)))
            took = least_seconds(lambda a=left, b=right: a @ b, seconds / _TURNS, device)  # type: ignore[misc]
            best[m, n, k] = min(best[m, n, k], took)
    return [(m, n, k, 2 * m * n * k / took) for (m, n, k), took in best.items()]


def attention_rates(
    precision: str, device: torch.device, seconds: float, *, positions: int = 256
) -> tuple[float, float]:
    """FLOP/s of causal attention, forward and backward, by the half of the scores that is not masked."""
    query, key, value = (
        torch.randn(2, 4, positions, 64, device=device).to(DTYPES[precision]).requires_grad_() for _ in range(3)
    )
    flops = 2.0 * query.shape[0] * query.shape[1] * positions**2 * query.shape[3]
    forward, backward = pass_seconds(
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), (query, key, value), seconds
    )
    return flops / forward, 2.5 * flops / backward


def pass_seconds(
    call: Callable[[], torch.Tensor], leaves: Iterable[torch.Tensor], seconds: float
) -> tuple[float, float]:
    """The least times of the forward and of the backward pass; `leaves` get their gradients anew each time."""
    best = [float("inf"), float("inf")]
    leaves, output = list(leaves), call()
    device, gradient = output.device, torch.ones_like(output)
    now = clock(device)
    end = time.perf_counter() + seconds
    while True:
        for leaf in leaves:
            leaf.grad = None
        _wait(device)
        start = now()
        output = call()
        _wait(device)
        middle = now()
        output.backward(gradient)  # type: ignore[no-untyped-call]
        _wait(device)
        stop = now()
        best = [min(best[0], middle - start), min(best[1], stop - middle)]
        if time.perf_counter() > end:
            return best[0], best[1]


def memory_rate(device: torch.device, seconds: float, size: int) -> float:
    """Bytes a second that a kernel reads and writes over buffers of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / least_seconds(lambda: torch.add(source, 1.0, out=target), seconds, device)


def kernel_seconds(device: torch.device, seconds: float) -> float:
    """What the smallest kernel takes after another: launching it, or on a CPU dispatching it."""
    tensor = torch.ones(8, device=device)
    return least_seconds(lambda: tensor.add_(1.0), seconds, device, calls=100)


def host_rate(device: torch.device, seconds: float, size: int = 1 << 28) -> float:
    """Bytes a second from the host's pinned memory to the device and back, the slower of both."""
    host, ours = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8)
    ours = ours.to(device)
    there = least_seconds(lambda: ours.copy_(host, non_blocking=True), seconds, device)
    back = least_seconds(lambda: host.copy_(ours, non_blocking=True), seconds, device)
    return size / max(there, back)
