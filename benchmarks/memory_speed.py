"""How fast `dstk memory` answers as a process, and how many layouts of a 175B model one process evaluates in a second.

Run it with `python benchmarks/memory_speed.py`.
"""

import subprocess
import sys
import time
from itertools import product

from toolkit.config.layout import Layout, Recompute
from toolkit.dsconfig.buckets import of_a_layer
from toolkit.errors import LayoutError
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.memory_request import MemoryRequest
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.recorded import recordings
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.hardware import gpu
from toolkit.models.shape import find_config

PROCESSES = 10
LAYOUTS = 10_000
COMMAND = ["memory", "--model", "llama-3-8b", "--layout", "dp8-tp4-pp2-z1", "--seq", "4096", "--gpu", "H100-80"]


def process_seconds() -> float:
    """The fastest of several whole processes: from nothing to the printed table."""
    times = []
    for _ in range(PROCESSES):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "toolkit", *COMMAND], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return min(times)


def requests() -> list[MemoryRequest]:
    """Requests for layouts of up to 4,096 GPUs, with every ZeRO stage, micro-batch and way to recompute."""
    buckets = of_a_layer(12288)
    settings = {
        stage: DeepSpeedSettings(
            zero_stage=stage,
            precision="bf16" if stage else "fp32",
            autocast="none" if stage else "bf16",
            overlap_comm=True,
            reduce_bucket_size=buckets.reduce,
            prefetch_bucket_size=buckets.prefetch,
            persistence_threshold=10 * 12288,
        )
        for stage in range(4)
    }
    model = ModelFacts.from_config(find_config("gpt3-175b") or {})
    device = gpu("H100-SXM-80GB")
    asked = []
    axes = ((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512), (1, 8), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
    recomputations: tuple[Recompute, ...] = ("none", "selective", "full")
    for dp, tp, pp, stage, micro, recompute, parallel in product(
        *axes, range(4), (1, 2, 4, 8), recomputations, (False, True)
    ):
        try:
            layout = Layout(dp=dp, tp=tp, pp=pp, zero_stage=stage, sequence_parallel=parallel, recompute=recompute)
        except LayoutError:
            continue
        setup = TrainingSetup(model=model, layout=layout, micro_batch_size=micro, seq_len=2048, accumulation=64)
        asked.append(MemoryRequest(setup=setup, framework=settings[stage], gpu=device))
    step = len(asked) / LAYOUTS
    return [asked[int(index * step)] for index in range(LAYOUTS)]


def sweep_seconds() -> tuple[float, float, int]:
    """Seconds for all layouts with what must be recorded first, and again without that; how many of them fit."""
    asked = requests()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        recordings.activations.cache_clear()
        fits = sum(request.peak().fits for request in asked)
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1], fits


if __name__ == "__main__":
    first, again, fits = sweep_seconds()
    print(f"{LAYOUTS} layouts of gpt3-175b: {again:.2f} s in one process ({fits} fit on an 80 GB H100)")
    print(f"the same with what had to be recorded: {first:.0f} s")
    print(f"dstk memory, whole process: {process_seconds():.3f} s, the fastest of {PROCESSES}")
