"""The most bytes that live at once in a step of a pipeline, on a rank of its own."""

from dataclasses import dataclass
from typing import Any

import torch
from allocations import LiveBytes

from toolkit.config.recipe import Recipe
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.parity.run.train_in_memory import train_in_memory

MICRO_BATCHES = 8
SAMPLES = 4
"""Samples in a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class LiveStep:
    """What a rank held in a step, beside what was there before."""

    pipe: int
    """The rank's place in the pipeline."""
    peak: int
    gradients: int
    """Bytes of the gradients that the step leaves."""
    config: dict[str, Any]
    """The model's config."""
    stage_layers: tuple[int, ...]
    """Decoder layers of each stage."""


def one_more_step(recipe: Recipe, *, updates: bool = False) -> LiveStep:
    """Train a recipe, and take one more step, in which live bytes are counted. Called on every rank.

    The step ends with the reductions of gradients, or `updates` the weights.
    """
    taken: list[LiveStep] = []

    def take(engine: Any) -> None:
        tokens = torch.randint(0, recipe.model.overrides["vocab_size"], (SAMPLES, recipe.data.seq_len))
        batches = [MicroBatch(input_ids=tokens, labels=tokens, dropout_seed=i) for i in range(MICRO_BATCHES)]
        engine.engine.module.train()
        if recipe.parallel.schedule is None:
            engine.engine.reset_activation_shape()  # DeepSpeed makes the buffers for receiving again, and they count
        with LiveBytes() as live:
            if updates:
                engine.train_step(batches, target_tokens=MICRO_BATCHES * tokens.numel(), learning_rate=1e-3)
            else:
                engine._run(batches, trains=True)
        taken.append(
            LiveStep(
                pipe=engine.engine.stage_id,
                peak=live.peak_bytes,
                gradients=sum(p.grad.nbytes for p in engine.model.parameters() if p.grad is not None),
                config=engine.model.config.to_dict(),
                stage_layers=engine.stage_layers,
            )
        )

    train_in_memory(recipe, take)
    return taken[0]
