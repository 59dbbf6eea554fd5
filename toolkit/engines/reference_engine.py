"""The reference: one process, plain PyTorch, fp32, no DeepSpeed. Every strategy is compared with this file.

It shares only the model, the loss function and the parameter groups with the other engines.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel
from typing_extensions import override

from toolkit.config.job import Job
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import StepResult, Update, gradient_error
from toolkit.engines.dropout import DropoutStream
from toolkit.engines.full_forward import FullForwardEngine
from toolkit.engines.gradient_norm import clip_gradients
from toolkit.engines.host_read import read_together
from toolkit.engines.optimizer import connect_optimizer, fill_missing_gradients, parameter_groups, torch_optimizer
from toolkit.engines.optimizer_states import PlainStates, state_kinds
from toolkit.engines.routing import find_routing
from toolkit.errors import NonFiniteError
from toolkit.parallel.distilled_loss import plain_distilled_losses


class ReferenceEngine(FullForwardEngine):
    """Forward, backward, clip, step."""

    def __init__(self, job: Job, model: PreTrainedModel, device: torch.device) -> None:
        recipe = job.recipe
        self.model = model.to(device).train()
        self.device = device
        self.sources = len(recipe.data.labels)
        self.dropout = DropoutStream(model, device)
        groups = parameter_groups(self.named_parameters(), recipe.optimizer)
        self.optimizer = torch_optimizer(recipe, groups, on_gpu=device.type == "cuda")
        states = PlainStates(self.optimizer, state_kinds(recipe.optimizer.name, recipe.optimizer.momentum))
        self.states = connect_optimizer(states, self.named_parameters())
        self.grad_clip = recipe.train.grad_clip
        self.routing = find_routing(job, model, device)

    @override
    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        # The loss of all samples, then that of the samples of each source.
        loss_sums = torch.zeros(1 + self.sources, dtype=torch.float64, device=self.device)
        for micro_batch in self._begin_step(micro_batches):
            batch = micro_batch.to(self.device)
            micro_loss = self._training_loss(batch, loss_sums[1:])
            objective = self._add_router_losses(micro_loss, target_tokens)
            self.report_phase("backward")
            (objective / target_tokens).backward()  # type: ignore[no-untyped-call]
            loss_sums[:1] += micro_loss.detach()
        self.report_phase("update")
        if self._step_totals is not None:
            loss_sums = self._step_totals.local_totals()

        fill_missing_gradients(self.model.parameters())
        self._set_learning_rate(learning_rate)
        self.before_update()
        norm = clip_gradients(self.model.parameters(), self.grad_clip)
        values, grad_norm = read_together(self._host_totals(loss_sums), norm)
        totals = self._take_totals(values)
        loss = totals[0] / target_tokens
        if not math.isfinite(loss):
            self.optimizer.zero_grad()
            raise NonFiniteError(f"the loss is {loss} on rank 0")
        if not math.isfinite(grad_norm):
            self.optimizer.zero_grad()
            raise gradient_error(grad_norm)

        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._result(Update(totals=totals, grad_norm=grad_norm), target_tokens)

    @override
    def _distilled(self, logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        assert self.distillation is not None
        assert batch.teacher is not None
        losses, token_losses, divergences = plain_distilled_losses(
            logits.flatten(0, 1).float(),
            batch.labels.flatten(),
            batch.teacher.map(lambda tensor: tensor.flatten(0, 1)),
            self.distillation.divergence,
        )
        loss = losses.sum() if batch.weights is None else (losses * batch.weights.flatten()).sum()
        self.distillation.add(loss, token_losses, divergences)
        return loss

    @override
    def _forward(self, batch: MicroBatch) -> Any:
        return self.model(**batch.inputs(), use_cache=False)
