"""Checkpointer: what a training run puts into a checkpoint, and how it goes on from one in any layout."""

import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from toolkit.batch import Batch
from toolkit.checkpoint.async_saver import AsyncSaver
from toolkit.checkpoint.held_tensors import HeldTensors
from toolkit.checkpoint.names import MODEL
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.retention import Keep
from toolkit.checkpoint.save import Saved, save
from toolkit.errors import CheckpointError
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.train.data.tokens import TokenCorpus
from toolkit.train.engines.base import Engine
from toolkit.train.engines.states import MASTER
from toolkit.train.environment import describe_environment
from toolkit.train.held import held_tensors
from toolkit.train.trainer_state import TrainerState
from toolkit.train.watchdog.marked_source import MarkedSource


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Saves a run, and restores its engine. Every method is a collective call."""

    recipe: Recipe
    layout: Layout
    batch: Batch
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    corpus: TokenCorpus
    _saver: AsyncSaver = field(default_factory=AsyncSaver, init=False)

    def save(self, run_dir: Path, step: int, *, tokens: int, learning_rate: float, left_out: int = 0) -> Saved:
        """Write `run_dir/step-…` after `step` steps, in which `tokens` targets were trained on.

        `left_out`: global batches that rollbacks left out before.

        One that is still on its way is waited for. Raises CheckpointError on every rank alike; older checkpoints stay
        as they are.
        """
        self.finish()
        self.engine.mark("checkpoint")
        return save(run_dir, step, **self._contents(step, tokens, learning_rate, left_out))

    def begin(self, run_dir: Path, step: int, *, tokens: int, learning_rate: float, left_out: int = 0) -> None:
        """The same from a snapshot in host memory, while training goes on; `poll` or `finish` completes it."""
        self.engine.mark("checkpoint")
        self._saver.begin(run_dir, step, **self._contents(step, tokens, learning_rate, left_out))

    def poll(self) -> Saved | None:
        """The checkpoint that has begun, once all ranks have written it. At a step boundary."""
        return self._saver.poll()

    def finish(self) -> Saved | None:
        """Wait for the checkpoint that has begun, if there is one."""
        self.engine.mark("checkpoint")
        return self._saver.finish()

    def _contents(self, step: int, tokens: int, learning_rate: float, left_out: int) -> dict[str, Any]:
        section = self.recipe.checkpoint
        return {
            "groups": MarkedSource(self._tensors, self.engine.mark),
            "trainer_state": self._state(step, tokens, learning_rate, left_out).to_dict(),
            "beside": self._beside,
            "keep": Keep(newest=section.keep, every=section.keep_every or None),
        }

    def restore(self, saved: CheckpointReader, state: TrainerState) -> None:
        """Give the engine the weights, the optimizer's states and its counts. Every rank reads what it holds."""
        engine = self.engine
        missing = sorted(set(engine.states.kinds) - set(state.states))
        if missing:
            raise CheckpointError(
                f"{saved.path}: it has no {', '.join(missing)}, which optimizer.name={self.recipe.optimizer.name} "
                "needs. Take the optimizer that it was trained with, or begin anew with its weights."
            )
        engine.load_states(MASTER, lambda name: saved.tensor(MODEL, name))
        for kind in engine.states.kinds:
            engine.load_states(kind, lambda name, kind=kind: saved.tensor(kind, name))  # type: ignore[misc]
        for name, buffer in engine.local_buffers():
            if saved.has(MODEL, name):
                buffer.copy_(saved.tensor(MODEL, name).clone())
        engine.states.updates = state.updates
        engine.load_loss_scale(state.loss_scale)

    @cached_property
    def _tensors(self) -> HeldTensors:
        return held_tensors(self.engine)

    @cached_property
    def _versions(self) -> dict[str, str]:
        return describe_environment(self.engine.device)

    def _beside(self, folder: Path) -> None:
        model = self.engine.model
        config = copy.deepcopy(model.config)
        config.dtype = torch.float32  # of the weights that are saved
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _state(self, step: int, tokens: int, learning_rate: float, left_out: int) -> TrainerState:
        recipe = self.recipe
        return TrainerState(
            step=step,
            samples=step * self.batch.global_size,
            tokens=tokens,
            left_out=left_out,
            updates=self.engine.states.updates,
            learning_rate=learning_rate,
            loss_scale=self.engine.loss_scale(),
            layout=recipe.strategy(self.layout),
            micro_size=self.batch.micro_size,
            accumulation=self.batch.accumulation,
            precision=recipe.precision,
            engine=recipe.train.engine,
            seed=recipe.train.seed,
            states=list(self.engine.states.kinds),
            contents=self.corpus.contents,
            versions=self._versions,
            recipe=recipe.model_dump(mode="json"),
        )
