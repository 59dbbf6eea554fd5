"""Rehearse a job: a training step of every kind of rank, their collectives against each other, a save and a resume."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from toolkit.checkpoint.save_plan import PlannedFile, plan_files
from toolkit.config.distill_section import BATCHES_A_COMMIT
from toolkit.config.job import Job
from toolkit.config.stage_balance import CPU_FLOPS_PER_BYTE, GPU_FLOPS_PER_BYTE
from toolkit.dsconfig import build
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.memory_request import MemoryRequest
from toolkit.estimate.model_facts import ModelFacts
from toolkit.hardware import Gpu
from toolkit.model_init.build_model import load_config
from toolkit.model_init.teacher_job import teacher_job, with_vectors_alone
from toolkit.models.shape import find_name
from toolkit.parallel.distilled_loss import TopTokens
from toolkit.parallel.model_structure import ModelStructure, analyze_model
from toolkit.planner.run_memory import memory_request, model_config
from toolkit.recorder.rehearsal.collectives import WAIT
from toolkit.recorder.rehearsal.depth import fewer_layers, with_layers, with_random_weights
from toolkit.recorder.rehearsal.fake_rank import CPU
from toolkit.recorder.rehearsal.forked_rank import ForkedRank
from toolkit.recorder.rehearsal.match import find_mismatch
from toolkit.recorder.rehearsal.rank_kinds import RankKind, rank_kinds
from toolkit.recorder.rehearsal.rank_step import Partitioned, RankStep, RehearsalFailure, rehearse_rank
from toolkit.recorder.rehearsal.refusals import check_rehearsable


@dataclass(frozen=True, kw_only=True)
class RehearsedKind:
    """A kind of rank after its rehearsal."""

    kind: RankKind
    step: RankStep
    estimate: MemoryBreakdown
    """The estimate of the whole model."""
    has_all_layers: bool
    is_teacher: bool = False
    """Whether the rank was asked as the teacher of a distillation, which takes no step."""

    @property
    def estimated(self) -> int:
        """The bytes that the estimate has for the rehearsed peak: that of the steps, or of a teacher's pass."""
        estimate = self.estimate
        return (estimate.teacher_pass if self.is_teacher else estimate.allocated_in_steps) - estimate.workspace

    @property
    def peak(self) -> int | None:
        """The most bytes that the rank holds in a step; None where not all layers were rehearsed, or with offload.

        What is on the host cannot be told from what is on the device.
        """
        layout = self.kind.layout
        offloads = (layout.offload_optimizer, layout.offload_params, layout.offload_activations)
        return self.step.peak if self.has_all_layers and offloads == ("none", "none", False) else None

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Calls and bytes of the rehearsed step, by group."""
        counts: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        first, last = self.step.step
        for call in self.step.calls[first:last]:
            if call.kind == WAIT:
                continue
            counts[call.group] += 1
            nbytes[call.group] += call.nbytes
        return {group: (count, nbytes[group]) for group, count in counts.items()}


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A job after its rehearsal. `problem`: why it would hang or fail; empty where it would not."""

    job: Job
    layers: int
    """Decoder layers of the rehearsed model."""
    all_layers: int
    """Decoder layers of the job's model."""
    micro_batches: int
    """Micro-batches of the rehearsed step."""
    kinds: tuple[RehearsedKind, ...]
    problem: str
    files: int
    """Files of a checkpoint with tensors."""
    checkpoint_bytes: int
    written_bytes: int
    """Bytes that the busiest rank writes of it."""
    teacher: tuple[RehearsedKind, ...] = ()
    """Kinds of ranks as the teacher of a distillation is asked; empty without one, or where its config is not known."""


Progress = Callable[[str, int, int], None]
"""Called with the name of each kind, its number from 1, and how many there are."""


def _no_progress(name: str, number: int, count: int) -> None:
    """Say nothing."""


def rehearse(
    job: Job,
    *,
    layers: int | None = None,
    gpu: Gpu | None = None,
    on_gpu: bool = True,
    progress: Progress = _no_progress,
) -> Rehearsal:
    """Rehearse a job. Raises the ToolkitError of a model or layout that cannot be built.

    `layers`: at most so many decoder layers for each pipeline stage, and no estimate of fewer; None for all of them.
    `gpu`: what the job is to fit on; `on_gpu`: whether a GPU's kernels and stage bounds are rehearsed, or a CPU's.
    """
    check_rehearsable(job)
    request = replace(
        memory_request(job.recipe, job.layout, job.batch, gpu=gpu),
        flops_per_byte=GPU_FLOPS_PER_BYTE if on_gpu else CPU_FLOPS_PER_BYTE,
    )
    estimates = request.stages()
    teacher = _Outcome()
    if request.setup.teacher is not None and layers is None:
        teacher_request = replace(request, setup=request.setup.of_teacher())
        teacher = _teacher_plan(job, teacher_request, on_gpu=on_gpu).run(progress)
    pattern = request.setup.model.parameters.pattern
    bounds = request.bounds
    all_layers = len(pattern)
    if layers is not None:
        bounds = fewer_layers(bounds, pattern, layers)
        pattern = pattern[: bounds[-1]]
        job = with_layers(job, len(pattern), all_layers)
    small = rehearsed_job(job)
    plan = _Plan.of(small, request, bounds=bounds, pattern=pattern, on_gpu=on_gpu)
    outcome = _Outcome() if teacher.problem else plan.run(progress)
    kinds = _rehearsed_kinds(outcome.steps, estimates, has_all_layers=len(pattern) == all_layers)
    files = plan_files(kinds[0].step.saved, job.layout.world_size) if kinds else []
    written = _written_bytes(files)
    return Rehearsal(
        job=job,
        layers=len(pattern),
        all_layers=all_layers,
        micro_batches=small.batch.accumulation,
        kinds=kinds,
        problem=f"the teacher: {teacher.problem}" if teacher.problem else outcome.problem,
        teacher=_rehearsed_kinds(teacher.steps, estimates, has_all_layers=True, is_teacher=True),
        files=len(files),
        checkpoint_bytes=sum(written.values()),
        written_bytes=max(written.values(), default=0),
    )


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The steps of kinds of ranks. `problem`: why they would hang or fail; empty where they would not."""

    steps: Mapping[RankKind, RankStep] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the rehearsals of all kinds of ranks of one job share."""

    job: Job
    ds_config: Mapping[str, Any]
    partitioned: Partitioned
    kinds: Sequence[RankKind]
    on_gpu: bool
    top: TopTokens | None = None
    """What collects the tokens of a teacher; None for what trains."""

    @classmethod
    def of(
        cls,
        job: Job,
        request: MemoryRequest,
        *,
        bounds: tuple[int, ...],
        pattern: tuple[int, ...],
        on_gpu: bool,
        top: TopTokens | None = None,
    ) -> Self:
        """Plan the rehearsal of a job whose stages have these bounds, and its layers these kinds."""
        return cls(
            job=job,
            ds_config=rehearsed_config(job, hidden_size=request.setup.model.shape.hidden, on_gpu=on_gpu),
            partitioned=Partitioned(structure=whole_structure(job), bounds=bounds),
            kinds=rank_kinds(job.layout, bounds, pattern),
            on_gpu=on_gpu,
            top=top,
        )

    def run(self, progress: Progress) -> _Outcome:
        """Rehearse all kinds, again where ranks agree on something that only all of them together know."""
        outcome = self._rehearsed(progress)
        stage_maxima = _stage_maxima(outcome.steps)
        if not outcome.problem and any(list(step.maxima) != stage_maxima for step in outcome.steps.values()):
            outcome = self._rehearsed(progress, stage_maxima=stage_maxima)
        return replace(outcome, problem=outcome.problem or _problem(self.job, outcome.steps))

    def _rehearsed(self, progress: Progress, *, stage_maxima: Sequence[list[int]] = ()) -> _Outcome:
        """Rehearse all kinds, those of a stage at once: a stage receives the headers that the one before has sent.

        Stops at the first rank whose code fails, and returns those before it and why it does. `stage_maxima`: what
        each all-reduce of integers over a pipeline's stages returns.
        """
        steps: dict[RankKind, RankStep] = {}
        sent: dict[tuple[int, str], Sequence[list[int]]] = {}
        for stages, kinds_of_stage in groupby(self.kinds, key=lambda kind: kind.stages):
            running: list[ForkedRank] = []
            for kind in kinds_of_stage:
                progress(kind.name, len(steps) + len(running) + 1, len(self.kinds))
                step = partial(
                    rehearse_rank,
                    self.job,
                    self.ds_config,
                    kind.rank,
                    self.partitioned,
                    received=sent.get((stages[0] - 1, kind.place), ()),
                    stage_maxima=stage_maxima,
                    on_gpu=self.on_gpu,
                    top=self.top,
                )
                running.append(ForkedRank(kind, step))
            try:
                for process in running:
                    kind = process.kind
                    steps[kind] = process.outcome()
                    for stage in stages:
                        sent[stage, kind.place] = steps[kind].sent
            except RehearsalFailure as failure:
                return _Outcome(steps=steps, problem=f"rank {kind.rank} ({kind.name}) fails in {failure}")
            finally:
                for process in running:
                    process.end()
        return _Outcome(steps=steps)


def _teacher_plan(job: Job, request: MemoryRequest, *, on_gpu: bool) -> _Plan:
    """Plan the rehearsal of all kinds of ranks as they ask the teacher of a job; `request` has its setup."""
    section = job.recipe.train.distill
    assert section is not None
    vocabulary = ModelFacts.from_config(model_config(job.recipe)).shape.vocab
    return _Plan.of(
        rehearsed_teacher(job),
        request,
        bounds=request.bounds,
        pattern=request.setup.model.parameters.pattern,
        on_gpu=on_gpu,
        top=TopTokens(section.top_k, section.temperature, vocabulary=vocabulary),
    )


def _rehearsed_kinds(
    steps: Mapping[RankKind, RankStep],
    estimates: Sequence[MemoryBreakdown],
    *,
    has_all_layers: bool,
    is_teacher: bool = False,
) -> tuple[RehearsedKind, ...]:
    """Put the step of each kind of rank beside the estimate of its stage."""
    return tuple(
        RehearsedKind(
            kind=kind,
            step=step,
            estimate=estimates[kind.stages[0]],
            has_all_layers=has_all_layers,
            is_teacher=is_teacher,
        )
        for kind, step in steps.items()
    )


def _written_bytes(files: Sequence[PlannedFile]) -> Counter[int]:
    """Add up the bytes of a checkpoint that each rank writes."""
    written: Counter[int] = Counter()
    for file in files:
        written[file.rank] += file.nbytes
    return written


def _stage_maxima(steps: Mapping[RankKind, RankStep]) -> list[list[int]]:
    """Return the largest values that any kind put into each of their all-reduces of integers over a pipeline."""
    values_of_calls = zip(*(step.maxima for step in steps.values()), strict=False)
    return [[max(column) for column in zip(*values, strict=True)] for values in values_of_calls]


def rehearsed_micro_batches(job: Job) -> int:
    """Return the micro-batches of a rehearsed step: one more than the first stage has in flight at once.

    The others of a step are like those, and add nothing to the peak. Without a pipeline these are two. Under a pipeline
    schedule they are the fewest of which every rank holds as many as of all.
    """
    layout = job.layout
    if layout.schedule is not None:
        most = layout.table(job.batch.accumulation).held()
        first = layout.pp + job.batch.accumulation % layout.pp
        fewer = range(first, job.batch.accumulation, layout.pp)
        enough = (count for count in fewer if layout.table(count).held() == most)
        return next(enough, job.batch.accumulation)
    return min(job.batch.accumulation, job.layout.pp + 1)


def rehearsed_job(job: Job) -> Job:
    """The job with few micro-batches, random weights, and without what is compiled for a GPU."""
    recipe = with_random_weights(job.recipe)
    samples = job.batch.micro_batch_size * job.batch.dp * rehearsed_micro_batches(job)
    changed = recipe.changed(
        {
            "model": {"kernels": "torch"},
            "batch": {"global_batch_size": samples},
            "train": {"compile": False},
        }
    )
    return replace(job, recipe=changed, batch=replace(job.batch, global_batch_size=samples))


def rehearsed_teacher(job: Job) -> Job:
    """The job of a job's teacher with random weights, and as many micro-batches as it is asked about at once."""
    section = job.recipe.train.distill
    assert section is not None
    name = find_name(section.teacher, tuned=True) or section.teacher
    asked = teacher_job(job, name=name, init="random")
    asked = rehearsed_job(with_vectors_alone(asked, load_config(asked.recipe.model)))
    samples = asked.batch.micro_batch_size * asked.batch.dp * BATCHES_A_COMMIT
    recipe = asked.recipe.changed({"batch": {"global_batch_size": samples}})
    return replace(asked, recipe=recipe, batch=replace(asked.batch, global_batch_size=samples))


def rehearsed_config(job: Job, *, hidden_size: int, on_gpu: bool, device: torch.device = CPU) -> dict[str, Any]:
    """The DeepSpeed config of a job, with PyTorch's own optimizer in place of those that DeepSpeed compiles.

    `device`: where tensors are, as in `rehearse_rank`. On a CPU PyTorch's optimizer is not the fused one of a GPU.
    """
    config = build(job, hidden_size=hidden_size, device="cuda" if on_gpu else "cpu")
    is_compiled = job.layout.offload_optimizer != "none"
    if on_gpu and (is_compiled or device.type == "cpu"):
        plain = build(job, hidden_size=hidden_size, device="cpu")
        if "overlap_comm" in config["zero_optimization"]:  # ZeRO-0 has none
            plain["zero_optimization"]["overlap_comm"] = config["zero_optimization"]["overlap_comm"]
        config = plain
    return config


def whole_structure(job: Job) -> ModelStructure | None:
    """Return the structure of the whole model, where ranks take layers or parts of them."""
    if job.layout.tp * job.layout.pp == 1:
        return None
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(load_config(job.recipe.model))
    model.tie_weights()
    return analyze_model(model)


def _problem(job: Job, steps: Mapping[RankKind, RankStep]) -> str:
    """Say why ranks whose own code does not fail would hang, or save what does not fit together; empty where not."""
    calls = {(kind, stage): step.calls_at(stage) for kind, step in steps.items() for stage in kind.stages}
    mismatch = find_mismatch(job.layout, calls)
    if mismatch is not None:
        return str(mismatch)
    first, *others = steps
    for other in others:
        if steps[other].saved != steps[first].saved:
            return f"{first.name} and {other.name} would save different tensors"
    return ""
