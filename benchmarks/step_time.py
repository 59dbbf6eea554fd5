"""What the toolkit's loop costs: its step against the same step written out in plain PyTorch, on one CPU core.

    python benchmarks/step_time.py                      # five rounds: about five minutes
    python benchmarks/step_time.py --quick              # does it run? The figures mean nothing.
    python benchmarks/step_time.py --save               # also writes benchmarks/results/step_time.md

Four sides in fp32 on one rank and one thread, with the same GPT-2, initial weights, parameter groups, AdamW, clipping,
accumulation and tokens:

    plain PyTorch     forward, backward, clip_grad_norm_, AdamW.step, over tensors that are ready in memory
    reference         the toolkit's engine of that name in the loop of recipes/train.py: samples from the token cache,
                      prefetching, checks for losses that are not finite, metrics file, live progress line
    plain DeepSpeed   deepspeed.initialize with the toolkit's ZeRO-1 config, engine.backward and engine.step
    deepspeed         the toolkit's engine of that name, likewise in its loop

The toolkit keeps freed memory on the CPU (toolkit/model_init/freed_memory.py). The plain loops do so here as well, so
that the ratio is the cost of the loop alone; benchmarks/hf_trainer.py shows what that setting gains.

A round forks one rank for each side in turn. The first steps are not counted. Prints medians of all counted steps, and
of the ratios to the plain loop in the same round the median, the smallest and the largest.
"""

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import deepspeed
import torch
import torch.nn.functional as F
from measure.our_run import CPU, Stamps, make_recipe, our_run
from measure.rounds import Side, alternate
from measure.table import publish, target_met
from transformers import PreTrainedModel

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines.optimizer import learning_rate, parameter_groups
from toolkit.launch.output import quiet
from toolkit.model_init.build_model import build_model
from toolkit.model_init.freed_memory import keep_freed_memory
from toolkit.training.preflight import check_model, deepspeed_config

TARGET = 1.03
STEPS, WARMUP = 40, 5
Steps = list[list[tuple[torch.Tensor, torch.Tensor]]]
"""Of each step its micro-batches: input_ids and labels [b, s], labels already shifted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/step_time.md")
    options = parser.parse_args()
    quiet(debug=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = WARMUP + 5 if options.quick else STEPS
        reference, zero = (make_step_recipe(folder, engine, steps) for engine in ("reference", "deepspeed"))
        ready = tensors(reference)
        sides: dict[str, Side] = {
            "plain PyTorch": partial(plain_pytorch, reference, ready),
            "reference": partial(our_run, reference),
            "plain DeepSpeed": partial(plain_deepspeed, zero, ready),
            "deepspeed": partial(our_run, zero),
        }
        times = alternate(sides, ranks=1, rounds=1 if options.quick else options.rounds, warmup=WARMUP)
    rows = []
    for side, plain in zip(sides, ("plain PyTorch",) * 2 + ("plain DeepSpeed",) * 2, strict=True):
        ratios = times[side].over(times[plain])
        middle = statistics.median(ratios)
        rows.append(
            [
                side,
                f"{times[side].median * 1e3:.1f}",
                *(f"{ratio:.3f}x" for ratio in (middle, ratios[0], ratios[-1])),
                target_met(middle, TARGET, at_most=True) if side == "reference" else "",
                f"{times[side].losses[-1]:.5f}",
            ]
        )
    publish(
        "step_time",
        title="One rank, fp32: the toolkit's step and the same step written out",
        headings=("side", "ms a step", "ratio", "smallest", "largest", "target", "last loss"),
        rows=rows,
        notes=["GPT-2 of 6 layers x 256, samples of 128 tokens, 2 in a micro-batch, accumulation 2."],
        save=options.save,
    )


def make_step_recipe(folder: Path, engine: str, steps: int) -> Recipe:
    shape = {"n_layer": 6, "n_embd": 256, "n_head": 4}
    return make_recipe(
        folder,
        model={"name_or_path": "gpt2-tiny", "overrides": shape},
        seq_len=128,
        batch={"global_batch_size": 4, "micro_batch_size": 2},
        parallel={"zero_stage": 1},
        train={"steps": steps, "engine": engine},
    )


def tensors(recipe: Recipe) -> Steps:
    """All micro-batches of the run, in memory."""
    loader = MicroBatchLoader.open(Job.of(recipe, 1), prepare(recipe.data, progress=False), rank=0)
    with loader.prefetch() as ahead:
        return [
            [(micro.input_ids, micro.labels) for micro in loader.micro_batches(step, ahead)]
            for step in range(recipe.train.steps)
        ]


def plain_pytorch(recipe: Recipe, steps: Steps) -> Stamps:
    model = make_model(recipe)
    section = recipe.optimizer
    groups = parameter_groups(model.named_parameters(), section)
    optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)
    rate = learning_rate(recipe)
    stamps = Stamps()
    for number, micro_batches in enumerate(steps):
        total = 0.0
        for input_ids, labels in micro_batches:
            loss = mean_loss(model, input_ids, labels) / len(micro_batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.grad_clip)
        set_rate(optimizer, rate(number))
        optimizer.step()
        optimizer.zero_grad()
        stamps.add(total)
    return stamps


def plain_deepspeed(recipe: Recipe, steps: Steps) -> Stamps:
    config = deepspeed_config(Job.of(recipe, 1), check_model(recipe, CPU), CPU)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for over a minute
    model = make_model(recipe)
    groups = parameter_groups(model.named_parameters(), recipe.optimizer)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    rate = learning_rate(recipe)
    stamps = Stamps()
    for number, micro_batches in enumerate(steps):
        total = 0.0
        set_rate(optimizer, rate(number))
        for input_ids, labels in micro_batches:
            loss = mean_loss(engine, input_ids, labels)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(micro_batches)
        stamps.add(total)
    return stamps


def make_model(recipe: Recipe) -> PreTrainedModel:
    keep_freed_memory()
    return build_model(recipe, eos_id=prepare(recipe.data, progress=False).eos_id).train()


def mean_loss(model: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


if __name__ == "__main__":
    main()
