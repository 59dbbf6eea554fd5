"""The teacher of a distillation: its most probable tokens in the place of each target, computed before training.

The ranks that will train build the teacher first, in the layout of the run, and let go of it before they build the
student, so that the two are never in memory together. It is built as any model is, with its vectors alone (norms and
biases) as what trains, so that it has next to no gradients and optimizer states; it takes no step. Every rank writes
the tokens of its own samples to a table beside the token cache, which is of the text, the teacher, top_k and the
temperature, and not of the layout: a second run starts at once, and one that was cut off goes on where it was.
"""

import copy
import gc
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from toolkit.config.distill_section import DistillSection
from toolkit.config.job import Job
from toolkit.config.objective_section import ObjectiveSection
from toolkit.config.recipe import ModelSection, OptimizerSection, Recipe
from toolkit.config.router_rules import expert_count
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.samples import Samples
from toolkit.data.samples.teacher_table import TeacherTable
from toolkit.data.tokens.corpora import Corpora, OpenText
from toolkit.engines.base import Engine
from toolkit.errors import RunError
from toolkit.model_init.build_model import load_config
from toolkit.parallel.distilled_loss import TopTokens
from toolkit.training.preflight import check_model, check_vocabulary, deepspeed_config, find_shape
from toolkit.training.reference_model import weights_identity

_VERSION = 1
_BATCHES_A_COMMIT = 16
"""Micro-batches of a rank between two notes of how much is done."""
_ROUTING = ("router_aux_loss", "router_z_loss", "router_bias_update", "expert_capacity_factor")
"""Fields of `model` that only training reads, and that a teacher without experts may not have."""
_TEACHER = "train.distill.teacher"
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
    if section.top_k > vocabulary:
        reason = f"the model has a vocabulary of {vocabulary}"
        raise RunError.of(
            "train.distill.top_k", section.top_k, reason, ("train.distill.top_k", f"{vocabulary} or less")
        )
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
        teacher_job = _teacher_job(job)
        engine = _build(teacher_job, device, corpora, create)
        _compute(engine, teacher_job, loader, ordered, table, int(done), vocabulary, say)
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
    stride = job.batch.micro_batch_size * job.batch.dp * _BATCHES_A_COMMIT
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


def _teacher_job(job: Job) -> Job:
    """Return the job of the teacher: its model in the layout of the run, which takes no step.

    Ranks that share each sequence of the student have sequences of their own: without gradients these fit. Those that
    share out the experts of a student are replicas of a teacher without experts. No router is balanced.
    """
    recipe = job.recipe
    section = recipe.train.distill
    assert section is not None
    model: dict[str, Any] = {
        "name_or_path": section.teacher,
        "init": "pretrained",
        "overrides": {},
        "lora": None,
        "freeze": (),
        "train_only": (),
        "load_in_4bit": False,
        **{name: ModelSection.model_fields[name].default for name in _ROUTING},
    }
    has_experts = expert_count(load_config(recipe.model.model_copy(update=model)).to_dict()) > 0
    ep = job.layout.ep if has_experts else 1
    experts = job.layout.experts if has_experts else "whole"
    changed = recipe.changed(
        {
            "model": model,
            "train": {"distill": None, "objective": ObjectiveSection.model_construct()},
            "parallel": {"ulysses": 1, "ep": ep, "experts": experts},
        }
    )
    changed = changed.model_copy(update={"optimizer": OptimizerSection(name="adamw", lr=1e-4)})
    layout = replace(job.layout, dp=job.layout.dp * job.layout.ulysses, ulysses=1, ep=ep, experts=experts)
    batch = replace(job.batch, dp=layout.dp)
    return replace(job, recipe=changed, layout=layout, batch=batch, shape=None)


def _build(job: Job, device: torch.device, corpora: Corpora, create: Callable[..., Engine]) -> Engine:
    """Build the teacher. Raises a ToolkitError for one that cannot be built, or has another tokenizer."""
    config = check_model(job.recipe, device)
    check_vocabulary(job.recipe, config, corpora)
    recipe = job.recipe.changed({"model": {"train_only": _vectors(config)}})
    job = replace(job, recipe=recipe, shape=find_shape(config))
    return create(job, device, deepspeed_config(job, config, device), eos_id=corpora.eos_id)


def _vectors(config: Any) -> tuple[str, ...]:
    """Return the names of the parameters with one dimension."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return tuple(name for name, parameter in model.named_parameters() if parameter.ndim == 1)


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
