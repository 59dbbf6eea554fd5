"""All measurements of `dstk calibrate`, in the order in which one figure needs another."""

import os
from collections.abc import Callable
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
    keep_freed_memory()
    device = torch.device("cpu")
    seconds = effort.seconds
    say("matrix products, attention, memory")
    core: dict[str, Any] = {
        "products": {name: kernels.product_rates(effort.products, name, device, seconds) for name in kernels.DTYPES},
        "attention": {name: kernels.attention_rates(name, device, seconds) for name in kernels.DTYPES},
        "layer_bytes_per_second": (1e9, 1e9),
        "layer_seconds": (0.0, 0.0),
        "loss_bytes_per_second": (1e9, 1e9),
    }
    calibration = Calibration.model_validate(
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
    say("a decoder layer and the head")
    core |= effort.layer.rates(calibration.of_ranks(1).gpu, 2 * seconds)
    calibration = _with(calibration, core=core)
    if not effort.ranks:
        return calibration
    preload("gpt2")
    say("links between ranks")
    cluster = dict(calibration.cluster)
    cluster |= run_ranks(partial(measure_links, 4 * seconds, device), 2)[0]
    cores = int(cluster["cores"])
    hidden = effort.layer.hidden
    size = (1, effort.layer.large[1])  # a call is shorter than a turn of the system's scheduler
    alone = layer_times(hidden, size, 10 * seconds)
    if cores > 1:
        together = run_ranks(partial(measure_alongside, hidden, size, 10 * seconds), cores)
        cluster["slowdown"] = max(1.0, fmean(together) / alone)
    calibration = _with(calibration, cluster=cluster)
    say("engines")
    fixed = engines.one_rank(calibration.of_ranks)
    memory_rate = fixed.pop("memory_bytes_per_second") / MEMORY_SHARE
    cluster |= fixed
    calibration = _with(calibration, memory_bytes_per_second=memory_rate, cluster=cluster)
    cluster |= engines.two_ranks(calibration.of_ranks)
    return _with(calibration, cluster=cluster)


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
