"""Another seed of rounding: the same training, with each module's result moved by about a unit in its last place.

Which way an element moves is drawn at random, in the forward pass and by that in the backward pass. It is Monte Carlo
arithmetic (Parker, Pierce and Eggert, Monte Carlo Arithmetic: How to Gamble with Floating Point and Win, 2000) at the
grain of modules: reruns with other seeds show how far rounding alone can take a run, whatever sums were reordered.
"""

from typing import Any

import torch
from torch import nn

from toolkit.config.recipe import Precision
from toolkit.parity.tolerance import UNIT_ROUNDOFF


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
