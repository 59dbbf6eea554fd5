"""Kernels of one rank: matrix products over shapes and dtypes, attention, memory, and what a kernel takes at least.

Times are the smallest of many, and of a single thread those in which it had a core: whatever else runs on the machine
only ever adds to them.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

Product = tuple[int, int, int]
"""The sizes (m, n, k) of a product [m, k] x [k, n]."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU_PRODUCTS: tuple[Product, ...] = (
    (32, 128, 128),
    (64, 256, 256),
    (128, 384, 128),
    (256, 256, 1024),
    (512, 256, 256),
    (512, 512, 512),
    (128, 1024, 256),
    (256, 1024, 4096),
    (1024, 768, 768),
    (1024, 256, 512),
    (256, 4096, 256),
    (512, 2048, 1024),
)
GPU_PRODUCTS: tuple[Product, ...] = tuple((m, n, 4096) for m in (2048, 4096, 8192) for n in (4096, 8192, 16384))

_TURNS = 5


def clock(device: torch.device) -> Callable[[], float]:
    """Return the thread's clock where only that thread computes, and the wall clock where other threads or a GPU do."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def least_seconds(call: Callable[[], object], seconds: float, device: torch.device, *, calls: int = 1) -> float:
    """Return the least seconds of one call, as a share of `calls` calls in a row, that are found within `seconds`."""
    now = clock(device)
    best = float("inf")
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
    """Measure each product [m, k] x [k, n]; return (m, n, k, FLOP/s) of each."""
    dtype = DTYPES[precision]
    best = dict.fromkeys(products, float("inf"))
    for _ in range(_TURNS):  # all shapes in turn, so that a busy moment of the machine meets none of them each time
        for m, n, k in products:
            left = torch.randn(m, k, device=device).to(dtype)
            right = torch.randn(k, n, device=device).to(dtype)
            duration = least_seconds(partial(torch.matmul, left, right), seconds / _TURNS, device)
            best[m, n, k] = min(best[m, n, k], duration)
    return [(m, n, k, 2 * m * n * k / duration) for (m, n, k), duration in best.items()]


def attention_rates(
    precision: str, device: torch.device, seconds: float, *, positions: int = 256
) -> tuple[float, float]:
    """Measure the FLOP/s of causal attention, forward and backward.

    Only the half of the scores that is not masked counts: two products of 2 b n s^2 d FLOPs, halved, in the forward
    pass, and five products, of which one computes the scores again, in the backward pass.
    """
    samples = 2
    heads = 4
    head_dim = 64
    shape = (samples, heads, positions, head_dim)
    dtype = DTYPES[precision]
    query = torch.randn(shape, device=device).to(dtype).requires_grad_()
    key = torch.randn(shape, device=device).to(dtype).requires_grad_()
    value = torch.randn(shape, device=device).to(dtype).requires_grad_()
    flops = 2.0 * samples * heads * positions**2 * head_dim
    forward, backward = pass_seconds(
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), (query, key, value), seconds
    )
    return flops / forward, 2.5 * flops / backward


def pass_seconds(
    call: Callable[[], torch.Tensor], leaves: Iterable[torch.Tensor], seconds: float
) -> tuple[float, float]:
    """Return the least seconds of the forward and of the backward pass of `call` that are found within `seconds`.

    `leaves` get their gradients anew each time.
    """
    best = [float("inf"), float("inf")]
    leaves = list(leaves)
    output = call()
    device = output.device
    gradient = torch.ones_like(output)
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
    """Measure the bytes a second that a kernel reads and writes together, over two buffers of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / least_seconds(lambda: torch.add(source, 1.0, out=target), seconds, device)


def kernel_seconds(device: torch.device, seconds: float) -> float:
    """Measure the seconds of the smallest kernel after another: launching it, or on a CPU dispatching it."""
    tensor = torch.ones(8, device=device)
    return least_seconds(lambda: tensor.add_(1.0), seconds, device, calls=100)


def host_rate(device: torch.device, seconds: float, size: int = 1 << 28) -> float:
    """Measure the bytes a second from the host's pinned memory to the device and back; return the slower of both."""
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    there = least_seconds(lambda: on_device.copy_(on_host, non_blocking=True), seconds, device)
    back = least_seconds(lambda: on_host.copy_(on_device, non_blocking=True), seconds, device)
    return size / max(there, back)
