"""A timed run of the toolkit: what recipes/train.py does between its first and its last step, and nothing around it."""

import json
import os
import sysconfig
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from toolkit.recipe import Recipe
from toolkit.train.data.tokens import prepare
from toolkit.train.engines.factory import create_engine
from toolkit.train.feed import Feed
from toolkit.train.loop import fit
from toolkit.train.preflight import check_model, deepspeed_config
from toolkit.train.progress import ProgressLine
from toolkit.train.run_directory import RunDirectory
from toolkit.train.trackers import Trackers

CPU = torch.device("cpu")


@dataclass
class Stamps:
    """When each step ended, and its loss."""

    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def log(self, values: dict[str, float], step: int) -> None:
        """Among the loop's trackers: what the loop calls once a step, on every rank."""
        self.add(values["loss"])

    def add(self, loss: float) -> None:
        """A step has ended."""
        self.times.append(time.perf_counter())
        self.losses.append(loss)

    def step_seconds(self, warmup: int) -> list[float]:
        """Seconds of each step without the first `warmup` ones, from end to end: nothing of a step is left out."""
        kept = self.times[warmup - 1 :]
        return [after - before for before, after in pairwise(kept)]


def make_recipe(folder: Path, **sections: Any) -> Recipe:
    """A recipe that keeps all its files in `folder`: a corpus of 2 MB from the standard library, and its tokens."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)
        corpus.write_text(text[:2_000_000], encoding="utf-8")
    own = {
        "data": {
            "source": str(corpus),
            "tokenizer": "bpe-4096",
            "cache_dir": str(folder / "cache"),
            "seq_len": sections.pop("seq_len"),
        },
        "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95]},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "run_dir": str(folder / "run"),
    }
    recipe: Recipe = Recipe.model_validate_json(json.dumps(own | sections))
    prepare(recipe.data, progress=False)
    return recipe


def our_run(recipe: Recipe) -> Stamps:
    """Train on this rank with the feed, the metrics file and a live progress line; nothing is validated or saved."""
    rank = dist.get_rank()
    layout = recipe.layout(dist.get_world_size())
    batch = recipe.resolve_batch(layout)
    corpus = prepare(recipe.data, progress=False)
    feed = Feed.open(recipe, layout, batch, corpus, rank=rank)
    ds_config = deepspeed_config(recipe, layout, batch, check_model(recipe, CPU), CPU)
    engine = create_engine(recipe, layout, batch, CPU, ds_config, eos_id=corpus.eos_id)
    stamps = Stamps()
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=160, highlight=False)
        progress = ProgressLine(recipe.train.steps, every=1, enabled=rank == 0, console=console)
        run = RunDirectory.choose(recipe, name="benchmark", is_writer=rank == 0, overwrite=True)
        run.open(recipe, ds_config, CPU)
        fit(recipe, engine, feed, run, progress, Trackers([stamps]))
        run.close()
    return stamps
