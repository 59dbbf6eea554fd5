"""RankStep: what one rank of a rehearsal did: its collectives, its memory, what it would save and resume."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from toolkit.checkpoint.save_plan import Kinds
from toolkit.config.data_section import PREFERENCE_FORMATS
from toolkit.config.job import Job
from toolkit.data.samples.micro_batch import MicroBatch, Sequences
from toolkit.engines.base import Engine
from toolkit.engines.factory import create_engine
from toolkit.engines.local_tensors import local_tensors
from toolkit.engines.optimizer_states import MASTER
from toolkit.engines.second_weights import SecondWeights
from toolkit.errors import ToolkitError
from toolkit.files import reason_of
from toolkit.model_init import model_partition
from toolkit.parallel.distilled_loss import TeacherTokens, TopTokens
from toolkit.parallel.model_structure import ModelStructure
from toolkit.recorder.rehearsal.collectives import Collective
from toolkit.recorder.rehearsal.fake_rank import CPU, FakeRank, Messages, fake_rank
from toolkit.recorder.rehearsal.stage_order import RecordedSchedule, calls_at_stage

STEPS = 2
"""ZeRO-3 gathers ahead, and Adam has moments, from the second step on."""


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """A rank after its rehearsal."""

    calls: tuple[Collective, ...]
    """All collectives, from the model's construction on."""
    step: tuple[int, int]
    """The first and behind the last of them that belong to the last training step."""
    parameters: int
    """Elements of the model's parameters on this rank."""
    peak: int
    """Most bytes that were held at once in the last training step."""
    saved: Kinds
    """Names and shapes of what a checkpoint has."""
    sent: Messages
    maxima: Messages
    schedules: tuple[RecordedSchedule, ...] = ()
    """Schedules of a pipeline that the rank has run."""

    def calls_at(self, stage: int) -> tuple[Collective, ...]:
        """Return the collectives of the rank that does the same at another pipeline stage, in the order of that one."""
        return calls_at_stage(self.calls, self.schedules, stage)


@dataclass(frozen=True, kw_only=True)
class Partitioned:
    """What all ranks find out of the model before they take their parts: found once, where it takes no time."""

    structure: ModelStructure | None
    """Where layers need not be followed, None: without tensor parallelism and pipeline."""
    bounds: tuple[int, ...]

    @contextmanager
    def known(self) -> Iterator[None]:
        """Let a partition of the model take these."""
        with ExitStack() as stack:
            partition = model_partition.ModelPartition
            stack.enter_context(mock.patch.object(partition, "_bounds", return_value=self.bounds))
            if self.structure is not None:
                analyze = mock.patch.object(model_partition, "analyze_model", return_value=self.structure)
                stack.enter_context(analyze)
            yield


def rehearse_rank(
    job: Job,
    ds_config: Mapping[str, Any] | None,
    rank: int,
    partitioned: Partitioned,
    *,
    received: Messages = (),
    stage_maxima: Messages = (),
    on_gpu: bool = True,
    device: torch.device = CPU,
    inspect: Callable[[Engine], None] | None = None,
    top: TopTokens | None = None,
) -> RankStep:
    """Build the engine of a rank and take training steps, on tensors without memory. Raises what the engine raises.

    `top`: what collects the tokens of a teacher, which takes no step; None for what trains.
    `device`: where these tensors say that they are. On `cuda` the GPU's own code paths run, which needs a torch that
    has such a device, or a stub of one. `inspect`: called with the engine behind the last step.
    """
    documents = job.recipe.data.masks_documents
    options: dict[str, Any] = {
        "received": received,
        "stage_maxima": stage_maxima,
        "on_gpu": on_gpu,
        "documents": documents,
        "device": device,
    }
    with partitioned.known(), fake_rank(job.layout, rank, **options) as mode:
        rehearsal = _Rehearsal(job, ds_config, mode, inspect)
        try:
            return rehearsal.run() if top is None else rehearsal.ask(top)
        except ToolkitError:
            raise
        except Exception as error:
            raise RehearsalFailure(_in_one_line(error, rehearsal.phase)) from error


class RehearsalFailure(Exception):  # noqa: N818 - what a job would fail with, not an error of the rehearsal
    """What a rank's code raised, in which phase and where, in one line."""


def _in_one_line(error: Exception, phase: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    of_ours = [frame for frame in frames if "/toolkit/" in frame.filename and "/recorder/" not in frame.filename]
    last = (of_ours or list(frames))[-1]
    place = f"{last.filename.rpartition('/')[2]} {last.name}"
    return f"{phase}: {type(error).__name__}: {reason_of(error)} (in {place})"


class _Rehearsal:
    def __init__(
        self,
        job: Job,
        ds_config: Mapping[str, Any] | None,
        mode: FakeRank,
        inspect: Callable[[Engine], None] | None,
    ) -> None:
        self.inspect = inspect
        self.job = job
        self.ds_config = ds_config
        self.mode = mode
        self.phase = "construction"

    def run(self) -> RankStep:
        mode = self.mode
        engine = build_engine(self.job, mode.device, self.ds_config)
        engine.report_phase = self._enter
        first = 0
        for _ in range(STEPS):
            self.phase = "forward"
            first = len(mode.recorded)
            mode.live.peak = mode.live.bytes
            take_step(engine, self.job)
        step = (first, len(mode.recorded))
        peak = mode.live.peak
        saved = tuple((kind, tuple(specs)) for kind, specs in local_tensors(engine).specs)
        if self.inspect is not None:
            self.phase = "inspection"
            self.inspect(engine)
        self._resume(engine)
        return self._recorded(engine, step=step, peak=peak, saved=saved)

    def ask(self, top: TopTokens) -> RankStep:
        """Ask a teacher about as many micro-batches as it is asked about at once."""
        mode = self.mode
        engine = create_engine(self.job, mode.device, self.ds_config)
        engine.report_phase = self._enter
        self.phase = "teacher's forward"
        first = len(mode.recorded)
        mode.live.peak = mode.live.bytes
        ask_teacher(engine, self.job, top)
        return self._recorded(engine, step=(first, len(mode.recorded)), peak=mode.live.peak)

    def _recorded(self, engine: Engine, *, step: tuple[int, int], peak: int, saved: Kinds = ()) -> RankStep:
        """Return what the rank has done so far; `step`: the calls of its last step."""
        mode = self.mode
        return RankStep(
            calls=tuple(mode.recorded),
            step=step,
            parameters=sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters()),
            peak=peak,
            saved=saved,
            sent=tuple(mode.sent),
            maxima=tuple(mode.maxima),
            schedules=tuple(mode.schedules),
        )

    def _enter(self, phase: str, step: int | None = None) -> None:
        self.phase = phase

    def _resume(self, engine: Engine) -> None:
        """Set masters and optimizer states, as from a checkpoint."""
        self.phase = "resume"
        for kind in (MASTER, *engine.states.kinds):
            shapes = {name: tuple(shape) for name, shape in engine.saved_names(kind)}
            engine.load_states(kind, lambda name, shapes=shapes: torch.empty(shapes[name]))  # type: ignore[misc]


def build_engine(job: Job, device: torch.device, ds_config: Mapping[str, Any] | None) -> Engine:
    """Build the engine of a job, with the reference of an objective that is kept in memory."""
    engine = create_engine(job, device, ds_config)
    if engine.objective is not None and job.recipe.train.objective.reference == "online":
        engine.with_reference = SecondWeights.frozen(engine).in_place
    return engine


def take_step(engine: Engine, job: Job) -> None:
    """Take one training step on a batch of the job's shape, whose tokens are all alike."""
    terms = job.batch.global_batch_size * (job.recipe.data.seq_len if engine.objective is None else 1)
    engine.train_step(micro_batches(job), target_tokens=terms, learning_rate=1e-4)


def ask_teacher(engine: Engine, job: Job, top: TopTokens) -> None:
    """Ask a teacher about the micro-batches of a job of its shape."""
    places = torch.zeros(job.batch.micro_batch_size, job.recipe.data.seq_len, dtype=torch.long)
    engine.top_tokens((replace(batch, places=places.clone()) for batch in micro_batches(job)), top)


def micro_batches(job: Job) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a rank."""
    samples = job.batch.micro_batch_size
    data = job.recipe.data
    for number in range(job.batch.accumulation):
        ids = torch.ones(samples, data.seq_len, dtype=torch.long)
        positions = torch.zeros(samples, data.seq_len, dtype=torch.long)
        yield MicroBatch(
            input_ids=ids,
            labels=ids.clone(),
            position_ids=positions if data.masks_documents else None,
            dropout_seed=number,
            sources=torch.zeros(samples, dtype=torch.long) if data.labels else None,
            sequences=_sequences(samples, data.seq_len) if data.format in PREFERENCE_FORMATS else None,
            teacher=_teacher_tokens(job, ids),
        )


def _sequences(samples: int, seq_len: int) -> Sequences:
    """Return a pair for each sample, whose sequences have half of its places each."""
    halves = torch.arange(seq_len) * 2 // seq_len  # [s]
    numbers = 2 * torch.arange(samples).unsqueeze(1) + halves
    return Sequences(
        numbers=numbers,
        tokens=torch.full((samples, 2), seq_len // 2),
        reference=torch.zeros(samples, 2, dtype=torch.float64),
        is_desirable=torch.ones(samples, dtype=torch.bool),
        is_counted=torch.ones(samples, dtype=torch.bool),
        weights=torch.ones(samples, dtype=torch.float64),
        rows=torch.arange(samples),
        pieces=torch.arange(samples),
        chosen_token_share=2 / seq_len,
    )


def _teacher_tokens(job: Job, ids: torch.Tensor) -> TeacherTokens | None:
    """Return a teacher's tokens for each place of `ids` [b, s], where the job has a teacher."""
    section = job.recipe.train.distill
    if section is None:
        return None
    top = torch.zeros(*ids.shape, section.top_k, dtype=torch.long)
    return TeacherTokens(ids=top, logps=torch.zeros(*ids.shape, section.top_k + 1))
