"""Callbacks that write what a run leaves: RunRecorder its files, PeriodicCheckpoints its checkpoints."""

import json
import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from toolkit.checkpoint.save import SavedCheckpoint
from toolkit.engines.compiled_layers import CompiledLayers
from toolkit.report.recorded_run import read_metrics
from toolkit.step_metrics import StepMetrics
from toolkit.training.callback import Callback, Rollback
from toolkit.training.checkpointing import Checkpointer
from toolkit.training.loop import TrainingRun
from toolkit.training.run_directory import COMPILE, CURVE, RunDirectory


class RunRecorder(Callback):
    """Opens the run directory, writes metrics.jsonl, and at the end the trained model and loss.png."""

    def __init__(
        self, directory: RunDirectory, ds_config: Mapping[str, Any] | None, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._directory = directory
        self._ds_config = ds_config
        self._tokenizer = tokenizer
        self._graphs: dict[str, Any] | None = None

    @override
    def on_run_begin(self, run: TrainingRun) -> None:
        resumed = None if run.resumed is None else run.resumed.saved.path
        self._directory.open(run.recipe, self._ds_config, run.engine.device, resumed_step=run.step, resumed=resumed)
        if run.recipe.model.lora is not None and run.recipe.model.init == "random":
            self._directory.save_base(run.engine, self._tokenizer)

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        if self._directory.metrics is not None:
            self._directory.check_lock(quickly=True)
            self._directory.metrics.write(metrics)
        if run.engine.compiled is not None and self._directory.is_writer:
            self._record_graphs(run, run.engine.compiled)

    @override
    def on_rollback(self, run: TrainingRun, rollback: Rollback) -> None:
        self._directory.go_back_to(rollback)

    @override
    def on_run_end(self, run: TrainingRun) -> None:
        if run.is_complete:
            run.engine.report_phase("finish")
            self._directory.save_model("model", run.engine, run.recipe, self._tokenizer)
            if self._directory.is_writer:
                self._plot(run)
        self._directory.close()

    def _record_graphs(self, run: TrainingRun, compiled: CompiledLayers) -> None:
        """Say and write what was compiled, after the first step and whenever it changes: at a validation, or later."""
        facts = compiled.facts()
        if facts != self._graphs:
            self._graphs = facts
            run.progress.say(f"compiled: {compiled}")
            (self._directory.path / COMPILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def _plot(self, run: TrainingRun) -> None:
        steps = read_metrics(self._directory.path / "metrics.jsonl").steps
        from toolkit.report.images import plot_loss  # Matplotlib, which a run needs only at its end

        validated = [(step.step, step.eval_loss) for step in steps if step.eval_loss is not None]
        plot_loss(
            self._directory.path / CURVE,
            [step.loss for step in steps],
            title=f"{run.recipe.model.name_or_path}, {run.job.strategy}",
            held_out=[(step, loss) for step, loss in validated if math.isfinite(loss)],
            unigram_entropy=run.unigram_entropy,
            entropy_rate=run.corpus.loss_floor(run.recipe.data),
        )


class PeriodicCheckpoints(Callback):
    """checkpoint.every and checkpoint.asynchronous of a recipe, and a checkpoint where the run is asked to stop."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        section = run.recipe.checkpoint
        _tell(run, self._checkpointer.poll())
        if run.is_stopping:
            run.save_checkpoint()
        elif section.every and (run.step % section.every == 0 or run.step == run.recipe.train.steps):
            run.save_checkpoint(wait=not section.asynchronous)

    @override
    def on_run_end(self, run: TrainingRun) -> None:
        _tell(run, self._checkpointer.finish())


def _tell(run: TrainingRun, saved: SavedCheckpoint | None) -> None:
    if saved is not None:
        run.checkpoint_is_complete(saved.path)
