"""Optimizers and the learning rate: the same parameter groups and the same schedule for every engine."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.config.recipe import OptimizerSection, Recipe
from toolkit.dsconfig.trainer import schedule_arguments
from toolkit.engines.optimizer_states import OptimizerStates
from toolkit.engines.optimizers.adafactor import Adafactor, FactoredStates
from toolkit.engines.optimizers.adamw8bit import EightBitStates, adamw8bit
from toolkit.engines.optimizers.muon import Muon
from toolkit.model_init.model_partition import ModelPartition
from toolkit.models.hidden_matrices import is_hidden_matrix
from toolkit.parallel.matrix_exchange import Part
from toolkit.parallel.shard import Shard, is_marked, shard_of


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection
) -> list[dict[str, Any]]:
    """Return groups without empty ones: parameters with two or more dimensions decay, biases and norms do not.

    Muon updates hidden matrices, and `adamw8bit` rounds their moments: these are apart from the others. With 8 bits so
    are those that tensor-parallel ranks have copies of, as each must round them in blocks with the same neighbors.
    Experts that replicas share out have groups of their own, which DeepSpeed reduces over other ranks.
    """
    groups: dict[tuple[bool, bool, bool, str], list[nn.Parameter]] = {}
    muon = section.name == "muon"
    in_8_bits = section.name == "adamw8bit"
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            # ZeRO-3 flattens a parameter to its shard and keeps the shape here.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            shape = shard_of(parameter).shape if is_marked(parameter) else shape
            is_other = (muon or in_8_bits) and not is_hidden_matrix(name, shape)
            is_copy = in_8_bits and not is_other and is_marked(parameter) and not shard_of(parameter).is_split
            key = len(shape) < 2, is_other, is_copy, getattr(parameter, "group_name", None) or ""
            groups.setdefault(key, []).append(parameter)
    ratio = 1.0 if section.adamw_lr is None else section.adamw_lr / section.lr
    described = []
    for (is_spared, is_other, _, name), parameters in sorted(groups.items(), key=lambda group: group[0]):
        group: dict[str, Any] = {"params": parameters}
        group["weight_decay"] = 0.0 if is_spared else section.weight_decay
        if name:
            group["moe"] = True
            group["name"] = name
        if muon:
            group["muon"] = not is_other
            group["lr_ratio"] = ratio if is_other else 1.0
        if in_8_bits:
            group["optim_bits"] = 32 if is_other else 8
        described.append(group)
    return described


def fill_missing_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set the gradient of trained parameters that no loss of a step depends on to zeros, as DeepSpeed does.

    PyTorch's optimizers skip a parameter without a gradient, and so neither let its moments decay nor its weight. Which
    parameters these are differs between strategies: an expert may be chosen by no token of one replica alone.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def torch_optimizer(recipe: Recipe, groups: Iterable[dict[str, Any]], *, on_gpu: bool) -> torch.optim.Optimizer:
    """Create the recipe's optimizer: PyTorch's, or Lion, which PyTorch lacks, or one for parts of matrices.

    On GPUs PyTorch's Adam is one kernel for all parameters, whose step counters are on the device. On CPUs, whose fused
    kernels round differently, it is one call for all parameters of each operation, with the bits of one for each.
    `on_gpu`: where the parameters will be at the first update, as some engines move them there later.
    """
    section = recipe.optimizer
    parameters = list(groups)
    at_once = {"fused": True} if on_gpu else {"foreach": True}
    match section.name:
        case "adamw":
            return torch.optim.AdamW(parameters, lr=section.lr, betas=section.betas, eps=section.eps, **at_once)
        case "adam":
            return torch.optim.Adam(parameters, lr=section.lr, betas=section.betas, eps=section.eps, **at_once)
        case "sgd":
            return torch.optim.SGD(parameters, lr=section.lr, momentum=section.momentum, foreach=True)
        case "lion":
            return Lion(parameters, lr=section.lr, betas=section.betas)
        case "muon":
            return Muon(
                parameters,
                lr=section.lr,
                betas=section.betas,
                eps=section.eps,
                momentum=section.muon_momentum,
                adjust_lr=section.adjust_lr,
                # Orthogonality need not be exact, and parity does: with fp32 weights every product is in fp32.
                dtype=torch.float32 if recipe.precision == "fp32" else torch.bfloat16,
            )
        case "adamw8bit":
            eight: torch.optim.Optimizer = adamw8bit()(parameters, lr=section.lr, betas=section.betas, eps=section.eps)
            return eight
        case "adafactor":
            return Adafactor(parameters, lr=section.lr)


def connect_optimizer(
    states: OptimizerStates,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    partition: ModelPartition | None = None,
) -> OptimizerStates:
    """Tell an optimizer of matrices where the elements of each are, and return its states. Collective for those.

    8-bit states are returned as what they stand for.
    """
    optimizer = states.base
    if type(optimizer).__name__ == "AdamW8bit":
        return EightBitStates(states)
    if not isinstance(optimizer, Muon | Adafactor):
        return states
    names = {id(parameter): name for name, parameter in named_parameters}
    parts = []
    for tensor, parameter, offset in states.placements():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        shard = Shard(name=names[id(parameter)], shape=shape) if partition is None else shard_of(parameter)
        start, length = states.extent(parameter)
        parts.append(Part(tensor=tensor, shard=shard, start=start, length=length, offset=offset))
    group = dist.group.WORLD if dist.is_initialized() else None
    if partition is not None:
        group = partition.groups.stage()
    if isinstance(optimizer, Muon):
        optimizer.connect(parts, group)
        return states
    if partition is not None and partition.shared:
        optimizer.connect(parts, group, tied=partition.shared, ends=partition.groups.ends())
    else:
        optimizer.connect(parts, group)
    return FactoredStates(states, names)


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", alg. 2)."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]] | Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update: w -= lr * (sign(b1*m + (1-b1)*g) + decay*w), then m = b2*m + (1-b2)*g."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters]
            for p in parameters:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            moments = [self.state[p]["exp_avg"] for p in parameters]
            b1, b2 = group["betas"]
            directions = torch._foreach_lerp(gradients, moments, b1)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, directions, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1 - b2)
        return loss


def learning_rate(recipe: Recipe) -> Callable[[int], float]:
    """step (from 0) -> learning rate: the factor of `transformers.get_scheduler`, a function of the step alone.

    The schedule is evaluated, not stepped: a skipped fp16 step or a restart cannot shift it.
    """
    from transformers import get_scheduler

    section = recipe.schedule
    steps = recipe.train.steps
    probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.optimizer.lr)
    scheduler = get_scheduler(
        section.name,
        optimizer=probe,
        num_warmup_steps=section.warmup_steps,
        num_training_steps=steps,
        scheduler_specific_kwargs=schedule_arguments(recipe),
    )
    factor = scheduler.lr_lambdas[0]
    return lambda step: recipe.optimizer.lr * float(factor(step))
