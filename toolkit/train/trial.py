"""A trial: train a recipe on the ranks that are here, in memory, and hand back what a comparison looks at.

What `recipes/train.py` does without its files; comparisons of strategies run it on the ranks of one machine.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from toolkit.batch import Batch
from toolkit.layout import Layout
from toolkit.parity import LossCurve, SavedTensors, Tensors, Trial
from toolkit.recipe import Recipe
from toolkit.train.data.tokens import prepare
from toolkit.train.engines.base import Engine
from toolkit.train.engines.factory import create_engine
from toolkit.train.engines.reference_engine import ReferenceEngine
from toolkit.train.fed_samples import FedSamples, merged_digests
from toolkit.train.feed import Feed
from toolkit.train.launch import RankEnvironment, pick_device
from toolkit.train.observe import (
    LayerOutputs,
    copies,
    gathered,
    learning_rate_of,
    merged_copies,
    sample_losses,
)
from toolkit.train.optimizer import learning_rate
from toolkit.train.preflight import check_model, deepspeed_config
from toolkit.train.rounding import round_differently


class EngineFactory(Protocol):
    """Builds the engine of a trial, as `create_engine` does."""

    def __call__(
        self,
        recipe: Recipe,
        layout: Layout,
        batch: Batch,
        device: torch.device,
        ds_config: dict[str, Any] | None,
        *,
        eos_id: int | None,
    ) -> Engine:
        """Build it; a collective call."""


def run_trial(
    recipe: Recipe,
    inspect: Callable[[Engine], Any] | None = None,
    *,
    engine_factory: EngineFactory = create_engine,
    rounding_seed: int | None = None,
    folder: Path | None = None,
) -> Trial:
    """Train `recipe` on the ranks of the current process group (or alone).

    `inspect` may look at the engine after the last step. With `rounding_seed`, every module rounds differently
    (toolkit/train/rounding.py). Tensors are kept in memory, or in `folder`, where one at a time is.
    """
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    device = pick_device(RankEnvironment.detect())
    layout = recipe.layout(world_size)
    batch = recipe.resolve_batch(layout)
    config = check_model(recipe, device)
    ds_config = deepspeed_config(recipe, layout, batch, config, device)
    corpus = prepare(recipe.data, progress=False)
    feed = Feed.open(recipe, layout, batch, corpus, rank=rank)
    engine = engine_factory(recipe, layout, batch, device, ds_config, eos_id=corpus.eos_id)
    keep = _Keeper(folder, is_first=rank == 0)
    initial = keep("initial", engine.full_parameters())
    torn_at_start, _ = merged_copies(gathered(copies(engine)))
    micro_losses = sample_losses(engine, feed) if isinstance(engine, ReferenceEngine) else ()
    if rounding_seed is not None:
        round_differently(engine.model, precision=recipe.precision, seed=rounding_seed)
    samples, outputs = FedSamples(feed), LayerOutputs(engine)
    rate = learning_rate(recipe)
    update_step = next((step for step in range(recipe.train.steps) if rate(step) > 0), 0)
    steps, rates = [], []
    seen: dict[str, Any] = {}

    def look() -> None:
        rates.append(learning_rate_of(engine))
        if "gradients" not in seen:
            seen["gradients"] = keep("gradients", engine.full_gradients())

    engine.before_update = look
    with feed.prefetch() as ahead:
        for step in range(recipe.train.steps):
            result = engine.train_step(
                samples.watch(feed.micro_batches(step, ahead)),
                target_tokens=feed.target_tokens(step),
                learning_rate=rate(step),
            )
            steps.append((result.loss, result.grad_norm))
            if step == 0:
                seen["outputs"] = outputs.read()
            if step == update_step:
                seen["updates"] = keep("updates", engine.full_parameters(), since=initial)
    torn, compared = merged_copies(gathered(copies(engine)))
    return Trial(
        curve=LossCurve.from_steps(recipe.strategy(layout), steps),
        parameters=keep("parameters", engine.full_parameters()),
        initial=initial,
        first_gradients=seen.get("gradients", {}),
        first_updates=seen["updates"],
        update_step=update_step + 1,
        outputs=seen["outputs"],
        batches=merged_digests(feed, gathered(samples.shares)),
        learning_rates=tuple(rates),
        micro_losses=micro_losses,
        micro_size=batch.micro_size,
        torn_at_start=torn_at_start,
        torn=torn,
        copies=compared,
        eval_loss=engine.evaluate(feed.held_out_batches()) if feed.held_out is not None else None,
        seen=None if inspect is None else inspect(engine),
    )


class _Keeper:
    """Takes whole tensors one after the other, and keeps them on the first rank."""

    def __init__(self, folder: Path | None, *, is_first: bool) -> None:
        self._folder, self._is_first = folder, is_first

    def __call__(
        self, kind: str, tensors: Iterator[tuple[str, torch.Tensor]], *, since: Tensors | None = None
    ) -> Tensors:
        """All of `tensors`, or what was added to them `since`, as fp32."""
        saved = SavedTensors(self._folder / kind) if self._folder is not None and self._is_first else None
        held: dict[str, NDArray[np.floating]] = {}
        for name, tensor in tensors:
            if not self._is_first:
                continue  # it took part in gathering them
            value: NDArray[np.floating] = tensor.detach().float().cpu().numpy().copy()
            if since is not None:
                value -= since[name]
            if saved is None:
                held[name] = value
            else:
                saved.add(name, value)
        return held if saved is None else saved
