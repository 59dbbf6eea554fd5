"""The log-probabilities of the reference model: computed once, before the first step, by the engine that trains.

The reference is the model as it is built, before a checkpoint is loaded and before any step; LoRA's adapters add
nothing then, because their B is zero. Another reference changes places with it for the pass (`SecondWeights`). So no
second model is in memory in training, unless it is asked for (`online`). The pass reads every pair or completion
once, in the order of the text, without dropout. What it computes is cached beside the token cache, by the text and
how it becomes samples, the model and its precision, and not by the layout; where tokens of a micro-batch compete for
experts, also by its size. A pass that is cut off goes on where it was.
"""

import contextlib
import hashlib
import json
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from toolkit.config.job import Job
from toolkit.data.samples.preference_samples import REFERENCE_BYTES, PreferenceSamples
from toolkit.data.tokens.corpora import OpenText
from toolkit.engines.second_weights import SecondWeights
from toolkit.errors import ModelError
from toolkit.files import expanded

if TYPE_CHECKING:
    from toolkit.training.loop import TrainingRun

_VERSION = 3
_MODEL_FIELDS = (
    "name_or_path",
    "init",
    "overrides",
    "attn_implementation",
    "loss",
    "kernels",
    "load_in_4bit",
    "float8",
    "expert_capacity_factor",
)
"""Fields of `model` that decide what its first forward pass computes, and how it is rounded."""
_REFERENCE = "train.objective.reference"
_BATCHES_A_COMMIT = 64
"""Micro-batches of a rank between two writes of the cache."""
_WEIGHTS = (".safetensors", ".bin")


def compute_reference(run: "TrainingRun") -> None:
    """Give the samples of a run the log-probabilities of the reference model, where its objective needs them.

    Where the reference is kept in memory, the engine gets it instead. A collective call, before a checkpoint is loaded.
    """
    section = run.recipe.train.objective
    if run.engine.objective is None or not section.needs_reference:
        return
    if section.reference == "online":
        run.engine.with_reference = SecondWeights.frozen(run.engine).in_place
        return
    for name, text in run.corpus.sources.items():
        assert isinstance(run.loader.train, PreferenceSamples)
        run.loader.train.reference = _table(run, run.loader.train, text, name)
    for name, samples in run.loader.validation.items():
        assert isinstance(samples, PreferenceSamples)
        samples.reference = _table(run, samples, run.corpus.validation[name], name or "validation")


def _table(run: "TrainingRun", samples: PreferenceSamples, text: OpenText, name: str) -> NDArray[np.float64]:
    """Return the log-probabilities of both sequences of each piece of `samples`, [n, 2]."""
    path = text.corpus.path.parent / f"reference-{_digest(run.job, text, samples)}.bin"
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    table = torch.zeros(samples.piece_count, 2, dtype=torch.float64, device=run.engine.device)
    done = torch.zeros(1, dtype=torch.float64, device=run.engine.device)
    if is_writer:
        stored = _read(path)[: len(table)]
        table[: len(stored)] = torch.from_numpy(stored)
        done.fill_(len(stored))
    _sum(done)
    if int(done):
        _sum(table)
    result: NDArray[np.float64] = table.cpu().numpy()
    if int(done) < len(table):
        with _reference_weights(run):
            _compute(run, samples, result, int(done), path if is_writer else None, f" of {name}" if name else "")
    return result


def _compute(
    run: "TrainingRun", samples: PreferenceSamples, table: NDArray[np.float64], done: int, path: Path | None, label: str
) -> None:
    """Fill `table` [n, 2] from piece `done` on; the rank that has the `path` appends to the cache there."""
    ordered = samples.in_order()
    starts = ordered.first_pieces()  # [rows + 1]
    rows = len(ordered)
    stride = run.job.batch.micro_batch_size * run.job.batch.dp * _BATCHES_A_COMMIT
    for first in range(int(np.searchsorted(starts, done, side="right")) - 1, rows, stride):
        run.engine.report_phase("evaluate")
        last = min(rows, first + stride)
        begin = int(starts[first])
        share = torch.zeros(int(starts[last]) - begin, 2, dtype=torch.float64, device=run.engine.device)
        for pieces, sums in run.engine.sequence_sums(run.loader.ordered_batches(ordered, first, last)):
            share[pieces - begin] = sums
        _sum(share)
        table[begin : begin + len(share)] = share.cpu().numpy()
        if path is not None:
            _append(path, begin, table[begin : begin + len(share)])
            run.progress.say(f"reference log-probabilities{label}: {last / rows:.0%}")


def _reference_weights(run: "TrainingRun") -> AbstractContextManager[None]:
    """Return a context in which the engine has the weights of the reference model."""
    reference = run.recipe.train.objective.reference
    if reference == "initial":
        return nullcontext()
    try:
        return SecondWeights.read(run.engine, reference).in_place()
    except ModelError as error:
        if error.refusal is None or error.refusal.field == _REFERENCE:
            raise
        advice = "name a model or a checkpoint"
        raise ModelError.of(_REFERENCE, reference, error.refusal.reason, advice, (_REFERENCE, "initial")) from None


def _sum(values: torch.Tensor) -> None:
    if dist.is_initialized():
        dist.all_reduce(values)


def _read(path: Path) -> NDArray[np.float64]:
    """Read the cache as far as it is there, [n, 2]."""
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        return np.frombuffer(data[: len(data) // REFERENCE_BYTES * REFERENCE_BYTES], dtype="<f8").reshape(-1, 2)
    return np.empty((0, 2))


def _append(path: Path, begin: int, part: NDArray[np.float64]) -> None:
    """Write the log-probabilities of the pieces from `begin` on; what the disk does not take is computed again.

    Nothing is written after a part that is missing, whose place would be read as log-probabilities of 0.
    """
    with contextlib.suppress(OSError), path.open("r+b" if path.exists() else "w+b") as file:
        if file.seek(0, os.SEEK_END) < begin * REFERENCE_BYTES:
            return
        file.seek(begin * REFERENCE_BYTES)
        file.write(part.astype("<f8").tobytes())
        file.flush()
        os.fsync(file.fileno())


def _digest(job: Job, text: OpenText, samples: PreferenceSamples) -> str:
    """Identify what the log-probabilities are of: equal in every layout."""
    recipe = job.recipe
    model = {name: getattr(recipe.model, name) for name in _MODEL_FIELDS}
    facts: list[Any] = [_VERSION, text.corpus.contents, text.split, samples.identity, model, recipe.precision]
    if recipe.model.expert_capacity_factor is not None:
        facts += [job.batch.micro_batch_size]  # whose tokens compete for the experts
    reference = recipe.train.objective.reference
    if reference != "initial":
        facts += [reference, weights_identity(reference)]
    elif recipe.model.init == "random":
        facts += [recipe.train.seed]
    else:
        facts += [weights_identity(recipe.model.name_or_path)]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def weights_identity(name: str) -> list[Any]:
    """Identify published weights: the files of a directory, or the snapshot that the hub's cache has."""
    folder = expanded(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        return [str(try_to_load_from_cache(name, "config.json"))]
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
