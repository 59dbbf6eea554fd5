"""Seconds of one GPU's kernels: matrix products by tiles and waves, attention, and whatever is bound by memory.

Legend: a product is [m, k] x [k, n]. Each thread block computes one tile of the result and a multiprocessor runs one
block at a time, so a product takes as many waves as tiles over multiprocessors, rounded up. Source: NVIDIA, "Matrix
Multiplication Background User's Guide" (tile and wave quantization); the roofline is Williams et al. 2009.

The products of a layer's experts are one grouped kernel, whose waves take tiles of all of them: with few rows for each
expert its last tile of rows is partly filled, and reading the weights takes longer than multiplying by them.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from toolkit.hardware import Gpu, MatmulPrecision

DEFAULT_FRACTION = 0.8
"""Share of the peak FLOP/s that matrix products reach on GPUs without a measured figure."""
SUSTAINED = 0.87
"""Share of the best product's rate that a step keeps up: the published figures are the best of many shapes, each
measured for moments."""
SUSTAINED_OF_LARGE_BOARDS = 0.77
"""Share that a step keeps up from 500 W of board power: boards of 700 W and more lower their clocks meanwhile."""
_LARGE_BOARD_WATTS = 500
MEMORY_SHARE = 0.85
"""Share of the memory's bandwidth that streaming kernels reach: BabelStream has 0.87 to 0.92 on A100 and H100 for large
buffers; norms and dropout reduce across rows or draw numbers beside."""
_RAMP = 1.0e-6
"""Seconds that each wave takes besides its products: loading the first tiles, storing the last."""


class _Tile(NamedTuple):
    """A tile size of cuBLAS's kernels, and the rate of the kernel as a share of the largest tile's."""

    rows: int
    columns: int
    rate_share: float


_TILES = (
    _Tile(256, 128, 1.0),
    _Tile(128, 256, 1.0),
    _Tile(128, 128, 0.92),
    _Tile(128, 64, 0.75),
    _Tile(64, 64, 0.6),
)
"""A tile of m x n reads m + n numbers for m n products, and small ones are bound by shared memory."""
_SPLITS = (1, 2, 4, 8)
"""Blocks that may share out the k of a tile."""
_LEAST_SPLIT_K = 512
"""The least k that a block keeps of a tile that is split."""
_ELEMENT_BYTES: Mapping[MatmulPrecision, float] = {
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "fp4": 0.5,
}


@lru_cache(maxsize=262144)
def matmul_seconds(gpu: Gpu, m: int, n: int, k: int, precision: MatmulPrecision, groups: int = 1) -> float:
    """Seconds of one product, by the best of cuBLAS's tiles, also with k split among blocks; or of `groups` at once."""
    if min(m, n, k) < 1:
        return 0.0
    if gpu.core is not None:
        return groups * 2 * m * n * k / gpu.core.product_flops(precision, m, n, k) + gpu.kernel_seconds
    element_bytes = _ELEMENT_BYTES[precision]
    result_bytes = max(2, element_bytes)
    moved_bytes = groups * (element_bytes * (m * k + k * n) + result_bytes * m * n)
    memory = moved_bytes / (MEMORY_SHARE * gpu.memory_bytes_per_second)
    return max(_tiled_seconds(gpu, m, n, k, precision, groups), memory) + gpu.kernel_seconds


def _tiled_seconds(gpu: Gpu, m: int, n: int, k: int, precision: MatmulPrecision, groups: int) -> float:
    """Seconds in which the multiprocessors compute a product, with the best tile and split."""
    peak = gpu.peak_flops(precision) or gpu.fp32_flops
    sustained = SUSTAINED_OF_LARGE_BOARDS if gpu.watts >= _LARGE_BOARD_WATTS else SUSTAINED
    rate = peak * sustained * fraction(gpu, precision) / gpu.multiprocessors
    best = float("inf")
    for tile in _TILES:
        tiles = groups * -(-m // tile.rows) * -(-n // tile.columns)
        for split in _SPLITS:
            blocks = tiles * split
            if split > 1 and (groups > 1 or blocks > 2 * gpu.multiprocessors or k < _LEAST_SPLIT_K * split):
                break
            # A wave is a tile's work at the rate of one multiprocessor; the last wave may be nearly empty.
            waves = -(-blocks // gpu.multiprocessors)
            wave = 2 * tile.rows * tile.columns * (k / split) / (rate * tile.rate_share) + _RAMP
            sum_of_splits = 0.0
            if split > 1:  # a kernel reads what each block made, in fp32, and writes the sum
                sum_of_splits = 4 * m * n * (split + 1) / (MEMORY_SHARE * gpu.memory_bytes_per_second)
            best = min(best, waves * wave + sum_of_splits)
    return best


def fraction(gpu: Gpu, precision: MatmulPrecision) -> float:
    """The measured share of the peak; 16-bit formats share one figure, and fp4 has that of fp8."""
    known = gpu.matmul_fraction
    measured = known.get(precision) or known.get({"fp4": "fp8", "fp8": "fp8"}.get(precision, "bf16"))
    return measured or known.get("bf16", DEFAULT_FRACTION)


def stream_seconds(gpu: Gpu, size: float, kernels: float = 1, *, reached: float | None = None) -> float:
    """Seconds to read and write `size` bytes in so many kernels, at the memory's or at a `reached` bandwidth."""
    return size / (reached or MEMORY_SHARE * gpu.memory_bytes_per_second) + kernels * gpu.kernel_seconds
