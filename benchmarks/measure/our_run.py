"""A timed run of the toolkit: the seconds of its steps, as recipes/train.py takes them."""

import contextlib
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
from typing_extensions import override

from toolkit import Callback, Job, TrainOptions, train
from toolkit.config.recipe import Recipe
from toolkit.data.tokens.token_cache import prepare
from toolkit.step_metrics import StepMetrics
from toolkit.training.loop import TrainingRun

CPU = torch.device("cpu")


@dataclass
class Stamps(Callback):
    """When each step ended, and its loss."""

    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        self.add(metrics.loss)

    def add(self, loss: float) -> None:
        """A step has ended."""
        self.times.append(time.perf_counter())
        self.losses.append(loss)

    def step_seconds(self, warmup: int) -> list[float]:
        """Seconds of each step without the first `warmup` ones, from end to end: no part of a step is omitted."""
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


def our_run(recipe: Recipe, stamps: Stamps | None = None) -> Stamps:
    """Train on this rank as recipes/train.py does; nothing is validated, and what is printed goes nowhere."""
    stamps = stamps or Stamps()
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        train(Job.of(recipe, dist.get_world_size()), [stamps], TrainOptions(overwrite=True))
    return stamps
