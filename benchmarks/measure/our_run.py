"""A timed run of the toolkit: what recipes/train.py does between its first and its last step, and nothing around it."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from toolkit.recipe import Recipe
from toolkit.train.data.tokens import TokenCorpus, prepare
from toolkit.train.engines.base import Engine
from toolkit.train.engines.factory import create_engine
from toolkit.train.feed import Feed
from toolkit.train.loop import fit
from toolkit.train.preflight import check_model, deepspeed_config
from toolkit.train.progress import ProgressLine
from toolkit.train.run_directory import RunDirectory
from toolkit.train.trackers import Trackers


@dataclass
class Stamps:
    """When each step ended. Among the loop's trackers it is called once a step, on every rank."""

    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def log(self, values: dict[str, float], step: int) -> None:
        """What a tracker of accelerate has."""
        self.add(values["loss"])

    def add(self, loss: float) -> None:
        """A step has ended."""
        self.times.append(time.perf_counter())
        self.losses.append(loss)

    def step_seconds(self, warmup: int) -> list[float]:
        """Seconds of each step, without the first `warmup` ones. From end to end, so nothing of a step is left out."""
        kept = self.times[warmup - 1 :]
        return [after - before for before, after in zip(kept, kept[1:], strict=False)]


def our_run(recipe: Recipe) -> Stamps:
    """Train on this rank with the feed, the metrics file and a live progress line; nothing is validated or saved."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    layout = recipe.layout(world_size)
    batch = recipe.resolve_batch(layout)
    corpus = prepare(recipe.data, progress=False)
    feed = Feed.open(recipe, layout, batch, corpus, rank=rank)
    ds_config = deepspeed_config(recipe, layout, batch, check_model(recipe, device), device)
    engine = create_engine(recipe, layout, batch, device, ds_config, eos_id=corpus.eos_id)
    return fit_stamped(recipe, engine, corpus, feed, ds_config)


def fit_stamped(
    recipe: Recipe, engine: Engine, corpus: TokenCorpus, feed: Feed, ds_config: dict[str, Any] | None
) -> Stamps:
    """The loop of recipes/train.py, stamped. `recipe.run_dir` is where metrics.jsonl goes."""
    assert recipe.run_dir is not None
    first = dist.get_rank() == 0
    stamps = Stamps()
    with Path(os.devnull).open("w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=160, highlight=False)
        progress = ProgressLine(recipe.train.steps, every=1, enabled=first, console=console)
        run = RunDirectory.choose(recipe, name="", is_writer=first, overwrite=True)
        run.open(recipe, ds_config)
        fit(recipe, engine, corpus.tokenizer(), feed, run, progress, Trackers([stamps]))
        run.close()
    return stamps
