"""The log-probabilities of the reference model: computed once, before the first step, by the engine that trains.

The reference is the model as it is built, before a checkpoint is loaded and before any step; LoRA's adapters add
nothing then, because their B is zero. So no second model is ever in memory. The pass reads every pair or completion
once, in the order of the text, without dropout. What it computes is cached beside the token cache, by the text and
how it becomes samples, the model and its precision, and not by the layout. A pass that is cut off goes on where it was.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from toolkit.config.recipe import Recipe
from toolkit.data.samples.preference_samples import PreferenceSamples
from toolkit.data.tokens.corpora import OpenText
from toolkit.files import expanded

if TYPE_CHECKING:
    from toolkit.training.loop import TrainingRun

_VERSION = 1
_MODEL_FIELDS = ("name_or_path", "init", "overrides", "load_in_4bit", "float8")
"""Fields of `model` that decide what its first forward pass computes."""
_BATCHES_A_COMMIT = 64
"""Micro-batches of a rank between two writes of the cache."""
_WEIGHTS = (".safetensors", ".bin")


def compute_reference(run: "TrainingRun") -> None:
    """Give the samples of a run the log-probabilities of the reference model, where its objective needs them.

    A collective call, before a checkpoint is loaded.
    """
    if run.engine.objective is None or not run.recipe.train.objective.needs_reference:
        return
    for name, text in run.corpus.sources.items():
        assert isinstance(run.loader.train, PreferenceSamples)
        run.loader.train.reference = _table(run, run.loader.train, text, name)
    for name, samples in run.loader.validation.items():
        assert isinstance(samples, PreferenceSamples)
        samples.reference = _table(run, samples, run.corpus.validation[name], name or "validation")


def _table(run: "TrainingRun", samples: PreferenceSamples, text: OpenText, name: str) -> NDArray[np.float64]:
    """Return the log-probabilities of both sequences of each piece of `samples`, [n, 2]."""
    path = text.corpus.path.parent / f"reference-{_digest(run.recipe, text, samples)}.npz"
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    table = torch.zeros(samples.piece_count, 2, dtype=torch.float64, device=run.engine.device)
    done = torch.zeros(1, dtype=torch.float64, device=run.engine.device)
    if is_writer:
        _read(path, table, done)
    _sum(table)
    _sum(done)
    ordered = samples.in_order()
    rows = len(ordered)
    stride = run.job.batch.micro_batch_size * run.job.batch.dp * _BATCHES_A_COMMIT
    for first in range(int(done), rows, stride):
        run.engine.report_phase("evaluate")
        share = torch.zeros_like(table)
        batches = run.loader.ordered_batches(ordered, first, min(rows, first + stride))
        for pieces, sums in run.engine.sequence_sums(batches):
            share[pieces] = sums
        _sum(share)
        table += share
        if is_writer:
            last = min(rows, first + stride)
            _write(path, table, last)
            label = f" of {name}" if name else ""
            run.progress.say(f"reference log-probabilities{label}: {last / rows:.0%}")
    result: NDArray[np.float64] = table.cpu().numpy()
    return result


def _sum(values: torch.Tensor) -> None:
    if dist.is_initialized():
        dist.all_reduce(values)


def _read(path: Path, table: torch.Tensor, done: torch.Tensor) -> None:
    """Read the cache, as far as it is there; a file that is not readable is computed again."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError), np.load(path, allow_pickle=False) as file:
        stored = file["table"]
        if stored.shape == tuple(table.shape):
            table.copy_(torch.from_numpy(stored))
            done.fill_(float(file["rows"]))


def _write(path: Path, table: torch.Tensor, rows: int) -> None:
    """Write the cache, whole or not at all. Where the disk does not let us, the next run computes it again."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        with temporary.open("wb") as file:
            np.savez(file, table=table.cpu().numpy(), rows=np.int64(rows))
        temporary.replace(path)


def _digest(recipe: Recipe, text: OpenText, samples: PreferenceSamples) -> str:
    """Identify what the log-probabilities are of: equal in every layout."""
    model = {name: getattr(recipe.model, name) for name in _MODEL_FIELDS}
    facts: list[Any] = [_VERSION, text.corpus.contents, text.split, samples.identity, model, recipe.precision]
    facts += [recipe.train.seed] if recipe.model.init == "random" else [_weights(recipe.model.name_or_path)]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _weights(name: str) -> list[Any]:
    """Identify published weights: the files of a directory, or the snapshot that the hub's cache has."""
    folder = expanded(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        return [str(try_to_load_from_cache(name, "config.json"))]
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
