"""Gpu: what one device can do at best, and a catalogue of them with sources.

Peaks are dense, that is half of what data sheets print "with sparsity", and for 16-bit products that accumulate in
fp32, as PyTorch's do; bandwidths are decimal.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import RunError

MatmulPrecision = Literal["bf16", "fp16", "tf32", "fp32"]
Link = Literal["nvlink", "xgmi", "pcie"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device as PyTorch sees it. `gpu(name)` and `find_gpu(device_name)` give those of the catalogue."""

    name: str
    memory_bytes: int
    """What the driver hands to a process (`torch.cuda.mem_get_info()[1]`), rounded down to 0.1 GiB: driver versions
    differ by as much. It is not the data sheet's figure: ECC and the driver take their part first."""
    bf16_flops: float | None
    """Peak FLOP/s; None where the hardware has no such matrix unit."""
    fp16_flops: float | None
    tf32_flops: float | None
    fp32_flops: float
    memory_bytes_per_second: float
    link: Link
    """How GPUs of one machine talk. PCIe cards whose NVLink bridge joins only pairs count as pcie."""
    link_bytes_per_second: float
    """Of all of the GPU's links together, in one direction: half of the bidirectional figure in data sheets."""
    source: str
    """The document with the peaks and bandwidths."""
    device_names: tuple[str, ...]
    """What `torch.cuda.get_device_name` says, without the maker."""

    def peak_flops(self, precision: MatmulPrecision) -> float:
        """Peak FLOP/s of dense matrix products. Raises RunError where the GPU has no unit for `precision`."""
        peaks = {"bf16": self.bf16_flops, "fp16": self.fp16_flops, "tf32": self.tf32_flops, "fp32": self.fp32_flops}
        peak = peaks[precision]
        if peak is None:
            able = ", ".join(name for name, flops in peaks.items() if flops is not None)
            raise RunError(f"precision={precision} on {self.name}: it has matrix units for {able}. Choose one of them.")
        return peak


def _gpu(
    name: str,
    *device_names: str,
    memory_gib: float,
    tflops: tuple[float | None, float | None, float | None, float],
    memory_gb_per_second: float,
    link: tuple[Link, float],
    source: str,
) -> Gpu:
    """A row of the catalogue; `tflops` is bf16, fp16, tf32, fp32, and `link` has GB/s in one direction."""
    bf16, fp16, tf32, fp32 = tflops
    return Gpu(
        name=name,
        memory_bytes=int(memory_gib * _GIB),
        bf16_flops=None if bf16 is None else bf16 * 1e12,
        fp16_flops=None if fp16 is None else fp16 * 1e12,
        tf32_flops=None if tf32 is None else tf32 * 1e12,
        fp32_flops=fp32 * 1e12,
        memory_bytes_per_second=memory_gb_per_second * 1e9,
        link=link[0],
        link_bytes_per_second=link[1] * 1e9,
        source=source,
        device_names=device_names,
    )


# Rows: tflops is dense bf16, fp16, tf32, fp32; link is GB/s in one direction.
_CATALOGUE = (
    _gpu(
        "B200",
        "B200",
        memory_gib=178.3,
        tflops=(2250, 2250, 1100, 80),
        memory_gb_per_second=8000,
        link=("nvlink", 900),
        source="NVIDIA Blackwell Architecture Technical Brief (2024), HGX B200",
    ),
    _gpu(
        "H200",
        "H200",
        memory_gib=139.7,
        tflops=(989.4, 989.4, 494.7, 66.9),
        memory_gb_per_second=4800,
        link=("nvlink", 450),
        source="NVIDIA H200 Tensor Core GPU datasheet (2024)",
    ),
    _gpu(
        "H100-SXM-80GB",
        "H100 80GB HBM3",
        memory_gib=79.1,
        tflops=(989.4, 989.4, 494.7, 66.9),
        memory_gb_per_second=3350,
        link=("nvlink", 450),
        source="NVIDIA H100 Tensor Core GPU Architecture whitepaper (2022)",
    ),
    _gpu(
        "H100-PCIe-80GB",
        "H100 PCIe",
        memory_gib=79.1,
        tflops=(756, 756, 378, 51.2),
        memory_gb_per_second=2000,
        link=("pcie", 64),
        source="NVIDIA H100 Tensor Core GPU Architecture whitepaper (2022)",
    ),
    _gpu(
        "A100-SXM-80GB",
        "A100-SXM4-80GB",
        memory_gib=79.1,
        tflops=(312, 312, 156, 19.5),
        memory_gb_per_second=2039,
        link=("nvlink", 300),
        source="NVIDIA A100 Tensor Core GPU datasheet (2021)",
    ),
    _gpu(
        "A100-SXM-40GB",
        "A100-SXM4-40GB",
        memory_gib=39.3,
        tflops=(312, 312, 156, 19.5),
        memory_gb_per_second=1555,
        link=("nvlink", 300),
        source="NVIDIA A100 Tensor Core GPU datasheet (2021)",
    ),
    _gpu(
        "A100-PCIe-80GB",
        "A100 80GB PCIe",
        memory_gib=79.1,
        tflops=(312, 312, 156, 19.5),
        memory_gb_per_second=1935,
        link=("pcie", 32),
        source="NVIDIA A100 Tensor Core GPU datasheet (2021)",
    ),
    _gpu(
        "A100-PCIe-40GB",
        "A100-PCIE-40GB",
        memory_gib=39.3,
        tflops=(312, 312, 156, 19.5),
        memory_gb_per_second=1555,
        link=("pcie", 32),
        source="NVIDIA A100 Tensor Core GPU datasheet (2021)",
    ),
    _gpu(
        "V100-SXM-32GB",
        "V100-SXM2-32GB",
        memory_gib=31.7,
        tflops=(None, 125, None, 15.7),
        memory_gb_per_second=900,
        link=("nvlink", 150),
        source="NVIDIA V100 Tensor Core GPU datasheet (2020)",
    ),
    _gpu(
        "V100-SXM-16GB",
        "V100-SXM2-16GB",
        memory_gib=15.7,
        tflops=(None, 125, None, 15.7),
        memory_gb_per_second=900,
        link=("nvlink", 150),
        source="NVIDIA V100 Tensor Core GPU datasheet (2020)",
    ),
    _gpu(
        "V100-PCIe-32GB",
        "V100-PCIE-32GB",
        memory_gib=31.7,
        tflops=(None, 112, None, 14),
        memory_gb_per_second=900,
        link=("pcie", 16),
        source="NVIDIA V100 Tensor Core GPU datasheet (2020)",
    ),
    _gpu(
        "V100-PCIe-16GB",
        "V100-PCIE-16GB",
        memory_gib=15.7,
        tflops=(None, 112, None, 14),
        memory_gb_per_second=900,
        link=("pcie", 16),
        source="NVIDIA V100 Tensor Core GPU datasheet (2020)",
    ),
    _gpu(
        "L40S",
        "L40S",
        memory_gib=44.4,
        tflops=(362, 362, 183, 91.6),
        memory_gb_per_second=864,
        link=("pcie", 32),
        source="NVIDIA L40S datasheet (2023)",
    ),
    _gpu(
        "L4",
        "L4",
        memory_gib=21.9,
        tflops=(121, 121, 60, 30.3),
        memory_gb_per_second=300,
        link=("pcie", 32),
        source="NVIDIA L4 Tensor Core GPU datasheet (2023)",
    ),
    _gpu(
        "A10",
        "A10",
        memory_gib=21.9,
        tflops=(125, 125, 62.5, 31.2),
        memory_gb_per_second=600,
        link=("pcie", 32),
        source="NVIDIA A10 Tensor Core GPU datasheet (2021)",
    ),
    _gpu(
        "A10G",
        "A10G",
        memory_gib=21.9,
        tflops=(70, 70, 35, 35),
        memory_gb_per_second=600,
        link=("pcie", 32),
        source="NVIDIA A10G datasheet (2021)",
    ),
    _gpu(
        "T4",
        "T4",
        memory_gib=14.5,
        tflops=(None, 65, None, 8.1),
        memory_gb_per_second=320,
        link=("pcie", 16),
        source="NVIDIA T4 Tensor Core GPU datasheet (2019)",
    ),
    _gpu(
        "RTX4090",
        "GeForce RTX 4090",
        memory_gib=23.5,
        tflops=(165.2, 165.2, 82.6, 82.6),
        memory_gb_per_second=1008,
        link=("pcie", 32),
        source="NVIDIA Ada GPU Architecture whitepaper (2022)",
    ),
    _gpu(
        "RTX3090",
        "GeForce RTX 3090",
        memory_gib=23.5,
        tflops=(71, 71, 35.6, 35.6),
        memory_gb_per_second=936,
        link=("pcie", 32),
        source="NVIDIA Ampere GA102 GPU Architecture whitepaper (2021)",
    ),
    _gpu(
        "MI300X",
        "Instinct MI300X",
        "Instinct MI300X OAM",
        memory_gib=191.4,
        tflops=(1307.4, 1307.4, 653.7, 163.4),
        memory_gb_per_second=5300,
        link=("xgmi", 448),
        source="AMD Instinct MI300X data sheet (2023)",
    ),
    _gpu(
        "MI250X-GCD",
        "Instinct MI250X",
        memory_gib=63.9,
        tflops=(191.5, 191.5, None, 47.85),
        memory_gb_per_second=1638,
        link=("xgmi", 200),
        source="AMD Instinct MI250X data sheet (2021), half of it: PyTorch sees each of the two dies",
    ),
)


def gpus() -> list[str]:
    """The names in the catalogue."""
    return [entry.name for entry in _CATALOGUE]


def find_gpu(device_name: str) -> Gpu | None:
    """The GPU that `torch.cuda.get_device_name` calls `device_name`; None for one that is not in the catalogue.

    The whole name has to match: an RTX 3090 Ti, an H100 NVL or a MIG slice is another device than its namesake.
    """
    model = _bare(device_name)
    return next((entry for entry in _CATALOGUE if model in map(_bare, entry.device_names)), None)


def gpu(name: str) -> Gpu:
    """The GPU of the catalogue called `name`, in any case, or known to PyTorch under it. Raises RunError otherwise.

    The board is SXM where a name leaves it out, and GB may be left out too: `H100-80`, `A100-40`.
    """
    by_name = {spelling: entry for entry in reversed(_CATALOGUE) for spelling in _spellings(entry.name.lower())}
    found = by_name.get(name.lower()) or find_gpu(name)
    if found is not None:
        return found
    exact = {entry.lower(): entry for entry in gpus()}
    wanted = name.lower()
    # A part of a name is most often a chip whose boards and memories the user did not tell apart.
    starting = [key for key in exact if key.startswith(wanted)] if wanted else []
    close = list(dict.fromkeys([*starting, *difflib.get_close_matches(wanted, exact, n=3, cutoff=0.4)]))
    close = close[: max(3, len(starting))]
    hint = f" Nearest: {', '.join(exact[key] for key in close)}." if close else ""
    raise RunError(f"gpu={name} is not in the catalogue.{hint} Choose one of {', '.join(gpus())}.")


def _spellings(name: str) -> tuple[str, ...]:
    short = name.replace("-sxm", "")
    return name, short, short.removesuffix("gb")


def _bare(device_name: str) -> str:
    return re.sub(r"^(nvidia|tesla|amd)\s+", "", device_name.strip().lower())
