"""A trial: train a recipe on the ranks that are here, in memory, and hand back its curve and its weights.

What `recipes/train.py` does without its files; comparisons of strategies run it on forked ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from toolkit.parity import LossCurve
from toolkit.recipe import Recipe
from toolkit.train.data.tokens import prepare
from toolkit.train.engines.base import Engine
from toolkit.train.engines.factory import create_engine
from toolkit.train.feed import Feed
from toolkit.train.optimizer import learning_rate
from toolkit.train.preflight import check_model, deepspeed_config


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The outcome. Parameters and gradients: Hugging Face name -> whole value, fp32, on rank 0; empty on the others."""

    curve: LossCurve
    parameters: dict[str, NDArray[np.float32]]
    first_gradients: dict[str, NDArray[np.float32]]
    """Of the first step, before clipping."""
    eval_loss: float | None
    seen: Any = None
    """What `inspect` returned on this rank."""


def run_trial(recipe: Recipe, inspect: Callable[[Engine], Any] | None = None) -> Trial:
    """Train `recipe` on the CPU ranks of the current process group (or alone).

    `inspect` may look at the engine after the last step.
    """
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    device = torch.device("cpu")
    layout = recipe.layout(world_size)
    batch = recipe.resolve_batch(layout)
    config = check_model(recipe, device)
    ds_config = deepspeed_config(recipe, layout, batch, config, device)
    corpus = prepare(recipe.data, progress=False)
    feed = Feed.open(recipe, layout, batch, corpus, rank=rank)
    engine = create_engine(recipe, layout, batch, device, ds_config, eos_id=corpus.eos_id)
    rate = learning_rate(recipe)
    steps = []
    gradients: dict[str, NDArray[np.float32]] = {}
    with feed.prefetch() as ahead:
        engine.before_update = lambda: gradients.update(_whole(engine.full_gradients(), keep=rank == 0))
        for step in range(recipe.train.steps):
            result = engine.train_step(
                feed.micro_batches(step, ahead), target_tokens=feed.target_tokens(step), learning_rate=rate(step)
            )
            steps.append((result.loss, result.grad_norm))
            engine.before_update = lambda: None
    return Trial(
        curve=LossCurve.from_steps(recipe.strategy(layout), steps),
        parameters=_whole(engine.full_parameters(), keep=rank == 0),
        first_gradients=gradients,
        eval_loss=engine.evaluate(feed.held_out_batches()) if feed.held_out is not None else None,
        seen=None if inspect is None else inspect(engine),
    )


def _whole(tensors: Iterator[tuple[str, torch.Tensor]], *, keep: bool) -> dict[str, NDArray[np.float32]]:
    gathered = ((name, value.detach().float().cpu().numpy().copy()) for name, value in tensors)
    return {name: value for name, value in gathered if keep}
