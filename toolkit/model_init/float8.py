"""model.float8: linear layers of decoder layers multiply in 8 bits, forward and backward, by torchao.

Parameters, their gradients and optimizer states stay what they are; a product's operands are scaled and rounded to
float8 where it is computed. So shards and files know nothing of it.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.config.router_rules import expert_count
from toolkit.errors import ModelError, RunError
from toolkit.model_init.model_modules import decoder_layers

_FIELD = "model.float8"
_MULTIPLE = 16
"""Number of which the sizes of a float8 product must be multiples on a GPU."""


def check_float8(kind: str, device: torch.device) -> None:
    """Raise RunError without torchao, and on a GPU that has no float8. A CPU emulates it."""
    _torchao(kind)
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        has = ".".join(map(str, capability))
        reason = f"a {torch.cuda.get_device_name(device)} has compute capability {has}, and float8 needs 8.9 or more"
        raise RunError.of(_FIELD, kind, reason, (_FIELD, None))


def multiply_in_float8(model: PreTrainedModel, kind: str, *, emulate: bool, gathers: bool) -> None:
    """Convert the linear layers of decoder layers whose sizes are multiples of 16, and that are no routers.

    `gathers`: whether weights are only there around their use (ZeRO-3). Raises ModelError where there are none.
    """
    float8 = _torchao(kind)
    config = replace(float8.Float8LinearConfig.from_recipe_name(kind), emulate=emulate)
    experts = expert_count(model.config.get_text_config(decoder=True).to_dict())

    def is_converted(linear: Any, name: str) -> bool:
        sizes = linear.in_features, linear.out_features
        return not any(size % _MULTIPLE for size in sizes) and linear.out_features != experts

    converted = 0
    for layer in decoder_layers(model):
        float8.convert_to_float8_training(layer, module_filter_fn=is_converted, config=config)
        for module in layer.modules():
            if isinstance(module, float8.float8_linear.Float8Linear):
                converted += 1
                if gathers:
                    # Another class, not a module around this one: its parameters keep their names.
                    family = type(module)
                    module.__class__ = type(f"Gathered{family.__name__}", (_KeepsNoWeight, family), {})
    if not converted and any(next(layer.parameters(), None) is not None for layer in decoder_layers(model)):
        reason = f"no decoder layer has a torch.nn.Linear whose sizes are multiples of {_MULTIPLE}"
        raise ModelError.of(_FIELD, kind, reason, (_FIELD, None))


class _KeepsNoWeight(nn.Module):
    """A linear layer that does not keep its weight for the backward pass, in which ZeRO-3 gathers it again.

    torchao saves a view of it, and with that the memory that ZeRO-3 wants to free. Compiled code saves the parameter.
    """

    weight: nn.Parameter

    def forward(self, x: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(x)
        with torch.autograd.graph.saved_tensors_hooks(self._without_weight, self._with_weight):
            return super().forward(x)

    def _without_weight(self, saved: torch.Tensor) -> torch.Tensor | None:
        return None if saved.data_ptr() == self.weight.data_ptr() else saved

    def _with_weight(self, saved: torch.Tensor | None) -> torch.Tensor:
        return self.weight.t() if saved is None else saved


def _torchao(kind: str) -> Any:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it names the kernels that this machine cannot load, whichever are used
    try:
        import torchao.float8
    except ImportError:
        advice = "install it: pip install torchao"
        raise RunError.of(_FIELD, kind, "torchao is not installed", advice, (_FIELD, None)) from None
    finally:
        logging.disable(level)
    return torchao.float8
