"""A batch with a sample without targets: all prompt, truncated before the answer begins. In fine-tuning they happen.

The mean loss of a micro-batch without targets is 0/0. `masked_mean` is the mean as Megatron and many scripts write it:
its gradient is NaN too. (That of PyTorch's own mean is zero.) `with_empty_sample` gives any engine the same such batch,
the reference included.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import Engine, StepResult
from toolkit.parallel.loss import IGNORE

EMPTY_IN_STEP = 3


def with_empty_sample(factory: Callable[..., Engine]) -> Callable[..., Engine]:
    """The same engines, but in step 3 the first sample of the global batch has no targets. For full samples only."""

    def build(*arguments: Any, **options: Any) -> Engine:
        engine = factory(*arguments, **options)
        train_step, taken = engine.train_step, 0

        def step(micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float) -> StepResult:
            nonlocal taken
            taken += 1
            if taken == EMPTY_IN_STEP:
                seq_len = arguments[0].recipe.data.seq_len
                micro_batches, target_tokens = first_sample_empty(micro_batches), target_tokens - seq_len
            return train_step(micro_batches, target_tokens=target_tokens, learning_rate=learning_rate)

        engine.train_step = step  # type: ignore[method-assign]
        return engine

    return build


def masked_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the targets of a micro-batch, from a mask."""
    mask = (labels != IGNORE).float()
    losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


def first_sample_empty(micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """The first sample of the global batch is the first of rank 0, in every layout."""
    for number, batch in enumerate(micro_batches):
        if number == 0 and dist.get_rank() == 0:
            labels = batch.labels.clone()
            labels[0] = IGNORE
            yield replace(batch, labels=labels)
        else:
            yield batch
