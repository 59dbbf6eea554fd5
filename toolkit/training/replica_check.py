"""ReplicaCheck: find silent data corruption, a bit that changed in one replica and not in the others.

Weights are compared as the gradients were computed with them, before the update: under ZeRO-1 and 2 an update replaces
them by those of the optimizer's shards. Optimizer states are compared after it. A checkpoint of a step is saved after
its check, so that a rollback leads to states that were the same everywhere.
"""

from typing import Literal

import torch
from typing_extensions import override

from toolkit.config.recipe import TrainSection
from toolkit.engines.base import StepResult
from toolkit.engines.replicas import Difference, Replicas
from toolkit.errors import PreemptedError, ReplicaError
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
        self._most = section.max_incidents
        self._target: int | None = None
        self._rollbacks = 0
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
        self._roll_back(run, difference)
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
        step = run.step + 1
        section = run.recipe.checkpoint
        is_saved = any(every and step % every == 0 for every in (section.every, section.memory_every))
        is_last = bool(section.every) and step == run.recipe.train.steps
        return step % self._every == 0 or is_saved or is_last

    def _roll_back(self, run: TrainingRun, difference: Difference) -> None:
        earlier = None
        if run.checkpointer is not None and run.directory is not None:
            run.checkpointer.finish()
            earlier = newest_checkpoint(run.directory.checkpoints)
        step = run.step + 1
        if earlier is None or earlier.state.step > run.step:
            raise ReplicaError(f"step {step}: {difference}, and there is no checkpoint to roll back to. {_REMEDY}")
        if earlier.state.step != self._target:
            self._target = earlier.state.step
            self._rollbacks = 0
        self._rollbacks += 1
        if self._rollbacks > self._most:
            again = f"again after {self._most} rollbacks to step {self._target}"
            raise ReplicaError(f"step {step}: {difference}, {again}. {_REMEDY}")
        run.roll_back(earlier, str(difference), skips_batches=False)
