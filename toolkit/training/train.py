"""train: one function for every run. It checks everything before the ranks meet and before anything is written."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from toolkit.checkpoint.commit import Retention
from toolkit.config import dump_recipe, load_recipe
from toolkit.config.data_section import PREFERENCE_FORMATS
from toolkit.config.job import Job
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.corpora import Corpora, prepare_all
from toolkit.engines.base import Engine
from toolkit.engines.factory import create_engine
from toolkit.errors import RunError
from toolkit.launch.elastic import restarting_launcher
from toolkit.launch.process_group import check_same_everywhere, process_group
from toolkit.launch.rank_environment import RankEnvironment, pick_device
from toolkit.launch.stop_requests import stoppable
from toolkit.phases import PhaseReporter, ignore_phase
from toolkit.training.arguments import TrainOptions
from toolkit.training.callback import Callback
from toolkit.training.checkpointing import Checkpointer
from toolkit.training.incidents import Incidents
from toolkit.training.loop import TrainingRun
from toolkit.training.memory_checkpoints import HostMemoryRun, MemoryCheckpoints, check_launcher
from toolkit.training.preflight import check_model, check_vocabulary, deepspeed_config, find_shape
from toolkit.training.printer import Printer, make_progress, show_summary
from toolkit.training.profiler import Profiler
from toolkit.training.replica_check import RepeatCheck, ReplicaCheck
from toolkit.training.resume import AUTO, resume
from toolkit.training.run_directory import RunDirectory
from toolkit.training.run_recorder import PeriodicCheckpoints, RunRecorder
from toolkit.training.slow_ranks import SlowRanks
from toolkit.training.teacher_model import teach
from toolkit.training.trackers import Trackers

EngineFactory = Callable[..., Engine]
"""Builds the engine of a run, with the arguments of `create_engine`."""


def load_job(path: str | PathLike[str], overrides: Sequence[str] = (), layout: str | None = None) -> Job:
    """The job of a recipe on the ranks of this launch. `overrides` and `layout` are as on the command line.

    With `parallel: auto` a collective call: the first rank plans for all. Raises SpareError on a rank of an elastic
    launch that the plan has no place for, when the run of the others has ended.
    """
    here = RankEnvironment.detect()
    recipe = load_recipe(path, overrides, world_size=here.world_size, layout=layout)
    if not recipe.parallel.is_planned:
        return Job.of(recipe, here.world_size)
    from toolkit.training.plan_launch import planned_for_ranks  # and with it the planner

    plan = planned_for_ranks(recipe, here)
    return replace(Job.of(plan.recipe, plan.world_size), plan=plan.note)


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Everything that is known and checked before the ranks meet."""

    job: Job
    device: torch.device
    ds_config: dict[str, Any] | None
    directory: RunDirectory | None
    corpus: Corpora
    loader: MicroBatchLoader
    vocabulary: int
    """Tokens of the model."""
    shows_progress: bool


def train(
    job: Job,
    callbacks: Sequence[Callback] = (),
    options: TrainOptions | None = None,
    *,
    in_memory: bool = False,
    engine_factory: EngineFactory = create_engine,
) -> TrainingRun:
    """Train a job on the ranks of this launch, or of the process group that they have joined already.

    `callbacks` come after the toolkit's own: run directory, printer, trackers, incidents, checkpoints. With `in_memory`
    a run has none of these: it prints and writes nothing. Raises a ToolkitError for everything that a user can cause,
    before anything is written where that is possible, and FinishedError where `--resume auto` finds nothing to do.
    """
    options = options or TrainOptions()
    here = RankEnvironment.detect()
    prepared = _prepare(job, options, here, in_memory=in_memory)
    with _joined(here, prepared.device, job.recipe.train.hang_timeout) as report_phase:
        try:
            run = _build(prepared, callbacks, options, engine_factory, report_phase)
            with nullcontext() if in_memory else stoppable(run):
                run.fit()
        finally:
            if prepared.directory is not None:
                prepared.directory.release()
    show_summary(run)
    return run


def _prepare(job: Job, options: TrainOptions, here: RankEnvironment, *, in_memory: bool) -> _Prepared:
    """Check what can be checked without the other ranks; nothing is written but the token cache."""
    recipe = job.recipe
    if job.layout.world_size != here.world_size:
        needed = job.layout.world_size
        started = here.world_size
        remedies = f"start {needed} ranks", f"make the job for {started}"
        raise RunError.of("world_size", started, f"the job is for {needed}", *remedies)
    device = pick_device(here)
    config = check_model(recipe, device, trust_remote_code=options.trust_remote_code)
    job = replace(job, shape=find_shape(config))
    ds_config = deepspeed_config(job, config, device, options.deepspeed_config)
    directory = None if in_memory else RunDirectory.choose(recipe, options, is_writer=here.rank == 0)
    if directory is not None:
        check_launcher(recipe, restarting_launcher())
        directory.check_url()
    shows_progress = here.rank == 0 and not in_memory and recipe.log.level != "warning"
    validates = bool(recipe.train.eval_every)
    corpus = prepare_all(recipe.data, progress=shows_progress, validates=validates)
    check_vocabulary(recipe, config, corpus)
    loader = MicroBatchLoader.open(job, corpus, rank=here.rank)
    return _Prepared(
        job=job,
        device=device,
        ds_config=ds_config,
        directory=directory,
        corpus=corpus,
        loader=loader,
        vocabulary=int(config.get_text_config().vocab_size),
        shows_progress=shows_progress,
    )


def _check_objective(job: Job, engine: Engine) -> None:
    """Raise RunError for an engine that would train on preference data, or beside a teacher, as on any text."""
    if job.recipe.train.distill is not None and engine.distillation is None:
        reason = f"{type(engine).__name__} knows of no teacher"
        teacher = job.recipe.train.distill.teacher
        raise RunError.of("train.distill.teacher", teacher, reason, "train with create_engine", ("train.distill", None))
    if job.recipe.data.format in PREFERENCE_FORMATS and engine.objective is None:
        name = job.recipe.train.objective.name
        reason = f"{type(engine).__name__} computes no objective"
        raise RunError.of("train.objective.name", name, reason, "train with create_engine", ("data.format", "chat"))


def _build(
    prepared: _Prepared,
    callbacks: Sequence[Callback],
    options: TrainOptions,
    engine_factory: EngineFactory,
    report_phase: PhaseReporter,
) -> TrainingRun:
    """Build the engine, and the run around it. A collective call."""
    job = prepared.job
    device = prepared.device
    corpus = prepared.corpus
    directory = prepared.directory
    check_same_everywhere(dump_recipe(job.recipe) + corpus.all_contents, device)
    in_memory = None
    resumed = None
    if directory is not None:
        directory.claim(job.recipe, options)
        in_memory = HostMemoryRun.join(job.recipe, restarting_launcher())
        if in_memory is not None:
            resumed = in_memory.resume(options.resume, directory.checkpoints)
    if resumed is None and options.resume is not None:
        resumed = resume(options.resume, job.recipe, strict=options.strict)
    if resumed is not None:
        path = str(resumed.saved.path)
        resumed.state.check(job.recipe, corpus.contents, path=path, may_be_complete=options.resume == AUTO)
    say = make_progress(job, device, first=prepared.shows_progress).say
    reporting = replace(prepared.loader, report_phase=report_phase)
    teach(job, device, reporting, corpus, engine_factory, say, vocabulary=prepared.vocabulary)
    engine = engine_factory(
        job, device, prepared.ds_config, eos_id=corpus.eos_id, trust_remote_code=options.trust_remote_code
    )
    _check_objective(job, engine)
    slow_ranks = _slow_ranks(job, device, directory, report_phase)
    if slow_ranks is not None:
        report_phase = slow_ranks.report_phase
    profiler = Profiler(report_phase) if job.recipe.train.profile is not None else None
    if profiler is not None:
        report_phase = profiler.report_phase
        callbacks = (profiler, *callbacks)
    engine.report_phase = report_phase
    loader = replace(prepared.loader, report_phase=report_phase)
    if directory is None:
        return TrainingRun(job, engine, loader, corpus, callbacks)
    tokenizer = corpus.tokenizer()
    section = job.recipe.checkpoint
    checkpointer = Checkpointer(
        job=job,
        engine=engine,
        tokenizer=tokenizer,
        corpus=corpus,
        check_lock=directory.check_locks,
        url=directory.url,
        keep=Retention(newest=section.keep, every=section.keep_every or None),
    )
    run_callbacks: list[Callback] = [
        RunRecorder(directory, prepared.ds_config, tokenizer),
        Printer(options.resume),
        Trackers(),
    ]
    if job.recipe.train.replica_check:
        run_callbacks.append(ReplicaCheck(job.recipe.train))
    if job.recipe.train.repeat_check:
        run_callbacks.append(RepeatCheck(job.recipe.train))
    run_callbacks += [Incidents(job.recipe.train), PeriodicCheckpoints(checkpointer)]
    if in_memory is not None:
        memory_checkpointer = in_memory.checkpointer(checkpointer, directory.check_lock)
        run_callbacks.append(MemoryCheckpoints(memory_checkpointer, section.memory_every))
    return TrainingRun(
        job,
        engine,
        loader,
        corpus,
        (*run_callbacks, *callbacks),
        progress=make_progress(job, device, first=directory.is_writer),
        directory=directory,
        checkpointer=checkpointer,
        resumed=resumed,
        slow_ranks=slow_ranks,
    )


def _slow_ranks(
    job: Job, device: torch.device, directory: RunDirectory | None, report_phase: PhaseReporter
) -> SlowRanks | None:
    """Return what names slow ranks; None for a single rank, for a run in memory, and where the recipe turns it off."""
    share = job.recipe.log.slow_ranks
    if directory is None or not share or not dist.is_initialized() or job.layout.world_size == 1:
        return None
    return SlowRanks(
        report_phase,
        device,
        layout=job.layout,
        rank=dist.get_rank(),
        hosts=directory.host_of_rank,
        share=share,
    )


@contextmanager
def _joined(here: RankEnvironment, device: torch.device, hang_timeout: float) -> Iterator[PhaseReporter]:
    """Join the ranks of this launch, with a watchdog; nothing where the process group exists already."""
    if dist.is_initialized():
        yield ignore_phase
        return
    with process_group(here, device, hang_timeout_seconds=hang_timeout) as watchdog:
        yield watchdog.report_phase
