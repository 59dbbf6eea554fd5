"""Gpu: the peak rates of one device, and a catalogue of GPUs (gpus.json) with the source of each row.

Peaks are dense, that is half of what data sheets print "with sparsity", and for 16-bit products that accumulate in
fp32, as PyTorch's do; bandwidths are decimal.
"""

import functools
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import RunError, nearest

MatmulPrecision = Literal["bf16", "fp16", "tf32", "fp32", "fp8", "fp4"]
Link = Literal["nvlink", "xgmi", "pcie", "memory"]
"""`memory`: ranks on the cores of one machine."""
LAUNCH_SECONDS = 4e-6
"""Seconds between the starts of two dependent kernels of a GPU: draining one and filling the next."""


@dataclass(frozen=True, kw_only=True)
class CoreRates:
    """Rates of one rank on one core of a CPU, as `dstk calibrate` measured them. Pairs: forward, backward."""

    products: Mapping[str, tuple[tuple[int, int, int, float], ...]] = field(hash=False)
    """Sizes m, n, k of matrix products and their FLOP/s, by precision."""
    attention: Mapping[str, tuple[float, float]] = field(hash=False)
    """FLOP/s of causal attention by precision; masked blocks do not count."""
    layer_bytes_per_second: tuple[float, float]
    """Bandwidth of a decoder layer's element-wise kernels, by the bytes that time_profiles.json counts."""
    layer_seconds: tuple[float, float]
    """A layer in Python: its modules, autograd and the dispatch of kernels. Nothing computes meanwhile."""
    loss_bytes_per_second: tuple[float, float]

    def product_flops(self, precision: str, m: int, n: int, k: int) -> float:
        """FLOP/s of a product: those of measured products, weighted by how near their sizes are in powers of two."""
        weighted = [
            (1 / (0.05 + sum(math.log2(a / b) ** 2 for a, b in zip((m, n, k), row[:3], strict=True))), row[3])
            for row in self.products[precision]
        ]
        total = sum(weight for weight, _ in weighted)
        return math.exp(sum(weight * math.log(rate) for weight, rate in weighted) / total)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device as PyTorch sees it. `gpu(name)` and `find_gpu(device_name)` give those of the catalogue."""

    name: str
    memory_bytes: int
    """Memory that the driver gives to a process (`torch.cuda.mem_get_info()[1]`), rounded down to 0.1 GiB because
    driver versions differ by as much. ECC and the driver's own share are already subtracted from the data sheet's
    figure."""
    bf16_flops: float | None
    """Peak FLOP/s; None where the hardware has no such matrix unit."""
    fp16_flops: float | None
    tf32_flops: float | None
    fp32_flops: float
    link: Link
    """The link between GPUs of one machine. PCIe cards whose NVLink bridge joins only pairs count as pcie."""
    link_bytes_per_second: float
    """Bandwidth of all of the GPU's links together, in one direction: half of the bidirectional figure in data
    sheets."""
    fp8_flops: float | None
    fp4_flops: float | None
    multiprocessors: int
    """Streaming multiprocessors, or AMD's compute units: a matrix product's tiles are spread over them."""
    memory_bytes_per_second: float
    """Bandwidth of the GPU's own memory."""
    matmul_fraction: Mapping[str, float] = field(hash=False)
    """The one measured figure: the share of the peak that PyTorch's best matrix product reaches ("Maximum Achievable
    Matmul FLOPS" of Bekman, Machine Learning Engineering, chapter Accelerators, measured with mamf-finder.py). Empty
    where nobody published one."""
    link_domain: int
    """GPUs that `link` joins: those of a machine, or of a rack."""
    network_bytes_per_second: float
    """Bandwidth from a GPU to other machines in one direction, as the maker's reference system has it: DGX, HGX,
    NVL72."""
    host_bytes_per_second: float
    """Bandwidth to the memory of its CPU in one direction: PCIe, or NVLink-C2C."""
    watts: int
    """Power of the board in watts."""
    source: str
    """The document with the peaks and bandwidths."""
    device_names: tuple[str, ...]
    """Names that `torch.cuda.get_device_name` returns, without the maker."""
    kernel_seconds: float = LAUNCH_SECONDS
    """Seconds that a kernel takes besides its work."""
    core: CoreRates | None = None
    """Rates of a CPU's rank; None for GPUs."""

    def peak_flops(self, precision: MatmulPrecision) -> float | None:
        """Peak FLOP/s of dense matrix products; None where the GPU has no unit for `precision`."""
        peak: float | None = getattr(self, f"{precision}_flops")
        return peak


@functools.cache
def _catalogue() -> tuple[Gpu, ...]:
    """The rows of gpus.json: dense peaks in TFLOP/s, bandwidths in GB/s (of links in one direction)."""

    def peaks(tflops: dict[str, float | None]) -> dict[str, Any]:
        known = {"fp8": None, "fp4": None} | tflops
        return {f"{name}_flops": None if peak is None else peak * 1e12 for name, peak in known.items()}

    rows = json.loads((Path(__file__).parent / "gpus.json").read_text(encoding="utf-8"))
    return tuple(
        Gpu(
            name=row["name"],
            memory_bytes=int(row["memory_gib"] * 2**30),
            **peaks(row["tflops"]),
            link=row["link"],
            link_bytes_per_second=row["link_gb_per_second"] * 1e9,
            multiprocessors=row["multiprocessors"],
            memory_bytes_per_second=row["memory_gb_per_second"] * 1e9,
            matmul_fraction=row["matmul_fraction"],
            link_domain=row["link_domain"],
            network_bytes_per_second=row["network_gb_per_second"] * 1e9,
            host_bytes_per_second=row["host_gb_per_second"] * 1e9,
            watts=row["watts"],
            source=row["source"],
            device_names=tuple(row["device_names"]),
        )
        for row in rows
    )


def gpus() -> list[str]:
    """The names in the catalogue."""
    return [entry.name for entry in _catalogue()]


def find_gpu(device_name: str) -> Gpu | None:
    """The GPU that `torch.cuda.get_device_name` calls `device_name`; None for one that is not in the catalogue.

    The whole name has to match: an RTX 3090 Ti, an H100 NVL and a MIG slice are other devices.
    """
    model = _bare(device_name)
    return next((entry for entry in _catalogue() if model in map(_bare, entry.device_names)), None)


def variants(name: str) -> tuple[Gpu, ...]:
    """The GPUs that `name` may mean, the commonest first: `H100`, `a100-40gb`, `h100-sxm5`, `rtx 4090` or `4090`.

    Maker and case do not count, and board and memory may be left out; the memory is that of the data sheet, or close.
    """
    words = _words(name)

    def agrees(entry: Gpu) -> bool:
        chip, *others = _words(entry.name)
        size = entry.memory_bytes / 2**30
        sizes = [word for word in words if re.fullmatch("[0-9]{1,3}", word) and abs(int(word) / size - 1) < 0.12]
        return chip in words and set(words) <= {chip, *others, *sizes}

    known = find_gpu(name)
    return (known,) if known else tuple(filter(agrees, _catalogue()))


def gpu(name: str) -> Gpu:
    """The first of `variants(name)`. Raises RunError where there is none, with the nearest names."""
    matches = variants(name)
    if matches:
        return matches[0]
    chips = [_words(entry)[0].upper() for entry in gpus()]
    close = nearest(name, [*gpus(), *chips], cutoff=0.4, most=3).strip()
    advice = close or "name a chip, such as H100 or MI300X"
    raise RunError.of("gpu", name, "it is not in the catalogue", advice)


def variant_note(name: str | None) -> str | None:
    """Return a note for a user who names a chip with several boards or memories; None where the memory is named too."""
    matches = () if name is None else variants(name)
    if name is None or len(matches) < 2 or any(map(str.isdecimal, _words(name))):
        return None
    return f"--gpu {name} is taken for {matches[0].name}; others are {', '.join(entry.name for entry in matches[1:])}."


def host_memory_bytes() -> int:
    """The memory of this machine, or the limit of a container's control group."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            allowed = Path(path).read_text().strip()
        except OSError:
            continue
        if allowed.isdigit():
            return min(pages, int(allowed))
    return pages


def cpu_name() -> str:
    """This machine's processor and the cores that the process may use: `AMD EPYC 7763, 2 cores`."""
    cores = len(os.sched_getaffinity(0))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {cores} core{'s' if cores > 1 else ''}"


def _words(name: str) -> list[str]:
    """`NVIDIA H100-SXM5 80GB` -> h100, sxm, 80."""
    short = re.sub(r"\b(nvidia|amd|tesla|geforce|instinct|rtx)|(?<=\d)\s*gb\b|(?<=sxm)\d", "", name.lower())
    return [word for word in re.split(r"[-_\s]+", short) if word]


def _bare(device_name: str) -> str:
    return re.sub(r"^(nvidia|tesla|amd)\s+", "", device_name.strip().lower())
