"""Another seed of rounding: the same training, with each module's result moved by about a unit in its last place.

Which way an element moves is drawn at random, in the forward pass and by that in the backward pass. It is Monte Carlo
arithmetic (Parker, Pierce and Eggert, Monte Carlo Arithmetic: How to Gamble with Floating Point and Win, 2000) at the
grain of modules: reruns with other seeds show how far rounding alone can take a run, whatever sums were reordered.
"""

from typing import Any

import torch
from torch import nn

from toolkit.config.recipe import Precision
from toolkit.engines.optimizer_states import local_part
from toolkit.engines.optimizers.adamw8bit import round_again
from toolkit.parity.tolerance import FP32_UNIT, UNIT_ROUNDOFF

_UNDECIDED = 64 * FP32_UNIT
"""How near to zero a direction is undecided, over the root mean square of the directions of a tensor. Those of two
layouts differ by 2 to 9 units of fp32 roundoff at root mean square, and by up to 70 in single elements."""


def round_differently(model: nn.Module, *, precision: Precision, seed: int) -> None:
    """Multiply what each leaf module of `model` returns by 1 + e or 1 - e, element by element.

    e is the distance from 1 to the next number of `precision`: half of it would be rounded away again in 1 + e. All
    ranks draw the same signs, so that what they hold alike stays alike.
    """
    step = 2 * UNIT_ROUNDOFF[precision]
    generator = torch.Generator().manual_seed(seed)

    def move(module: nn.Module, arguments: Any, result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        signs = torch.randint(0, 2, result.shape, generator=generator, dtype=torch.int8).to(result.device)
        return result * (1 + step * (2 * signs - 1)).to(result.dtype)

    for module in model.modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(move)


def flip_undecided_signs(optimizer: torch.optim.Optimizer, *, seed: int) -> None:
    """Turn the sign of every second direction that is within rounding of zero, before each update of Lion in fp32.

    Rounding flips few signs, and each moves a weight by twice the learning rate: which ones, and when, differs by
    chance between a few reruns. So a rerun flips about ten times as many as another layout would. The gradient moves by
    no more than rounding, and so that the sign of its sum with the momentum turns. Which half is drawn from the bits of
    the direction: replicas of a weight, which agree to the bit, flip alike.
    """

    def move(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        for group in optimizer.param_groups:
            beta = group["betas"][0]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = local_part(parameter.grad)
                state = optimizer.state.get(parameter, {})
                direction = (1 - beta) * gradient
                if "exp_avg" in state:
                    direction += beta * local_part(state["exp_avg"])
                reach = _UNDECIDED * direction.square().mean().sqrt()
                is_drawn = (direction.view(torch.int32) >> seed % 8) & 1 == 1
                flips = (direction.abs() <= reach) & is_drawn
                gradient.sub_(direction * flips, alpha=2 / (1 - beta))

    optimizer.register_step_pre_hook(move)


def round_moments_differently(optimizer: torch.optim.Optimizer, *, seed: int) -> None:
    """Round 8-bit moments once more before each update, as in the blocks of another layout."""
    generator = torch.Generator().manual_seed(seed)
    optimizer.register_step_pre_hook(lambda optimizer, arguments, keywords: round_again(optimizer, generator))
