"""Pipeline schedules on an emulated device: steps of the toolkit's engine whose passes have a known length.

    python benchmarks/schedule_bubbles.py              # about four minutes
    python benchmarks/schedule_bubbles.py --quick      # does it run?
    python benchmarks/schedule_bubbles.py --save       # also writes benchmarks/results/schedule_bubbles.md

The whole training step of a tiny Llama on four CPU ranks: real messages, reductions and updates. A forward pass, a
backward pass for the input, and one for the weights of a rank's layers sleep until 0.3 s have passed since they began,
so that the ranks need next to no CPU. What is shown is how long ranks wait, not how long real passes take.

DeepSpeed's DualPipeV takes modules of its own: beside them it runs as many linear layers, padded alike.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import deepspeed  # before the ranks are forked
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import dualpipev
from deepspeed.runtime.pipe import engine as deepspeed_pipe
from deepspeed.runtime.pipe import schedule as instructions
from measure.our_run import make_recipe
from measure.table import publish, target_met
from torch import nn

from toolkit.config.pipeline_schedules import Kind, schedule_of
from toolkit.config.recipe import Recipe
from toolkit.config.simulate_schedule import ScheduleCosts, simulate
from toolkit.engines.base import Engine
from toolkit.engines.factory import create_engine
from toolkit.engines.scheduled_pipeline import ScheduledPipeline
from toolkit.launch.local_ranks import run_ranks
from toolkit.launch.output import quiet
from toolkit.parallel.pipeline.weight_gradients import WeightGradients
from toolkit.parity.run.train_in_memory import train_in_memory

PP, MICRO_BATCHES = 4, 8
PASS_SECONDS = 0.3
CASES: tuple[tuple[str, Kind | None, float | None], ...] = (
    ("DeepSpeed's 1F1B", None, None),
    ("1f1b", "1f1b", None),
    ("gpipe", "gpipe", None),
    ("interleaved, 2 chunks", "interleaved", None),
    ("zb-h1", "zb-h1", 0.87),
    ("zb-v", "zb-v", 0.82),
)
"""Name, schedule, and the most that its step may take of DeepSpeed's 1F1B."""
WITHIN = 1.05
"""Measured over simulated."""
DUAL_PIPE_V = "DeepSpeed's DualPipeV"
LAYERS = 8
WIDTH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="steps of each schedule")
    parser.add_argument("--quick", action="store_true", help="one step")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/schedule_bubbles.md")
    options = parser.parse_args()
    quiet(debug=False)
    torch.set_num_threads(1)
    steps = 1 if options.quick else options.steps
    took = {}
    with tempfile.TemporaryDirectory() as name:
        for label, kind, _ in CASES:
            recipe = make_recipe(
                Path(name),
                model={
                    "name_or_path": "llama-tiny",
                    "overrides": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS},
                },
                seq_len=16,
                batch={"global_batch_size": MICRO_BATCHES, "micro_batch_size": 1},
                parallel={"pp": PP, "zero_stage": 1, "schedule": kind},
                train={"steps": 1 + steps},
            )
            seconds = run_ranks(padded_run, PP, recipe, timeout_seconds=600)[0]
            took[label] = statistics.median(seconds[1:]) / PASS_SECONDS
        seconds = run_ranks(dual_pipe_v_run, PP, 1 + steps, timeout_seconds=600)[0]
        took[DUAL_PIPE_V] = statistics.median(seconds[1:]) / PASS_SECONDS
    rows = []
    for label, kind, most in CASES:
        schedule = schedule_of(kind or "1f1b", pp=PP, micro_batches=MICRO_BATCHES)
        simulated = simulate(schedule, ScheduleCosts.relative(schedule)).makespan
        ratio = took[label] / took[CASES[0][0]]
        work = 3 * MICRO_BATCHES
        rows.append(
            [
                label,
                f"{took[label]:.2f}",
                f"{simulated:.2f}",
                target_met(took[label] / simulated, WITHIN, at_most=True),
                f"{1 - work / took[label]:.3f}",
                f"{1 - work / simulated:.3f}",
                f"{ratio:.3f}x",
                "" if most is None else target_met(ratio, most, at_most=True),
            ]
        )
    ratio = took[DUAL_PIPE_V] / took[CASES[0][0]]
    bubble = 1 - 3 * MICRO_BATCHES / took[DUAL_PIPE_V]
    rows.append([DUAL_PIPE_V, f"{took[DUAL_PIPE_V]:.2f}", "", "", f"{bubble:.3f}", "", f"{ratio:.3f}x", ""])
    publish(
        "schedule_bubbles",
        title=f"A step of {PP} pipeline ranks with {MICRO_BATCHES} micro-batches, in passes",
        headings=(
            "schedule",
            "measured",
            "simulated",
            "measured over simulated",
            "bubble",
            "simulated bubble",
            "over DeepSpeed's 1F1B",
            "target",
        ),
        rows=rows,
        notes=[
            f"F, B and W of a rank's layers take {PASS_SECONDS} s each; medians of {steps} steps.",
            "A step also has the reductions, the update, and the numbers that the host reads.",
        ],
        save=options.save,
    )


def padded(run: Callable[..., Any], passes: Callable[[Any], float]) -> Callable[..., Any]:
    """`run`, which then sleeps until so many passes have gone by since it began."""

    def run_and_sleep(*arguments: Any, **keywords: Any) -> None:
        start = time.perf_counter()
        run(*arguments, **keywords)
        end = start + PASS_SECONDS * passes(arguments[0])
        while (rest := end - time.perf_counter()) > 0:
            time.sleep(rest)

    return run_and_sleep


def padded_run(recipe: Recipe) -> list[float]:
    """On every rank: the seconds of each step, in passes of known length."""
    chunks = recipe.parallel.layout_fields["chunks"]
    base = deepspeed_pipe.PipelineEngine
    if recipe.parallel.schedule is None:
        base._INSTRUCTION_MAP = base._INSTRUCTION_MAP | {
            instructions.ForwardPass: padded(base._exec_forward_pass, lambda engine: 1),
            instructions.BackwardPass: padded(base._exec_backward_pass, lambda engine: 2),
        }

    def backward_passes(engine: Any) -> float:
        is_split = engine._weight_gradients._open is not None
        passes: float = (1 if is_split else 2) / chunks
        return passes

    ScheduledPipeline._exec_forward_pass = padded(base._exec_forward_pass, lambda engine: 1 / chunks)
    ScheduledPipeline._exec_backward_pass = padded(base._exec_backward_pass, backward_passes)
    WeightGradients.compute = padded(WeightGradients.compute, lambda queue: 1 / chunks)  # type: ignore[method-assign]
    seconds: list[float] = []

    def timed(*arguments: Any, **options: Any) -> Engine:
        engine = create_engine(*arguments, **options)
        step = engine.train_step

        def timed_step(*batches: Any, **numbers: Any) -> Any:
            batches = ([*batches[0]], *batches[1:])
            dist.barrier()
            start = time.perf_counter()
            result = step(*batches, **numbers)
            dist.barrier()
            seconds.append(time.perf_counter() - start)
            return result

        engine.train_step = timed_step  # type: ignore[method-assign]
        return engine

    train_in_memory(recipe, engine_factory=timed)
    return seconds


def dual_pipe_v_run(steps: int) -> list[float]:
    """On every rank: the seconds of each step of DeepSpeed's DualPipeV, whose two stages of a rank are chunks."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine_class = dualpipev.DualPipeVEngine
    engine_class._INSTRUCTION_MAP = engine_class._INSTRUCTION_MAP | {
        instructions.ForwardPass: padded(engine_class._exec_forward_pass, lambda engine: 1 / 2),
        instructions.BackwardPass: padded(engine_class._exec_backward_pass, lambda engine: 2 / 2),
    }
    deepspeed.init_distributed(dist_backend="gloo")
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    module = dualpipev.DualPipeVModule(layers=layers, num_stages=PP, loss_fn=nn.MSELoss())
    config = {
        "train_batch_size": MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    batch = (torch.ones(1, 16, WIDTH), torch.zeros(1, 16, WIDTH))
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(iter([batch] * MICRO_BATCHES))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
