"""The teacher of a distillation: its most probable tokens in the place of each target, computed before training.

The ranks that will train build the teacher first, in the layout of the run, and let go of it before they build the
student, so that the two are never in memory together. It is built as any model is, with its vectors alone (norms and
biases) as what trains, so that it has next to no gradients and optimizer states; it takes no step. Every rank writes
the tokens of its own samples to a table beside the token cache, which is of the text, the teacher, top_k and the
temperature, and not of the layout: a second run starts at once, and one that was cut off goes on where it was.
"""

import gc
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from toolkit.config.distill_section import BATCHES_A_COMMIT, DistillSection
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.samples import Samples
from toolkit.data.samples.teacher_table import TeacherTable
from toolkit.data.tokens.corpora import Corpora, OpenText
from toolkit.engines.base import Engine
from toolkit.errors import RunError
from toolkit.model_init.teacher_job import refused_as_teacher, teacher_job, with_vectors_alone
from toolkit.parallel.distilled_loss import TopTokens
from toolkit.training.preflight import check_model, check_vocabulary, deepspeed_config, find_shape
from toolkit.training.reference_model import weights_identity

_VERSION = 1
_CACHE = "data.cache_dir"


def teach(
    job: Job,
    device: torch.device,
    loader: MicroBatchLoader,
    corpora: Corpora,
    create: Callable[..., Engine],
    say: Callable[[str], None],
    *,
    vocabulary: int,
) -> None:
    """Give the samples of a run what the teacher says, where the recipe has a teacher. A collective call.

    `vocabulary`: tokens of the student. `say` prints a line on the first rank.
    """
    section = job.recipe.train.distill
    if section is None:
        return
    (text,) = corpora.sources.values()
    samples = loader.train
    _check_top_k(section.top_k, "the model", vocabulary)
    digest = _digest(job.recipe, section, text, samples, vocabulary)
    table = TeacherTable(
        folder=text.corpus.path.parent / f"teacher-{digest}",
        tokens=text.corpus.token_count(text.split),
        top_k=section.top_k,
    )
    ordered = samples.in_order()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    done = _from_first(float(table.rows) if is_first else 0.0, device)
    if done < len(ordered):
        if is_first:
            table.create()
        _check_shared(table, device)
        asked = teacher_job(job)
        with refused_as_teacher(section.teacher):
            engine = _build(asked, device, corpora, create, top_k=section.top_k)
        _compute(engine, asked, loader, ordered, table, int(done), vocabulary, say)
        _free(engine)
    _check_shared(table, device)
    samples.teacher = table


def _compute(
    engine: Engine,
    job: Job,
    loader: MicroBatchLoader,
    ordered: Samples,
    table: TeacherTable,
    done: int,
    vocabulary: int,
    say: Callable[[str], None],
) -> None:
    """Fill the table from row `done` on."""
    assert job.recipe.train.distill is None
    rank = dist.get_rank() if dist.is_initialized() else 0
    teacher_loader = loader.in_job(job, rank=rank)
    section = loader.recipe.train.distill
    assert section is not None
    top = TopTokens(section.top_k, section.temperature, vocabulary=vocabulary)
    rows = len(ordered)
    stride = job.batch.micro_batch_size * job.batch.dp * BATCHES_A_COMMIT
    for first in range(done, rows, stride):
        last = min(rows, first + stride)
        loader.report_phase("evaluate")
        for batch, tokens in engine.top_tokens(teacher_loader.ordered_batches(ordered, first, last), top):
            assert batch.places is not None
            is_target = ((batch.labels >= 0) & (batch.places.to(batch.labels.device) >= 0)).flatten()
            places = batch.places.flatten()[is_target.cpu()].cpu().numpy()
            table.write(places, tokens.map(lambda values, wanted=is_target: values[wanted.to(values.device)]))
        if dist.is_initialized():
            dist.barrier()  # what is noted as done is on the disk
        if rank == 0:
            table.commit(last)
            say(f"teacher's top {section.top_k} tokens: {last / rows:.0%}")


def _build(job: Job, device: torch.device, corpora: Corpora, create: Callable[..., Engine], *, top_k: int) -> Engine:
    """Build the teacher. Raises a ToolkitError for one that cannot be built, or of another tokenizer or few tokens."""
    config = check_model(job.recipe, device)
    check_vocabulary(job.recipe, config, corpora)
    _check_top_k(top_k, "the teacher", config.get_text_config().vocab_size)
    job = replace(with_vectors_alone(job, config), shape=find_shape(config))
    return create(job, device, deepspeed_config(job, config, device), eos_id=corpora.eos_id)


def _check_top_k(top_k: int, name: str, vocabulary: int) -> None:
    """Raise RunError for more tokens than the vocabulary of the student or of the teacher has."""
    if top_k > vocabulary:
        field = "train.distill.top_k"
        reason = f"{name} has a vocabulary of {vocabulary}"
        raise RunError.of(field, top_k, reason, (field, f"{vocabulary} or less"))


def _free(engine: Engine) -> None:
    """Let go of a model, and of the gradients and states around it."""
    inner = getattr(engine, "engine", None)
    if inner is not None and hasattr(inner, "destroy"):
        inner.destroy()
    vars(engine).clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_shared(table: TeacherTable, device: torch.device) -> None:
    """Raise RunError on every rank where one does not see the table that the first rank has made."""
    missing = torch.zeros(1, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.barrier()
        missing.fill_(float(not table.folder.is_dir()))
        dist.all_reduce(missing)
    if missing.item():
        reason = f"{int(missing.item())} ranks do not see {table.folder}, where all write what the teacher says"
        raise RunError.of(_CACHE, str(table.folder.parent), reason, (_CACHE, "a directory that all hosts share"))


def _from_first(value: float, device: torch.device) -> float:
    """Return the value of the first rank on every rank; others give 0."""
    values = torch.full((1,), value, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(values)
    return float(values)


def _digest(recipe: Recipe, section: DistillSection, text: OpenText, samples: Samples, vocabulary: int) -> str:
    """Identify what the table is of: equal in every layout."""
    data = recipe.data
    facts: list[Any] = [_VERSION, text.corpus.contents, text.split, data.seq_len, data.packing, data.masks_documents]
    facts += [data.overlong, section.teacher, weights_identity(section.teacher), section.top_k, section.temperature]
    facts += [recipe.precision, vocabulary, type(samples).__name__]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
