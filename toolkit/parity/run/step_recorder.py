"""StepRecorder: record single steps of a run, or take recorded steps again from the states that they began with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from typing_extensions import override

from toolkit.engines.base import StepResult
from toolkit.engines.optimizer_states import MASTER
from toolkit.parity import Tensors
from toolkit.parity.replay import StepRecord
from toolkit.parity.run import observe
from toolkit.parity.run.rounding import round_differently, round_moments_differently
from toolkit.parity.run.train_in_memory import directions_of, keep
from toolkit.training.callback import Action, Callback
from toolkit.training.loop import TrainingRun


class StepRecorder(Callback):
    """Records `steps` of a run, with tensors in `folder`; with `origins`, takes these again from their states."""

    def __init__(
        self, folder: Path, *, steps: Sequence[int] = (), origins: Sequence[StepRecord] = (), seed: int | None = None
    ) -> None:
        self.records: list[StepRecord] = []
        self._folder = folder
        self._seed = seed
        self._origins = {record.step: record for record in origins}
        self._steps = tuple(self._origins) or tuple(steps)
        self._state: Mapping[str, Tensors] = {}
        self._gradient: Tensors = {}

    @override
    def on_run_begin(self, run: TrainingRun) -> None:
        observe.lower_loss_scale(run.engine)
        if self._seed is not None:
            round_differently(run.engine.model, precision=run.recipe.precision, seed=self._seed)
            if run.recipe.optimizer.name == "adamw8bit":
                round_moments_differently(run.engine.states.base, seed=self._seed)
        if self._origins:
            run.step = self._steps[0]

    @override
    def on_step_begin(self, run: TrainingRun) -> None:
        engine = run.engine
        origin = self._origins.get(run.step)
        if origin is not None:
            self._state = origin.state
            for kind, tensors in origin.state.items():
                engine.load_states(kind, lambda name, values=tensors: torch.from_numpy(np.array(values[name])))  # type: ignore[misc]
            engine.states.updates = origin.updates
            engine.load_loss_scale(origin.loss_scale)
        elif run.step in self._steps:
            self._state = self._keep_states(run, "before", (MASTER, *engine.states.kinds))
        self._updates = engine.states.updates
        self._loss_scale = engine.loss_scale()

    @override
    def on_before_update(self, run: TrainingRun) -> None:
        if run.step in self._steps:
            self._gradient = keep(run.engine.full_gradients(), self._folder / f"{run.step}-gradient")

    @override
    def on_after_update(self, run: TrainingRun, result: StepResult) -> Literal[Action.RETRY] | None:
        if run.step not in self._steps:
            return None
        weights = run.engine.full_states(MASTER)
        folder = self._folder / f"{run.step}-update"
        tensors = {"gradient": self._gradient, "update": keep(weights, folder, since=self._state.get(MASTER))}
        self.records.append(
            StepRecord(
                step=run.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                tensors=tensors | self._keep_states(run, "after", run.engine.states.kinds),
                state=self._state,
                updates=self._updates,
                loss_scale=self._loss_scale,
                directions=directions_of(run.recipe, self._gradient, self._state, result.grad_norm),
            )
        )
        if not self._origins:
            return None
        run.step = next(iter(self._steps[len(self.records) :]), run.recipe.train.steps)
        return Action.RETRY

    def _keep_states(self, run: TrainingRun, when: str, kinds: Sequence[str]) -> dict[str, Tensors]:
        place = f"{self._folder}/{run.step}-{when}"
        return {kind: keep(run.engine.full_states(kind), Path(f"{place}-{kind}")) for kind in kinds}
