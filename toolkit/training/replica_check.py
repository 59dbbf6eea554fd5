"""ReplicaCheck and RepeatCheck: find silent data corruption, in what replicas hold and in what they compute.

Weights are compared as the gradients were computed with them, before the update: under ZeRO-1 and 2 an update replaces
them by those of the optimizer's shards. Optimizer states are compared after it. A checkpoint of a step is saved after
its check, so that a rollback leads to states that were the same everywhere.

A gradient that one rank computes wrong reaches all replicas alike. It is found where replicas compute the same:
RepeatCheck has all of them compute a micro-batch of one of them, forward and backward.
"""

from typing import Literal

import torch
import torch.distributed as dist
from typing_extensions import override

from toolkit.config.recipe import TrainSection
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import StepResult
from toolkit.engines.replicas import RepeatedGradients, Replicas
from toolkit.errors import PreemptedError, ReplicaError, RunError
from toolkit.step_metrics import StepMetrics
from toolkit.training.callback import Action, Callback
from toolkit.training.loop import TrainingRun
from toolkit.training.resume import newest_checkpoint

_REMEDY = "Take its machine out of the job, test its memory, and resume with --resume auto."


class ReplicaCheck(Callback):
    """train.replica_check of a recipe: replicas compare checksums, and the run rolls back where they differ.

    Steps after the checkpoint are taken again with the same samples. Raises ReplicaError, on every rank, where there is
    no checkpoint, and after train.max_incidents rollbacks to the same one.
    """

    def __init__(self, section: TrainSection) -> None:
        self._every = section.replica_check
        self._rollbacks = _Rollbacks(section.max_incidents)
        self._weights: torch.Tensor | None = None
        self._checked_step = 0
        self._replicas: Replicas | None = None

    @override
    def on_run_begin(self, run: TrainingRun) -> None:
        self._replicas = Replicas(run.engine)

    @override
    def on_step_begin(self, run: TrainingRun) -> None:
        self._weights = None

    @override
    def on_before_update(self, run: TrainingRun) -> None:
        if self._is_due(run):
            self._weights = self._replicas_of(run).weights()

    @override
    def on_after_update(self, run: TrainingRun, result: StepResult) -> Literal[Action.RETRY] | None:
        if self._weights is None:
            return None
        difference = self._replicas_of(run).compare(self._weights)
        self._checked_step = run.step + 1
        if difference is None:
            return None
        self._rollbacks.roll_back(run, str(difference))
        return Action.RETRY

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        if not run.is_stopping or self._checked_step == run.step:
            return
        replicas = self._replicas_of(run)
        difference = replicas.compare(replicas.weights())
        if difference is not None:
            place = f"stopped after step {run.step} of {run.recipe.train.steps} without a checkpoint of it"
            raise PreemptedError(f"{place}, because {difference}; {run.describe_saved()}.")

    def _replicas_of(self, run: TrainingRun) -> Replicas:
        if self._replicas is None:
            self._replicas = Replicas(run.engine)
        return self._replicas

    def _is_due(self, run: TrainingRun) -> bool:
        return _is_due(run, self._every)


class RepeatCheck(Callback):
    """train.repeat_check of a recipe: replicas compute the same micro-batch, and the run rolls back where they differ.

    Raises RunError where a rank computes something else when it repeats a micro-batch, and as ReplicaCheck does.
    """

    def __init__(self, section: TrainSection) -> None:
        self._every = section.repeat_check
        self._rollbacks = _Rollbacks(section.max_incidents)
        self._gradients: RepeatedGradients | None = None

    @override
    def on_after_update(self, run: TrainingRun, result: StepResult) -> Literal[Action.RETRY] | None:
        if run.job.layout.dp == 1 or not _is_due(run, self._every):
            return None
        # Each replica's samples in turn: which ones a wrong kernel spoils is not known.
        turn = (run.step // self._every) % run.job.layout.dp
        micro_batch = run.loader.first_micro_batch(run.step + run.skipped_batches, turn)
        if self._gradients is None:
            self._gradients = RepeatedGradients(run.engine)
            self._check_repeatable(run, micro_batch)
        difference = self._gradients.compare(self._gradients.compute(micro_batch))
        if difference is None:
            return None
        self._rollbacks.roll_back(run, f"{difference} when all replicas compute the same micro-batch")
        return Action.RETRY

    def _check_repeatable(self, run: TrainingRun, micro_batch: MicroBatch) -> None:
        """Raise RunError, the same on every rank, where ranks do not compute the same bits twice. A collective call."""
        assert self._gradients is not None
        first, second = (self._gradients.compute(micro_batch) for _ in range(2))
        differing = (first != second).any().to(torch.int64).reshape(1)
        dist.all_reduce(differing)
        if int(differing) == dist.get_world_size():
            reason = (
                "the kernels of these ranks do not compute the same gradient twice, so that a difference means nothing"
            )
            advice = "call torch.use_deterministic_algorithms(True), or choose model.attn_implementation=eager"
            raise RunError.of("train.repeat_check", self._every, reason, ("train.repeat_check", 0), advice)


def _is_due(run: TrainingRun, every: int) -> bool:
    """Whether a check is due in the present step: one of `every`, before a checkpoint, and at the end of a run."""
    step = run.step + 1
    section = run.recipe.checkpoint
    is_saved = any(period and step % period == 0 for period in (section.every, section.memory_every))
    is_last = bool(section.every) and step == run.recipe.train.steps
    return step % every == 0 or is_saved or is_last


class _Rollbacks:
    """Rollbacks to the newest checkpoint, at most `most` to the same one. The steps since are taken again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._target: int | None = None
        self._count = 0

    def roll_back(self, run: TrainingRun, reason: str) -> None:
        """Roll a run back. Raises ReplicaError where there is no checkpoint, or where that was done too often."""
        earlier = None
        if run.checkpointer is not None and run.directory is not None:
            run.checkpointer.finish()
            earlier = newest_checkpoint(run.directory.checkpoints)
        step = run.step + 1
        if earlier is None or earlier.state.step > run.step:
            raise ReplicaError(f"step {step}: {reason}, and there is no checkpoint to roll back to. {_REMEDY}")
        if earlier.state.step != self._target:
            self._target = earlier.state.step
            self._count = 0
        self._count += 1
        if self._count > self._most:
            again = f"again after {self._most} rollbacks to step {self._target}"
            raise ReplicaError(f"step {step}: {reason}, {again}. {_REMEDY}")
        run.roll_back(earlier, reason, skips_batches=False)
