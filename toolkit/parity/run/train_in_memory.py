"""A parity run: train a recipe on the ranks that are here, in memory, and record what a comparison looks at.

Recording changes nothing of what is computed. Each rank sees its own part; what all of them saw meets on rank 0.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from typing_extensions import override

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.fingerprint import merge_fingerprints
from toolkit.data.samples.preference_samples import PreferenceSamples
from toolkit.engines.base import Engine
from toolkit.engines.factory import create_engine
from toolkit.engines.reference_engine import ReferenceEngine
from toolkit.launch.rank_environment import RankEnvironment
from toolkit.parity import LossCurve, ParityRun, SavedTensors, Tensors
from toolkit.parity.first_batch import FirstBatch
from toolkit.parity.masks import mask_faults
from toolkit.parity.run import observe
from toolkit.parity.run.attention_probe import attention_fault
from toolkit.parity.run.dropout_masks import DropoutMasks
from toolkit.parity.run.forward_facts import ForwardFacts
from toolkit.parity.run.mean_outputs import MeanOutputs
from toolkit.parity.run.observe_objective import ObjectiveObserver
from toolkit.parity.run.observe_samples import observe_samples
from toolkit.parity.run.rounding import flip_undecided_signs, round_differently, round_moments_differently
from toolkit.parity.sequence_facts import SequenceFacts
from toolkit.parity.signs import Directions
from toolkit.step_metrics import StepMetrics
from toolkit.training.callback import Callback
from toolkit.training.loop import TrainingRun
from toolkit.training.train import EngineFactory, train

_STEPS_OF_MASKS = 2
"""Number of first steps whose dropout masks are compared: the same masks in two steps would be a mistake too."""


def train_in_memory(
    recipe: Recipe,
    inspect: Callable[[Engine], Any] | None = None,
    *,
    engine_factory: EngineFactory = create_engine,
    rounding_seed: int | None = None,
    folder: Path | None = None,
) -> ParityRun:
    """Train `recipe` on the ranks of this launch, with the loop that every run has.

    `engine_factory` builds the engine in place of the toolkit's own; the other arguments are those of ParityRecorder.
    """
    recorder = ParityRecorder(rounding_seed=rounding_seed, folder=folder, inspect=inspect)
    job = Job.of(recipe, RankEnvironment.detect().world_size)
    train(job, [recorder], in_memory=True, engine_factory=engine_factory)
    return recorder.result


class ParityRecorder(Callback):
    """Records the run; `result` has it at the end.

    With `rounding_seed`, every module rounds differently (toolkit/parity/run/rounding.py). Tensors are kept in memory,
    or in `folder`, from where they are read one at a time. `inspect` may look at the engine after the last step.
    """

    result: ParityRun

    def __init__(
        self,
        *,
        rounding_seed: int | None = None,
        folder: Path | None = None,
        inspect: Callable[[Engine], Any] | None = None,
    ) -> None:
        self._rounding_seed = rounding_seed
        self._folder = folder
        self._inspect = inspect
        self._tensors: dict[str, Tensors] = {}
        self._rates: list[float] = []
        self._micro_losses: tuple[tuple[float, int], ...] = ()
        self._first_batch = FirstBatch()
        self._layer_outputs: dict[str, float] = {}
        self._momentum: dict[str, Tensors] = {}
        self._directions: Tensors = {}
        self._mean_outputs: list[Tensors] = []
        self._dtypes: frozenset[str] = frozenset()
        self._positions: tuple[float, ...] = ()
        self._attention_fault = ""
        self._mask_faults: tuple[str, ...] = ()
        self._masks_compared = 0
        self._sequences: dict[int, SequenceFacts] = {}

    @override
    def on_run_begin(self, run: TrainingRun) -> None:
        engine = run.engine
        observe.lower_loss_scale(engine)
        self._tensors["initial"] = self._keep("initial", engine.full_parameters())
        self._diverged_at_start, _ = observe.compare_replicas(observe.gather_on_rank_0(observe.replica_hashes(engine)))
        self._attention_fault = attention_fault(engine)
        if isinstance(engine, ReferenceEngine):
            self._micro_losses, self._first_batch = observe_samples(engine, run.loader)
        if self._rounding_seed is not None:
            round_differently(engine.model, precision=run.recipe.precision, seed=self._rounding_seed)
            if _takes_signs(run.recipe) and run.recipe.precision == "fp32":
                flip_undecided_signs(engine.states.base, seed=self._rounding_seed)
            if run.recipe.optimizer.name == "adamw8bit":
                round_moments_differently(engine.states.base, seed=self._rounding_seed)
        self._outputs = observe.LayerOutputs(engine)
        self._facts = ForwardFacts(engine)
        self._means = MeanOutputs(engine)
        self._means.start()
        self._masks = DropoutMasks.of(engine)
        if self._masks is not None:
            self._masks.start()
        steps = range(run.recipe.train.steps)
        self._update_step = next((step for step in steps if run.learning_rate(step) > 0), 0)
        self._objective = ObjectiveObserver(engine)

    @override
    def on_step_begin(self, run: TrainingRun) -> None:
        if run.step in (0, self._update_step + 1):
            self._objective.start()
        # Before the first step the momentum is zero.
        if _takes_signs(run.recipe) and run.step == self._update_step > 0:
            self._momentum = {"exp_avg": self._keep("momentum", run.engine.full_states("exp_avg"))}

    @override
    def on_before_update(self, run: TrainingRun) -> None:
        self._rates.append(observe.learning_rate_of(run.engine))
        if run.step in (0, self._update_step + 1):
            self._sequences[run.step] = self._objective.stop()
        if "gradients" not in self._tensors:
            self._tensors["gradients"] = self._keep("gradients", run.engine.full_gradients())
        elif run.step == self._update_step:
            self._tensors["update gradients"] = self._keep("update-gradients", run.engine.full_gradients())

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        if run.step == 1:
            self._layer_outputs = self._outputs.read()
            self._dtypes, self._positions = self._facts.read()
            self._mean_outputs.append(self._means.stop())
        if self._masks is not None and run.step <= _STEPS_OF_MASKS:
            self._masks.step = run.step + 1
            if run.step == min(_STEPS_OF_MASKS, run.recipe.train.steps):
                self._compare_masks(self._masks)
        if run.step == self._update_step + 2:
            self._mean_outputs.append(self._means.stop())
            self._means.close()
        if run.step == self._update_step + 1:
            values = run.engine.full_parameters()
            self._tensors["updates"] = self._keep("updates", values, since=self._tensors["initial"])
            gradients = self._tensors.get("update gradients", self._tensors.get("gradients", {}))
            self._directions = directions_of(run.recipe, gradients, self._momentum, metrics.grad_norm)
            self._means.start()

    @override
    def on_run_end(self, run: TrainingRun) -> None:
        self._means.close()  # a run of one step ends before its second look
        if not run.is_complete:
            return
        engine = run.engine
        diverged, compared = observe.compare_replicas(observe.gather_on_rank_0(observe.replica_hashes(engine)))
        curve = [(metrics.loss, metrics.grad_norm) for metrics in run.history]
        samples = run.loader.train
        self.result = ParityRun(
            curve=LossCurve.from_steps(run.job.strategy, curve),
            parameters=self._keep("parameters", engine.full_parameters()),
            initial=self._tensors["initial"],
            first_gradients=self._tensors.get("gradients", {}),
            first_updates=self._tensors["updates"],
            first_directions=self._directions,
            update_gradients=self._tensors.get("update gradients", {}),
            update_step=self._update_step + 1,
            outputs=self._layer_outputs,
            mean_outputs=tuple(self._mean_outputs),
            dtypes=self._dtypes,
            positions=self._positions,
            batches=merge_fingerprints(run.loader, observe.gather_on_rank_0(run.fingerprints.local_sums)),
            learning_rates=tuple(self._rates),
            micro_losses=self._micro_losses,
            first_batch=self._first_batch,
            sequences=self._sequences.get(0, SequenceFacts()),
            later_sequences=self._sequences.get(self._update_step + 1, SequenceFacts()),
            references=samples.reference if isinstance(samples, PreferenceSamples) else None,
            micro_batch_size=run.job.batch.micro_batch_size,
            replicas=run.job.batch.dp,
            attention_fault=self._attention_fault,
            mask_faults=self._mask_faults,
            masks_compared=self._masks_compared,
            diverged_at_start=self._diverged_at_start,
            diverged=diverged,
            replicas_compared=compared,
            eval_loss=run.history[-1].eval_loss,
            inspected=None if self._inspect is None else self._inspect(engine),
        )

    def _compare_masks(self, masks: DropoutMasks) -> None:
        masks.stop()
        every = [mask for rank in observe.gather_on_rank_0(masks.masks) for mask in rank]
        self._mask_faults = mask_faults(every)
        self._masks_compared = len(every)

    def _keep(self, kind: str, tensors: Iterator[tuple[str, torch.Tensor]], *, since: Tensors | None = None) -> Tensors:
        return keep(tensors, None if self._folder is None else self._folder / kind, since=since)


def directions_of(recipe: Recipe, gradient: Tensors, state: Mapping[str, Tensors], grad_norm: float) -> Tensors:
    """Return what an update takes the signs of, given the states before it; nothing if the optimizer takes none."""
    if not _takes_signs(recipe):
        return {}
    return Directions.of_step(
        gradient,
        state.get("exp_avg", {}),
        beta=recipe.optimizer.betas[0],
        grad_norm=grad_norm,
        grad_clip=recipe.train.grad_clip,
    )


def _takes_signs(recipe: Recipe) -> bool:
    return recipe.optimizer.name == "lion"


def keep(
    tensors: Iterator[tuple[str, torch.Tensor]], folder: Path | None = None, *, since: Tensors | None = None
) -> Tensors:
    """Keep whole tensors on rank 0 in fp32, or how they differ from `since`, one at a time. A collective call."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    saved = SavedTensors(folder) if folder is not None and is_first else None
    in_memory: dict[str, NDArray[np.floating]] = {}
    for name, tensor in tensors:
        if not is_first:
            continue  # this rank took part in gathering it
        value: NDArray[np.floating] = tensor.detach().float().cpu().numpy().copy()
        if since is not None:
            value -= since[name]
        if saved is None:
            in_memory[name] = value
        else:
            saved.add(name, value)
    return in_memory if saved is None else saved
