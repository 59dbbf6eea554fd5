"""1F1B as simulated against DeepSpeed's pipeline engine, with passes and transfers of known length.

    python benchmarks/pipeline_schedule.py              # about six minutes
    python benchmarks/pipeline_schedule.py --quick      # does it run?
    python benchmarks/pipeline_schedule.py --save       # also writes benchmarks/results/pipeline_schedule.md

The engine's own schedule, instructions and messages run on CPU ranks. A layer sleeps 0.2 s in its forward pass and
twice that in its backward pass, and with each message both ranks sleep, once the receiver has it: what a large message
does to the streams of two GPUs. So the ranks need next to no CPU. What is shown is that order and waiting are those of
`toolkit/planner/blocking_transfers.py`; not, how long real passes and transfers take.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import p2p
from measure.table import publish, target_met
from torch import nn

from toolkit.config.pipeline_schedules import schedule_of
from toolkit.config.simulate_schedule import ScheduleCosts, simulate
from toolkit.launch.local_ranks import run_ranks
from toolkit.launch.output import quiet
from toolkit.planner.blocking_transfers import simulate_blocking

TARGET = 1.03
FORWARD_SECONDS = 0.2
CASES = [(2, 8, (1.0, 1.0)), (3, 6, (1.0, 1.0, 1.5)), (4, 8, (1.0,) * 4)]
"""Ranks, micro-batches, and relative times of the stages."""
TRANSFERS = (0.0, 0.3, 1.0)
"""In forward passes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps of each row")
    parser.add_argument("--quick", action="store_true", help="one row")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/pipeline_schedule.md")
    options = parser.parse_args()
    quiet(debug=False)
    rows = []
    for pp, micro_batches, times in CASES[: 1 if options.quick else None]:
        transfers = TRANSFERS[: 1 if options.quick else None]
        measured = run_ranks(run, pp, micro_batches, times, transfers, options.steps, timeout_seconds=600)[0]
        schedule = schedule_of("1f1b", pp=pp, micro_batches=micro_batches)
        for transfer, seconds in zip(transfers, measured, strict=True):
            costs = ScheduleCosts.relative(schedule, transfer=transfer, stage_times=times)
            took = statistics.median(seconds) / FORWARD_SECONDS
            blocking, overlapping = simulate_blocking(schedule, costs).makespan, simulate(schedule, costs).makespan
            ratio = max(took / blocking, blocking / took)
            rows.append(
                [
                    f"{pp} x {micro_batches}, stages {' '.join(f'{each:g}' for each in times)}",
                    f"{transfer:g}",
                    f"{took:.2f}",
                    f"{blocking:.2f}",
                    f"{took / blocking:.3f}x",
                    f"{overlapping:.2f}",
                    target_met(ratio, TARGET, at_most=True),
                ]
            )
    publish(
        "pipeline_schedule",
        title="A step of DeepSpeed's pipeline engine, in forward passes",
        headings=(
            "ranks x micro-batches",
            "transfer",
            "measured",
            "simulated",
            "ratio",
            "if they overlapped",
            "target",
        ),
        rows=rows,
        text_columns=1,
        notes=[f"A forward pass is {FORWARD_SECONDS} s, a backward pass twice that; medians of {options.steps} steps."],
        save=options.save,
    )


class Pad(torch.autograd.Function):
    """Sleeps in both passes. `weight` makes the backward pass run where the input needs no gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.zeros = seconds, torch.zeros_like(weight)
        time.sleep(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], ctx.zeros, None


class PaddedLayer(nn.Module):
    """A small linear layer that takes long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(Pad.apply(inputs, self.linear.weight, self.seconds))  # type: ignore[no-untyped-call]
        return hidden


def run(micro_batches: int, times: tuple[float, ...], transfers: tuple[float, ...], steps: int) -> list[list[float]]:
    """On every rank: the seconds of each step, for each length of transfers."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # DeepSpeed prints its stages
    deepspeed.init_distributed("gloo", verbose=False)
    module = PipelineModule(
        layers=[LayerSpec(PaddedLayer, FORWARD_SECONDS * each) for each in times],
        num_stages=len(times),
        partition_method="uniform",
        loss_fn=nn.functional.mse_loss,
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    batches = endless()
    engine.train_batch(batches)  # exchanges the shapes of messages
    send, receive, acknowledgement = p2p.send, p2p.recv, torch.zeros(1)
    found = []
    for transfer in transfers:

        def padded_send(tensor: torch.Tensor, stage: int, seconds: float = transfer * FORWARD_SECONDS) -> None:
            send(tensor, stage)
            receive(acknowledgement, stage)
            time.sleep(seconds)

        def padded_receive(tensor: torch.Tensor, stage: int, seconds: float = transfer * FORWARD_SECONDS) -> None:
            receive(tensor, stage)
            send(acknowledgement, stage)
            time.sleep(seconds)

        p2p.send, p2p.recv = padded_send, padded_receive
        found.append([timed_step(engine, batches) for _ in range(steps)])
    return found


def endless() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.ones(1, 4), torch.zeros(1, 4)


def timed_step(engine: Any, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
    dist.barrier()
    start = time.perf_counter()
    engine.train_batch(batches)
    dist.barrier()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
