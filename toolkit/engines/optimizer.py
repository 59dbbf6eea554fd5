"""Optimizers and the learning rate: the same parameter groups and the same schedule for every engine."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from toolkit.config.recipe import OptimizerSection, Recipe
from toolkit.dsconfig.trainer import schedule_arguments


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups without empty ones: parameters with two or more dimensions decay, biases and norms do not.

    Experts that replicas share out have groups of their own, which DeepSpeed reduces over other ranks.
    """
    groups: dict[tuple[bool, str | None], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # ZeRO-3 flattens a parameter to its shard and keeps the full shape here.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            groups.setdefault((len(shape) < 2, getattr(parameter, "group_name", None)), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": 0.0 if is_spared else weight_decay}
        | ({} if name is None else {"moe": True, "name": name})
        for (is_spared, name), parameters in sorted(groups.items(), key=lambda group: (group[0][0], group[0][1] or ""))
    ]


def torch_optimizer(section: OptimizerSection, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """Create the recipe's optimizer: PyTorch's, or Lion, which PyTorch lacks."""
    parameters = list(groups)
    match section.name:
        case "adamw":
            return torch.optim.AdamW(parameters, lr=section.lr, betas=section.betas, eps=section.eps)
        case "adam":
            return torch.optim.Adam(parameters, lr=section.lr, betas=section.betas, eps=section.eps)
        case "sgd":
            return torch.optim.SGD(parameters, lr=section.lr, momentum=section.momentum)
        case "lion":
            return Lion(parameters, lr=section.lr, betas=section.betas)


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

    section, steps = recipe.schedule, recipe.train.steps
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
