"""Routing: what an engine does with the routers of its model: balancing losses, the bias update, loads per expert.

The engine calls `start` before the forward pass of a micro-batch and `finish` after it, adds `loss` to the mean token
loss of the global batch, and calls `finish_step` with `totals` summed over the ranks. The losses of a pipeline's stages
meet in products, so a stage hands its sums on to the next, with the hidden state.

Dims: b samples, s positions, t tokens on this rank, e experts.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from toolkit.config.job import Job
from toolkit.config.recipe import ModelSection, Recipe
from toolkit.engines.context_slices import ContextSlices
from toolkit.engines.router_losses import count_assignments, pooled_loss, pooled_sums, sequence_loss, z_loss
from toolkit.engines.router_records import (
    RouterOutput,
    RouterRecords,
    correction_biases,
    expert_count,
    find_routers,
    router_choices,
    router_classes,
    scores_by_sigmoid,
)
from toolkit.errors import ModelError
from toolkit.parallel.experts.capacity import limit_capacity
from toolkit.parallel.experts.sharding import experts_in

_LOSSES = 2
"""The auxiliary loss and the z-loss."""


@dataclass(frozen=True, kw_only=True)
class RoutingStats:
    """One step: the losses without their coefficients, None where they are off, and the load of each layer's experts.

    `busiest`: of each decoder layer, the load of the busiest expert over the mean, None where there are no experts;
    `unused`: the share of all experts without a token. Padding is no load.
    """

    aux_loss: float | None
    z_loss: float | None
    busiest: tuple[float | None, ...]
    unused: float


class Routing:
    """The routers of one rank's part of a model. `sequence_group`: ranks that share what this rank has of the sequences
    of a micro-batch, all of them or the part of `context`."""

    sums: torch.Tensor
    """Sums over the last micro-batch, of all layers up to this stage's last: see `finish`."""

    def __init__(
        self,
        job: Job,
        model: PreTrainedModel,
        device: torch.device,
        sequence_group: dist.ProcessGroup | None = None,
        context: ContextSlices | None = None,
    ) -> None:
        section = job.recipe.model
        config = model.config
        self.device = device
        self.model = model
        self._group = sequence_group
        self.count = router_choices(config)
        self._layers = config.get_text_config(decoder=True).num_hidden_layers
        self._samples = job.batch.micro_batch_size
        self._seq_len = job.recipe.data.seq_len
        self._context = context
        self._micro_batches = job.batch.dp * job.batch.accumulation
        self.aux_coefficient = aux_coefficient(section, config)
        self.z_coefficient = section.router_z_loss
        self.bias_rate = section.router_bias_update
        self._scope = section.router_aux_loss.scope if section.router_aux_loss else "micro_batch"
        routers = find_routers(model)
        self._sigmoid = {layer: bool(scores_by_sigmoid(router)) for layer, router in routers.items()}
        self._records = RouterRecords(routers, expert_count(config))
        if getattr(config.get_text_config(decoder=True), "output_router_logits", False):
            model.register_forward_pre_hook(_without_own_loss, with_kwargs=True)
        self._is_counting = False
        # Whether each rank of the sequence group counts its part of the tokens; corrected by what routers put out.
        self._is_split = sequence_group is not None
        self.totals = torch.zeros(_LOSSES + self._layers * self.count, dtype=torch.float64, device=device)
        """Sums of the step on this rank: the losses, and the tokens of each expert of each layer."""
        self.global_counts = torch.zeros(self.count + 1, dtype=torch.float64, device=device)
        """Scope `global`: the assignments to each expert in the global batch, over all layers, and the rows."""

    @property
    def has_loss(self) -> bool:
        """Whether a loss is added, so that pipeline stages hand sums on."""
        return self.aux_coefficient > 0 or self.z_coefficient > 0

    def begin_step(self) -> bool:
        """Forget the step before, which may have failed; return whether the global batch must be counted first."""
        self.totals.zero_()
        self.global_counts.zero_()
        return self.aux_coefficient > 0 and self._scope == "global"

    def forget_passes(self) -> None:
        """Forget the loads of the forward passes since the step began; those of the global batch stay."""
        self.totals.zero_()

    def start(self, lengths: torch.Tensor | None) -> None:
        """Begin the forward pass of a micro-batch in training. `lengths` [b]: its tokens without padding; None: all."""
        self._has_padding = lengths is not None
        if lengths is None:
            self._lengths = torch.full((self._samples,), self._seq_len, device=self.device)
        else:
            self._lengths = lengths.to(self.device, non_blocking=True)
        self._records.begin()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the assignments of forward passes inside, without gradients, for those of the global batch."""
        self._is_counting = True
        with torch.no_grad():
            yield
        self._is_counting = False

    def finish(self, received: torch.Tensor | None = None) -> torch.Tensor | None:
        """Add what the routers of this stage put out to the loads, and to the sums `received` from the stage before.

        Sums: probabilities [e], assignments [e], rows, sequence losses, z-losses; None without a loss.
        """
        sums = torch.zeros(2 * self.count + 3, device=self.device) if received is None else received
        for layer, output in self._records.take().items():
            mask = self._mask(output)
            if self._is_counting:
                self._count_globally(output, mask)
                continue
            start = _LOSSES + layer * self.count
            self.totals[start : start + self.count] += count_assignments(output.experts, mask, self.count)
            if self.has_loss:
                sums = sums + torch.cat(self._layer_sums(layer, output, mask))
        self.sums = sums
        return sums if self.has_loss else None

    def _layer_sums(self, layer: int, output: RouterOutput, mask: torch.Tensor | None) -> list[torch.Tensor]:
        pooled = torch.zeros(2 * self.count, device=self.device)
        rows = self._lengths.sum(dtype=torch.float32)
        sequence = squares = torch.zeros_like(rows)
        if self.aux_coefficient and self._scope == "sequence":
            sigmoid = self._sigmoid[layer]
            sequence = sequence_loss(output, mask, self._lengths, self.sum_over_sequence, sigmoid=sigmoid)
        elif self.aux_coefficient:
            pooled = pooled_sums(output, mask)
            counts = self.sum_over_sequence(pooled[self.count :].detach().clone())
            pooled = torch.cat([pooled[: self.count], counts])
        if self.z_coefficient:
            squares = z_loss(output, mask, rows)
        return [pooled, torch.stack([rows, sequence, squares])]

    def loss(self) -> torch.Tensor:
        """Return what to add to the mean token loss of the global batch for the last micro-batch."""
        probabilities, assignments = self.sums[:-3].view(2, -1).unbind()
        rows, sequence, squares = self.sums[-3:]
        if self._scope == "global":
            counts = self.global_counts[:-1]
            all_rows = self.global_counts[-1]
            aux = pooled_loss(probabilities, (counts / all_rows).float(), all_rows.float())
        elif self._scope == "sequence":
            aux = sequence / self._micro_batches
        else:
            rows = rows.detach()
            aux = pooled_loss(probabilities, assignments.detach() / rows, rows) / self._micro_batches
        squares = squares / self._micro_batches
        self.totals[:_LOSSES] += torch.stack([aux, squares]).detach()
        loss: torch.Tensor = self.aux_coefficient * aux + self.z_coefficient * squares
        return loss

    def _count_globally(self, output: RouterOutput, mask: torch.Tensor | None) -> None:
        counts = pooled_sums(output, mask)[self.count :]
        rows = counts.new_tensor(len(output.experts)) if mask is None else mask.sum()
        self.global_counts += torch.cat([counts, rows[None]])

    def finish_step(self, totals: list[float], *, updated: bool) -> RoutingStats:
        """Return the stats of a step; update the biases if a step was taken. `totals`: summed over all ranks, read."""
        losses = totals[:_LOSSES]
        loads = torch.tensor(totals[_LOSSES:], dtype=torch.float64).view(self._layers, self.count)
        if updated:
            self._update_biases(loads)
        has_experts = loads.sum(dim=1) > 0
        is_unused = (loads == 0) & has_experts[:, None]
        return RoutingStats(
            aux_loss=losses[0] if self.aux_coefficient else None,
            z_loss=losses[1] if self.z_coefficient else None,
            busiest=tuple(float(load.max() / load.mean()) if load.any() else None for load in loads),
            unused=float(is_unused.sum().double() / (has_experts.sum() * loads.shape[1])),
        )

    def keep_biases_exact(self) -> None:
        """Keep the biases that are updated in fp32, once the engine has cast them: 16 bits cannot add a small rate."""
        for bias in self._biases().values():
            bias.data = bias.data.float()

    def _biases(self) -> dict[int, torch.Tensor]:
        # Engines replace buffers, when they move a model for instance.
        return correction_biases(self.model) if self.bias_rate else {}

    def _update_biases(self, loads: torch.Tensor) -> None:
        """Move each bias by the rate, up where an expert had less than the mean load (DeepSeek-V3, section 2.1.2).

        The loads are integers, the same on every rank, and so are the biases.
        """
        for layer, bias in self._biases().items():
            change = self.bias_rate * (loads[layer].mean() - loads[layer]).sign()
            bias.data.add_(change.to(bias).view_as(bias))

    def _mask(self, output: RouterOutput) -> torch.Tensor | None:
        """Return 1 for each token of this rank and 0 for padding, [t]; None where there is none."""
        part = len(output.experts) // self._samples
        self._is_split = part < (self._seq_len if self._context is None else len(self._context.positions))
        if not self._has_padding:
            return None
        first = part * self._group.rank() if self._is_split and self._group is not None else 0
        if self._context is None:
            positions = torch.arange(first, first + part, device=self.device)
        else:
            positions = self._context.positions[first : first + part].to(self.device, non_blocking=True)
        return (positions < self._lengths[:, None]).float().flatten()  # [b, s] -> [t]

    def sum_over_shards(self, values: torch.Tensor) -> torch.Tensor:
        """Sum what was counted over the ranks that share this rank's part of the sequences, in place."""
        if self._is_split:
            dist.all_reduce(values, group=self._group)
        return values

    def sum_over_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Sum what was counted over all ranks that share the sequences, in place."""
        self.sum_over_shards(values)
        if self._context is not None:
            dist.all_reduce(values, group=self._context.group)
        return values


def aux_coefficient(section: ModelSection, config: PretrainedConfig) -> float:
    """Return the coefficient of the auxiliary loss: the recipe's, or that of a config that asks for the loss, or 0."""
    asked = section.router_aux_loss
    text = config.get_text_config(decoder=True)
    if asked is not None and asked.coefficient is not None:
        return asked.coefficient
    of_config = getattr(text, "router_aux_loss_coef", None)
    if asked is not None and of_config is None:
        reason = f"the config of {config.model_type} has no router_aux_loss_coef to take it from"
        raise ModelError.of(
            "model.router_aux_loss.coefficient", None, reason, ("model.router_aux_loss.coefficient", 0.01)
        )
    if asked is None and not getattr(text, "output_router_logits", False):
        return 0.0
    return float(of_config or 0)


def _without_own_loss(model: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
    """Keep transformers from computing the loss as well: in a pipeline it fails on a stage without routers."""
    return arguments, keywords | {"output_router_logits": False}


def check_routing(recipe: Recipe, config: PretrainedConfig) -> None:
    """Raise ModelError for a balancing of experts that the model does not allow, before ranks meet."""
    section = recipe.model
    family = config.model_type
    aux = aux_coefficient(section, config)
    if not (aux or section.router_z_loss or section.router_bias_update):
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    routers = find_routers(model) if any(experts_in(model)) else {}
    field = "model.router_bias_update" if section.router_bias_update else "model.router_aux_loss"
    advice = "remove it"
    if section.router_aux_loss is None and aux:
        field = "model.overrides.output_router_logits"
        advice = "set it to false"
    if not routers:
        reason = f"the experts of {family} have no router that can be watched in transformers"
        raise ModelError.of(field, True, reason, advice)
    scope = section.router_aux_loss.scope if section.router_aux_loss else None
    if scope == "sequence" and scores_by_sigmoid(next(iter(routers.values()))) is None:
        field = "model.router_aux_loss.scope"
        reason = f"{family} has two kinds of scores, and the formula takes one"
        raise ModelError.of(field, scope, reason, (field, "micro_batch or global"))
    if section.router_bias_update:
        _check_biases(recipe, model)


def _check_biases(recipe: Recipe, model: PreTrainedModel) -> None:
    field = "model.router_bias_update"
    family = model.config.model_type
    biases = correction_biases(model)
    if not biases:
        reason = f"the routers of {family} have no bias that corrects the choice of experts"
        raise ModelError.of(field, recipe.value_of(field), reason, "set model.router_aux_loss instead")
    is_sharded = recipe.train.engine == "fsdp" or (
        recipe.train.engine == "deepspeed" and recipe.parallel.zero_stage == 3
    )
    if is_sharded and isinstance(next(iter(biases.values())), nn.Parameter):
        reason = f"the bias of {family} is a parameter, which would be sharded"
        remedy = ("parallel.zero_stage", "0, 1 or 2")
        raise ModelError.of(field, recipe.value_of(field), reason, remedy)


def find_routing(
    job: Job,
    model: PreTrainedModel,
    device: torch.device,
    sequence_group: dist.ProcessGroup | None = None,
    context: ContextSlices | None = None,
) -> Routing | None:
    """Return the routing of a model whose routers can be watched, or None. Limits the capacity of its experts."""
    factor = job.recipe.model.expert_capacity_factor
    if factor is not None:
        limit_capacity(model, factor, expert_count(model.config), sequence_group, samples=job.batch.micro_batch_size)
    if not router_classes(model) or not expert_count(model.config):
        return None
    return Routing(job, model, device, sequence_group, context)
