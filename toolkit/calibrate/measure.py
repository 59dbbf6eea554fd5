"""All measurements of `dstk calibrate`, in the order in which one figure needs another."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from statistics import fmean
from typing import Any

import torch

from toolkit.calibrate import engines, kernels
from toolkit.calibrate.layers import Layer, layer_times
from toolkit.calibrate.links import measure_alongside, measure_links
from toolkit.calibrate.other_load import OtherLoad
from toolkit.errors import RunError
from toolkit.hardware import cpu_name, find_gpu, host_memory_bytes
from toolkit.launch.environment import local_device
from toolkit.launch.local_ranks import preload, run_ranks
from toolkit.model_init.freed_memory import keep_freed_memory
from toolkit.planner.calibration.file import CPU, Calibration, current_versions
from toolkit.planner.kernels import MEMORY_SHARE

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Time and sizes of the measurements: less in tests."""

    seconds: float = 0.15
    """Seconds of measuring each figure of one rank."""
    products: tuple[kernels.Product, ...] = kernels.CPU_PRODUCTS
    buffer_bytes: int = 1 << 27
    layer: Layer = field(default_factory=Layer)
    ranks: bool = True
    """Whether figures of several processes are measured, too."""


FULL = Effort()


def calibrate(effort: Effort | None = None, say: Say = lambda _: None) -> Calibration:
    """Measure this machine. Raises RunError for a GPU that the catalogue does not have."""
    effort = effort or FULL
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    load = OtherLoad()
    calibration = _of_cpu(effort, say) if local_device().type == "cpu" else _of_gpu(effort, say)
    return _with(calibration, others=load.cores)


def _of_cpu(effort: Effort, say: Say) -> Calibration:
    """Measure a CPU: one rank first, then ranks beside each other, and last the engines, which need the rest."""
    keep_freed_memory()
    device = torch.device("cpu")
    say("matrix products, attention, memory")
    calibration = _cpu_kernels(effort, device)
    say("a decoder layer and the head")
    assert calibration.core is not None
    layer_rates = effort.layer.rates(calibration.of_ranks(1).gpu, 2 * effort.seconds)
    calibration = _with(calibration, core=calibration.core.model_dump() | layer_rates)
    if not effort.ranks:
        return calibration
    preload("gpt2")
    say("links between ranks")
    calibration = _with_cluster(calibration, _between_ranks(effort, device, cores=int(calibration.cluster["cores"])))
    say("engines")
    engine = engines.one_rank(calibration.of_ranks)
    memory_rate = engine.pop("memory_bytes_per_second") / MEMORY_SHARE
    calibration = _with(_with_cluster(calibration, engine), memory_bytes_per_second=memory_rate)
    return _with_cluster(calibration, engines.two_ranks(calibration.of_ranks))


def _cpu_kernels(effort: Effort, device: torch.device) -> Calibration:
    """Measure what one rank reaches in single kernels; what needs a layer or several ranks is a guess."""
    seconds = effort.seconds
    core = {
        "products": {name: kernels.product_rates(effort.products, name, device, seconds) for name in kernels.DTYPES},
        "attention": {name: kernels.attention_rates(name, device, seconds) for name in kernels.DTYPES},
        "layer_bytes_per_second": (1e9, 1e9),
        "layer_seconds": (0.0, 0.0),
        "loss_bytes_per_second": (1e9, 1e9),
    }
    return Calibration.model_validate(
        {
            "format": 1,
            "gpu": CPU,
            "hardware": cpu_name(),
            "date": date.today().isoformat(),
            "versions": current_versions(),
            "memory_bytes_per_second": kernels.memory_rate(device, seconds, effort.buffer_bytes) / MEMORY_SHARE,
            "kernel_seconds": kernels.kernel_seconds(device, seconds),
            "cluster": _without_ranks(),
            "core": core,
        }
    )


def _between_ranks(effort: Effort, device: torch.device, *, cores: int) -> dict[str, float]:
    """Measure the link between two ranks, and how much slower a rank computes while all `cores` do."""
    facts: dict[str, float] = run_ranks(partial(measure_links, 4 * effort.seconds, device), 2)[0]
    hidden = effort.layer.hidden
    _, positions = effort.layer.large
    size = (1, positions)  # a call is shorter than a turn of the system's scheduler
    alone = layer_times(hidden, size, 10 * effort.seconds)
    if cores == 1:
        return facts
    together = run_ranks(partial(measure_alongside, hidden, size, 10 * effort.seconds), cores)
    return facts | {"slowdown": max(1.0, fmean(together) / alone)}


def _with_cluster(calibration: Calibration, facts: Mapping[str, float]) -> Calibration:
    """Return the calibration with more measured facts of its cluster."""
    return _with(calibration, cluster=dict(calibration.cluster) | dict(facts))


def _with(calibration: Calibration, **fields: Any) -> Calibration:
    return Calibration.model_validate(calibration.model_dump() | fields)


def _without_ranks() -> dict[str, float]:
    """Return guesses that measurements on several ranks replace, and what the machine says of itself."""
    threads = torch.get_num_threads()
    return {
        "cores": max(1, len(os.sched_getaffinity(0)) // threads),
        "host_memory_bytes": float(host_memory_bytes()),
        "link_latency_seconds": 1e-4,
        "link_bytes_per_second": 1e9,
        "network_latency_seconds": 1e-4,
        "network_bytes_per_second": 1e9,
        "collective_seconds": 0.0,
        "send_seconds": 0.0,
        "step_overhead_seconds": 0.0,
    }


def _of_gpu(effort: Effort, say: Say) -> Calibration:
    """Measure a GPU that the catalogue has: measured rates take the place of its data sheet's."""
    say("the GPU")
    name, measured = run_ranks(partial(_gpu_rates, effort), 1)[0]
    gpu = find_gpu(name)
    if gpu is None:
        raise RunError.of("gpu", name, "it is not in the catalogue", "add its row to toolkit/gpus.json")
    measured["matmul_fraction"] = {"bf16": measured.pop("best") / (gpu.bf16_flops or gpu.fp32_flops)}
    return Calibration.model_validate(
        {
            "format": 1,
            "gpu": gpu.name,
            "hardware": name,
            "date": date.today().isoformat(),
            "versions": current_versions(),
        }
        | measured
    )


def _gpu_rates(effort: Effort) -> tuple[str, dict[str, Any]]:
    """Measure the rates of the GPU on a forked rank: the parent must not initialize CUDA."""
    device = torch.device("cuda")
    products = kernels.product_rates(kernels.GPU_PRODUCTS, "bf16", device, effort.seconds)
    return torch.cuda.get_device_name(), {
        "best": max(row[3] for row in products),
        "memory_bytes_per_second": kernels.memory_rate(device, effort.seconds, 1 << 30) / MEMORY_SHARE,
        "kernel_seconds": kernels.kernel_seconds(device, effort.seconds),
        "cluster": {"host_bytes_per_second": kernels.host_rate(device, effort.seconds)},
    }
