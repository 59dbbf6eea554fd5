"""Checkpointer: what a training run puts into a checkpoint, and how it resumes from one in any layout."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from toolkit.checkpoint.commit import Retention
from toolkit.checkpoint.names import MODEL, reported
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.save import AsyncSaver, CheckpointContents, SavedCheckpoint, save
from toolkit.checkpoint.tensor_source import ShardedTensorSource
from toolkit.checkpoint.trainer_state import TrainerState
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.tokens.corpora import Corpora
from toolkit.engines.base import Engine
from toolkit.engines.local_tensors import local_tensors
from toolkit.engines.optimizer_states import MASTER
from toolkit.errors import CheckpointError
from toolkit.files import MAX_LOG_BYTES, expanded, read_regular
from toolkit.launch.environment import describe_environment
from toolkit.parallel.adapter_names import ADAPTER
from toolkit.remote_files import RemotePath

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
BASE = "base"
"""The directory in a run for the weights beside LoRA's adapters, where there are no published ones."""


def save_small_files(folder: Path, *parts: Any) -> None:
    """Write what transformers reads beside the weights: config, generation config, tokenizer, each unless None."""
    for part in parts:
        if part is not None:
            part.save_pretrained(folder)


def adapter_config(engine: Engine, recipe: Recipe, run_dir: Path) -> Any:
    """The config that peft reads beside the engine's adapters, and the model that it names; None without adapters."""
    if recipe.model.lora is None:
        return None
    config = copy.deepcopy(engine.model.peft_config[ADAPTER])
    base = expanded(recipe.model.name_or_path)
    if recipe.model.init == "random":
        base = run_dir / BASE
    config.base_model_name_or_path = str(base.absolute()) if base.is_dir() else recipe.model.name_or_path
    config.inference_mode = True  # as peft saves it
    return config


def copy_records(source: Path, folder: Path) -> None:
    """Copy what a run recorded so far, for a host that has none of it."""
    for name in (METRICS, EVENTS):
        if (source / name).exists():
            (folder / name).write_bytes(read_regular(source / name, max_bytes=MAX_LOG_BYTES))


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Saves a run, and restores its engine. Every method is a collective call."""

    job: Job
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    corpus: Corpora
    check_lock: Callable[[], None] = lambda: None
    """Check of the run directory's lock, as in CheckpointContents."""
    url: RemotePath | None = None
    """The place of the checkpoints, where that is not the run directory."""
    staging: Path | None = None
    """The directory in which ranks stage what they upload, where that is not the run directory."""
    keep: Retention | None = None
    """Older checkpoints that are kept; None keeps all."""
    _saver: AsyncSaver = field(default_factory=AsyncSaver, init=False)

    def save(
        self,
        run_dir: Path,
        step: int,
        *,
        tokens: int,
        learning_rate: float,
        skipped_batches: int = 0,
        wait: bool = True,
    ) -> SavedCheckpoint | None:
        """Write `step-…` after `step` steps, in which `tokens` target tokens were trained on.

        It goes to `url`, or where there is none to `run_dir`.
        `skipped_batches`: global batches that rollbacks have passed over. With `wait` false it is written from a
        snapshot in host memory while training continues, and `poll` or `finish` returns it. Raises CheckpointError, the
        same on every rank; older checkpoints stay as they are.
        """
        if wait:
            self.finish()
        self.engine.report_phase("checkpoint")
        contents = self._contents(run_dir, step, tokens, learning_rate, skipped_batches)
        directory = self.staging or run_dir
        return save(directory, step, contents) if wait else self._saver.begin(directory, step, contents)

    def poll(self) -> SavedCheckpoint | None:
        """The checkpoint that was begun, once all ranks have written it. Call it at a step boundary."""
        return self._saver.poll()

    def finish(self) -> SavedCheckpoint | None:
        """Wait for the checkpoint that was begun, if there is one."""
        self.engine.report_phase("checkpoint")
        return self._saver.finish()

    def _contents(
        self, run_dir: Path, step: int, tokens: int, learning_rate: float, skipped_batches: int
    ) -> CheckpointContents:
        return CheckpointContents(
            tensors=self._tensors,
            trainer_state=self._state(step, tokens, learning_rate, skipped_batches).to_dict(),
            write_model_files=lambda folder: self._write_model_files(folder, run_dir),
            url=self.url,
            retention=self.keep,
            progress=lambda: self.engine.report_phase("checkpoint"),
            check_lock=self.check_lock,
        )

    def restore(self, saved: CheckpointReader, state: TrainerState) -> None:
        """Load weights, optimizer states and counts into the engine. Every rank reads its own shards."""
        with reported(saved.path):
            self._restore(saved, state)

    def _restore(self, saved: CheckpointReader, state: TrainerState) -> None:
        engine = self.engine
        missing = sorted(set(engine.states.kinds) - set(state.states))
        if missing:
            reason = f"{saved.path} has no {', '.join(missing)}, which this optimizer needs"
            advice = "use the optimizer that it was trained with", "start a new run from its weights"
            raise CheckpointError.of("optimizer.name", self.job.recipe.optimizer.name, reason, *advice)
        engine.load_states(MASTER, lambda name: saved.tensor(MODEL, name))
        for kind in engine.states.kinds:
            engine.load_states(kind, lambda name, kind=kind: saved.tensor(kind, name))  # type: ignore[misc]
        for name, buffer in engine.local_buffers():
            if saved.has(MODEL, name):
                buffer.copy_(saved.tensor(MODEL, name).clone())
        engine.states.updates = state.updates
        engine.load_loss_scale(state.loss_scale)
        if engine.objective is not None:
            engine.objective.load_state(state.objective)

    @cached_property
    def _tensors(self) -> ShardedTensorSource:
        return local_tensors(self.engine)

    @cached_property
    def _versions(self) -> dict[str, str]:
        return describe_environment(self.engine.device)

    def _write_model_files(self, folder: Path, run_dir: Path) -> None:
        if self.url is not None:
            copy_records(run_dir, folder)
        model = self.engine.model
        adapters = adapter_config(self.engine, self.job.recipe, run_dir)
        if adapters is not None:
            save_small_files(folder, adapters, self.tokenizer)
            return
        config = copy.deepcopy(model.config)
        config.dtype = torch.float32  # of the weights that are saved
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        save_small_files(folder, config, model.generation_config, self.tokenizer)

    def _state(self, step: int, tokens: int, learning_rate: float, skipped_batches: int) -> TrainerState:
        recipe = self.job.recipe
        batch = self.job.batch
        return TrainerState(
            step=step,
            samples=step * batch.global_batch_size,
            tokens=tokens,
            skipped_batches=skipped_batches,
            updates=self.engine.states.updates,
            learning_rate=learning_rate,
            loss_scale=self.engine.loss_scale(),
            layout=self.job.strategy,
            micro_batch_size=batch.micro_batch_size,
            accumulation=batch.accumulation,
            precision=recipe.precision,
            engine=recipe.train.engine,
            seed=recipe.train.seed,
            states=list(self.engine.states.kinds),
            contents=self.corpus.contents,
            versions=self._versions,
            recipe=recipe.model_dump(mode="json"),
            objective={} if self.engine.objective is None else self.engine.objective.state(),
        )
