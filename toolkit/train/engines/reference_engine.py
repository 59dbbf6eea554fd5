"""The oracle: one process, plain PyTorch, fp32, no DeepSpeed. Every strategy is held against this file.

It shares nothing with the other engines but the model, the loss function and the parameter groups.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel

from toolkit.errors import NonFiniteError
from toolkit.recipe import Recipe
from toolkit.train.dropout import DropoutStream
from toolkit.train.engines.base import MicroBatch, StepResult, WholeModelEngine, refuse_gradient
from toolkit.train.engines.states import PlainStates, state_kinds
from toolkit.train.gradient_norm import clip
from toolkit.train.loss import token_loss_sum
from toolkit.train.optimizer import parameter_groups, torch_optimizer


class ReferenceEngine(WholeModelEngine):
    """Forward, backward, clip, step."""

    def __init__(self, recipe: Recipe, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model.to(device).train()
        self.device = device
        self.dropout = DropoutStream(model, device)
        self.optimizer = torch_optimizer(recipe.optimizer, parameter_groups(model, recipe.optimizer.weight_decay))
        self.states = PlainStates(self.optimizer, state_kinds(recipe.optimizer.name, recipe.optimizer.momentum))
        self.grad_clip = recipe.train.grad_clip

    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """See Engine.train_step."""
        loss_sum = 0.0
        for micro_batch in micro_batches:
            batch = micro_batch.to(self.device)
            self.dropout.start(batch.dropout_seed)
            micro_loss = token_loss_sum(self._logits(batch), batch.labels)
            self.mark("backward")
            (micro_loss / target_tokens).backward()  # type: ignore[no-untyped-call]
            loss_sum += micro_loss.item()
        self.mark("update")
        loss = loss_sum / target_tokens
        if not math.isfinite(loss):
            self.optimizer.zero_grad()
            raise NonFiniteError(f"the loss is {loss} on rank 0")

        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.before_update()
        norm = clip(self.model.parameters(), self.grad_clip)
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise refuse_gradient(norm)

        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(loss=loss, grad_norm=norm)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_parameters."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        logits: torch.Tensor = self.model(**batch.inputs(), use_cache=False).logits
        return logits
