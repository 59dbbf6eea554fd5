"""Seconds of DeepSpeed's engines beside layers: in a step, a micro-batch, a pipeline's send, and ZeRO-3's hooks.

Models so small that hardly anything else is measured; what the time model has for it is subtracted.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from toolkit.calibrate.kernels import clock
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.factory import create_engine
from toolkit.launch.local_ranks import run_ranks
from toolkit.planner.cluster import Cluster
from toolkit.planner.kernels import MEMORY_SHARE
from toolkit.planner.request import predict
from toolkit.planner.step_time import StepTime
from toolkit.training.preflight import check_model, deepspeed_config, find_shape

_TINY = {"n_layer": 2, "n_embd": 64, "n_head": 1, "vocab_size": 256}
_SEQ_LEN = 32
_LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """Steps of one tiny model in a layout."""

    layout: str
    micro_batches: int
    steps: int = 30
    hidden: int = 64

    @property
    def job(self) -> Job:
        """The job of the run, on as many ranks as the layout has."""
        strategy = Strategy.parse(self.layout)
        ranks = strategy.world_size(1)
        shape = _TINY | {"n_embd": self.hidden, "n_head": self.hidden // 64}
        batch = self.micro_batches * ranks // strategy.model_size
        recipe = Recipe.model_validate(
            {
                "model": {"name_or_path": "gpt2-tiny", "overrides": shape},
                "data": {"seq_len": _SEQ_LEN},
                "batch": {"global_batch_size": batch, "micro_batch_size": 1},
                "optimizer": {"name": "adamw", "lr": _LEARNING_RATE},
                "train": {"steps": self.steps},
            }
        )
        return Job.of(strategy.apply(recipe, ranks), ranks)

    def predicted(self, cluster: Callable[[int], Cluster]) -> StepTime:
        """Predict the run's step by the time model, with the constants that are known so far."""
        job = self.job
        return predict(job.recipe, job.layout, job.batch, cluster(job.layout.world_size))

    def measured(self) -> tuple[float, float]:
        """Seconds of a step, and of its update."""
        results = run_ranks(partial(_train, self), self.job.layout.world_size, timeout_seconds=60)
        return max(result[0] for result in results), results[0][1]


def _train(run: EngineRun) -> tuple[float, float]:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # DeepSpeed prints its stages, and warns of its own calls
    os.dup2(nowhere, 2)
    device = torch.device("cpu")
    config = check_model(run.job.recipe, device)
    job = replace(run.job, shape=find_shape(config))
    engine = create_engine(job, device, deepspeed_config(job, config, device), eos_id=0)
    ids = torch.randint(256, (1, _SEQ_LEN))
    batches = [MicroBatch(input_ids=ids, labels=ids, dropout_seed=number) for number in range(run.micro_batches)]
    # Where there are several ranks, the time in which they wait for each other counts too.
    now = clock(device) if job.layout.world_size == 1 else time.perf_counter
    began: list[float] = []

    def phase_begins(phase: str, step: int | None = None) -> None:
        if phase == "update":
            began.append(now())

    engine.report_phase = phase_begins
    steps = []
    updates = []
    for _ in range(run.steps):
        start = now()
        targets = _SEQ_LEN * run.micro_batches * job.layout.dp
        engine.train_step(batches, target_tokens=targets, learning_rate=_LEARNING_RATE)
        stop = now()
        steps.append(stop - start)
        updates.append(stop - began[-1])
    return min(steps[3:]), min(updates[3:])  # other load on the machine only ever adds


def one_rank(cluster: Callable[[int], Cluster], *, steps: int = 30) -> dict[str, float]:
    """Measure the fixed seconds of a step and of a micro-batch, and the bytes a second of the optimizer's update.

    Three runs tell three unknowns: with more micro-batches a step takes longer by their fixed share, with more
    parameters an update takes longer by their bytes, and what remains of the smallest run's step is the step's own.
    """
    few = EngineRun(layout="dp1-z1", micro_batches=1, hidden=64, steps=steps)
    many = EngineRun(layout="dp1-z1", micro_batches=5, hidden=64, steps=steps)
    wide = EngineRun(layout="dp1-z1", micro_batches=1, hidden=512, steps=steps)
    few_step, few_update = few.measured()
    many_step, _ = many.measured()
    _, wide_update = wide.measured()
    computing = _computing(many, cluster) - _computing(few, cluster)
    micro = max(0.0, (many_step - few_step - computing) / (many.micro_batches - few.micro_batches))
    few_bytes = _updated_bytes(few, cluster)
    wide_bytes = _updated_bytes(wide, cluster)
    rate = (wide_bytes - few_bytes) / max(wide_update - few_update, 1e-6)
    fixed = few_step - micro - _computing(few, cluster) - few_bytes / rate
    return {
        "micro_batch_overhead_seconds": micro,
        "step_overhead_seconds": max(0.0, fixed),
        "memory_bytes_per_second": rate,
    }


def _computing(run: EngineRun, cluster: Callable[[int], Cluster]) -> float:
    step = run.predicted(cluster)
    return step.compute + step.host


def _updated_bytes(run: EngineRun, cluster: Callable[[int], Cluster]) -> float:
    """Return the bytes that the update reads and writes, as the time model counts them."""
    known = cluster(1)
    at_once = replace(known, step_overhead_seconds=0.0, gpu=replace(known.gpu, kernel_seconds=0.0))
    return run.predicted(lambda _: at_once).optimizer * MEMORY_SHARE * known.gpu.memory_bytes_per_second


def two_ranks(cluster: Callable[[int], Cluster], *, steps: int = 30) -> dict[str, float]:
    """Measure the seconds of a pipeline's send beside its transfer, and of ZeRO-3's hooks a layer and micro-batch."""
    return {
        # In a pipeline of two stages a micro-batch is sent once in each direction.
        "send_seconds": _unexplained("pp2-z1", cluster, steps) / 2,
        "sharded_seconds": _unexplained("dp2-z3", cluster, steps) / _TINY["n_layer"],
    }


def _unexplained(layout: str, cluster: Callable[[int], Cluster], steps: int) -> float:
    """Return the seconds that another micro-batch takes beyond what the time model predicts; never negative."""
    few = EngineRun(layout=layout, micro_batches=2, steps=steps)
    many = EngineRun(layout=layout, micro_batches=8, steps=steps)
    measured = many.measured()[0] - few.measured()[0]
    predicted = many.predicted(cluster).seconds - few.predicted(cluster).seconds
    return max(0.0, measured - predicted) / (many.micro_batches - few.micro_batches)
