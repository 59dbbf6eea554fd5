"""Calibration: the constants of one machine, as `dstk calibrate` stores them and the time model reads them."""

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from toolkit import __version__
from toolkit.errors import RunError
from toolkit.files import cache_folder, first_problem, read_text, reason_of, sync
from toolkit.hardware import CoreRates, Gpu, cpu_name
from toolkit.hardware import gpu as find_gpu
from toolkit.planner.cluster import Cluster, with_present_names

CPU = "cpu"
"""The name that stands for a rank on a core of this machine where a GPU is named."""
MEASURED = "measured"
"""The word that stands for the stored calibration where a cluster's file is named."""
_AGAIN = "run dstk calibrate again"

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_STRICT = ConfigDict(extra="forbid", frozen=True)


class Core(BaseModel):
    """A CPU's rank: see CoreRates."""

    model_config = _STRICT
    products: Mapping[str, tuple[tuple[int, int, int, Rate], ...]]
    attention: Mapping[str, tuple[Rate, Rate]]
    layer_bytes_per_second: tuple[Rate, Rate]
    layer_seconds: tuple[Seconds, Seconds]
    loss_bytes_per_second: tuple[Rate, Rate]


class Calibration(BaseModel):
    """The measured constants of one machine, with its hardware, the date and the versions of libraries."""

    model_config = _STRICT
    format: Literal[1]
    gpu: str
    """`cpu`, or the name of a GPU in the catalogue."""
    hardware: str
    """The processor or GPU, by its own name."""
    date: str
    versions: Mapping[str, str]
    cluster: Mapping[str, Seconds]
    """Fields of `Cluster` that were measured, by name; latencies in seconds."""
    memory_bytes_per_second: Rate
    kernel_seconds: Seconds
    matmul_fraction: Mapping[str, Rate] = {}
    """Share of the catalogue's peak FLOP/s that the best matrix product reached on a GPU, by precision; empty for a
    CPU."""
    core: Core | None = None
    others: Seconds = 0.0
    """Cores that other programs kept busy meanwhile."""

    @field_validator("cluster", mode="before")
    @classmethod
    def _present_names(cls, facts: Any) -> Any:
        """Read files of version 0.2, in which some fields had other names."""
        return with_present_names(facts) if isinstance(facts, Mapping) else facts

    @property
    def summary(self) -> str:
        """The main figures on one line."""
        if self.core is None:
            return f"{self.matmul_fraction}, memory {self.memory_bytes_per_second / 1e9:.0f} GB/s"
        best = [f"{name} {max(row[3] for row in rows) / 1e9:.0f}" for name, rows in self.core.products.items()]
        latency = f"{self.cluster['link_latency_seconds'] * 1e6:.0f} us"
        link = f"{latency} and {self.cluster['link_bytes_per_second'] / 1e9:.2g} GB/s"
        memory = f"{self.memory_bytes_per_second / 1e9:.1f} GB/s of memory"
        return f"a rank has {' and '.join(best)} GFLOP/s, {memory}; between ranks {link}"

    def of_ranks(self, ranks: int) -> Cluster:
        """The cluster of so many ranks of this machine."""
        facts = dict(self.cluster)
        if self.core is None:
            return Cluster.of(self._device(find_gpu(self.gpu)), **facts)
        gpu = self._device(self._core_device(self.core, facts, ranks))
        return Cluster.of(gpu, **(facts | {"gpus_per_node": ranks}))

    def _device(self, gpu: Gpu) -> Gpu:
        fractions = self.matmul_fraction or gpu.matmul_fraction
        return replace(
            gpu,
            matmul_fraction=fractions,
            memory_bytes_per_second=self.memory_bytes_per_second,
            kernel_seconds=self.kernel_seconds,
        )

    def _core_device(self, core: Core, facts: Mapping[str, float], ranks: int) -> Gpu:
        best = {precision: max(row[3] for row in rows) for precision, rows in core.products.items()}
        return Gpu(
            name=CPU,
            memory_bytes=int(facts["host_memory_bytes"] / ranks),
            bf16_flops=best.get("bf16"),
            fp16_flops=None,
            tf32_flops=None,
            fp32_flops=best["fp32"],
            fp8_flops=None,
            fp4_flops=None,
            link="memory",
            link_bytes_per_second=facts["link_bytes_per_second"],
            multiprocessors=1,
            memory_bytes_per_second=self.memory_bytes_per_second,
            matmul_fraction={},
            link_domain=ranks,
            network_bytes_per_second=facts["link_bytes_per_second"],
            host_bytes_per_second=self.memory_bytes_per_second,
            watts=0,
            source=f"dstk calibrate, {self.date}",
            device_names=(self.hardware,),
            core=CoreRates(**core.model_dump()),
        )

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(self.model_dump_json(indent=2, exclude_defaults=True) + "\n", encoding="utf-8")
            sync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises RunError for one that is missing, or that `dstk calibrate` did not write."""
        try:
            calibration = cls.model_validate_json(read_text(path))
            calibration.of_ranks(1)
        except ValidationError as error:
            raise _refused(path, f"it is not a calibration file of this version: {first_problem(error)}") from None
        except FileNotFoundError:
            raise _refused(path, "this machine is not calibrated yet", "run dstk calibrate") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _refused(path, f"it cannot be read: {reason_of(error)}") from None
        return calibration

    @classmethod
    def of_this_machine(cls) -> Self:
        """The stored one. Raises RunError where there is none, or where hardware or versions have changed since."""
        path = calibration_path()
        calibration = cls.read(path)
        if calibration.gpu == CPU and calibration.hardware != cpu_name():
            raise _refused(path, f"it was measured on {calibration.hardware}, and this is {cpu_name()}")
        for package, before in calibration.versions.items():
            now = current_versions().get(package)
            if now != before:
                raise _refused(path, f"it was measured with {package} {before}, and now there is {now}")
        return calibration


def _refused(path: Path, reason: str, advice: str = _AGAIN) -> RunError:
    return RunError.of("calibration", str(path), reason, advice)


def calibration_path() -> Path:
    """Return the path where `dstk calibrate` stores its file, beside the other caches."""
    return cache_folder() / "calibration.json"


def stored() -> Calibration | None:
    """This machine's calibration, where there is one that still holds."""
    try:
        return Calibration.of_this_machine()
    except RunError:
        return None


def is_calibration(path: Path) -> bool:
    """Whether a file of a cluster is one that `dstk calibrate` wrote: JSON, where people write YAML."""
    try:
        return read_text(path).startswith("{")
    except (OSError, ValueError):
        return False


def current_versions() -> dict[str, str]:
    """Return the versions of the packages that times depend on, by name; `none` for one that is not installed."""
    versions = {"toolkit": __version__}
    for package in ("torch", "deepspeed", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return versions
