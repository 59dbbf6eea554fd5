"""The peak of a tied model whose vocabulary outweighs its activations: when the embedding's gradient is complete.

Measured on a CPU rank, up to the update: a GPU's update is fused, and the CPU's is not.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from allocations import LiveBytes

from toolkit import Job, TrainOptions, train
from toolkit.config.recipe import Recipe
from toolkit.hardware import gpu
from toolkit.planner.run_memory import memory_request
from toolkit.training.callback import Callback
from toolkit.training.loop import TrainingRun

SPARE = 0.2
"""An estimate may be this much above the peak: it has the buckets of a GPU, of which there are two."""


class PeakOfLaterSteps(Callback):
    """Leaves out the first step, in which the optimizer makes its states."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live

    def on_step_end(self, run: TrainingRun, metrics: Any) -> None:
        if run.step == 1:
            self._live.start_peak()


def peak_without_update(recipe: Recipe) -> int:
    """Train on this rank; return the bytes of all tensors at their most outside of the optimizer's update."""
    live = LiveBytes()
    update = torch.optim.AdamW.step

    def unseen(*arguments: Any, **options: Any) -> Any:
        before = live.peak_bytes
        result = update(*arguments, **options)
        live.peak_bytes = before
        return result

    with live, mock.patch.object(torch.optim.AdamW, "step", unseen):
        train(Job.of(recipe, 1), [PeakOfLaterSteps(live)], TrainOptions(), in_memory=True)
    return live.peak_bytes


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (1, "fp32"), (2, "bf16"), (2, "fp32"), (3, "bf16")])
def test_a_large_embedding_is_not_underestimated(
    make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], stage: int, precision: str
) -> None:
    recipe = make_recipe(
        parallel={"zero_stage": stage},
        precision=precision,
        batch={"micro_batch_size": 1, "global_batch_size": 2},
        overrides__n_embd=128,
        overrides__vocab_size=40_000,
        train__steps=3,
    )
    layout = recipe.layout(1)
    (estimated,) = memory_request(recipe, layout, recipe.resolve_batch(layout), gpu=gpu("H100")).stages()
    (measured,) = ranks(peak_without_update, 1, recipe, joined=False)
    # The workspace of a GPU's matrix products is not there on a CPU.
    allocated = estimated.allocated - estimated.workspace
    assert 0.999 * measured <= allocated <= (1 + SPARE) * measured
