"""Checkpoints as the Trainer writes them under DeepSpeed's ZeRO-3, the states of its live engine, and its losses."""

import os
from functools import partial
from typing import Any
from unittest.mock import patch

from plain_deepspeed import Truth, engine_states
from trainer_runs import train_with_trainer
from transformers import Trainer, TrainerCallback, TrainingArguments

from toolkit.config.recipe import Recipe

ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class StatesWhenSaved(TrainerCallback):
    """Keep what the live engine holds as a step is saved: masters and moments, each whole."""

    def __init__(self, trainer: Trainer, saved_step: int, states: Truth) -> None:
        self._trainer = trainer
        self._saved_step = saved_step
        self._states = states

    def on_save(self, arguments: Any, state: Any, control: Any, **options: Any) -> None:
        """Read all parameters: a collective call."""
        if state.global_step != self._saved_step:
            return
        engine = self._trainer.model_wrapped
        assert engine.zero_optimization_stage() == 3
        self._states.update(engine_states(engine, 3))


def train_with_zero3(folder: str, recipe: Recipe, saved_step: int) -> tuple[list[float], Truth]:
    """Train on CPU ranks; return the losses of all steps and the states at `saved_step`. A collective call."""
    import deepspeed
    from accelerate import PartialState

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=False, backend="gloo")
    states: Truth = {}

    class Zero3Trainer(Trainer):
        def __init__(self, model: Any, **options: Any) -> None:
            for parameter in model.parameters():
                parameter.data = parameter.data.contiguous()
            super().__init__(model=model, **options)
            self.add_callback(StatesWhenSaved(self, saved_step, states))

    settings = {"deepspeed": ZERO3, "accelerator_config": {"use_configured_state": True}}
    with (
        patch("transformers.Trainer", Zero3Trainer),
        patch("transformers.TrainingArguments", partial(TrainingArguments, **settings)),
    ):
        losses = train_with_trainer(folder, recipe, 0, saved_step)
    return losses, states
