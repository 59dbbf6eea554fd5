"""QLoRA (arXiv:2305.14314, section 3): the frozen linear layers of decoder layers as 4-bit NormalFloat of bitsandbytes.

A layer is quantized as soon as it has its values, so a rank never holds more than one layer in whole precision.
"""

from typing import Any

import torch
from torch import nn

from toolkit.errors import ModelError, Refusal, RunError

_FIELD = "model.load_in_4bit"


def check_four_bit(device: torch.device) -> None:
    """Raise RunError where layers in 4 bits cannot train: on a CPU, or without bitsandbytes."""
    if device.type != "cuda":
        reason = "it needs a CUDA GPU, and this run is on the CPU"
        raise RunError(Refusal(field=_FIELD, settings=((_FIELD, True),), reason=reason, remedy=((_FIELD, False),)))
    _bitsandbytes()


def quantize_layer(layer: nn.Module, dtype: torch.dtype) -> None:
    """Replace the linear layers of a decoder layer by such that keep NF4 weights and compute in `dtype`.

    Raises ModelError where there are none: GPT-2's Conv1D keeps its weight transposed.
    """
    modules = _bitsandbytes().nn
    linear = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    if not linear:
        reason = f"{type(layer).__name__} has no torch.nn.Linear, and only those are kept in 4 bits"
        raise ModelError.of(_FIELD, True, reason, (_FIELD, False))
    for name, module in linear.items():
        has_bias = module.bias is not None
        small = modules.Linear4bit(
            module.in_features, module.out_features, bias=has_bias, compute_dtype=dtype, quant_type="nf4", device="meta"
        )
        weight = modules.Params4bit(module.weight.detach(), requires_grad=False, quant_type="nf4", module=small)
        small.weight = weight.to(module.weight.device)
        small.bias = module.bias
        layer.set_submodule(name, small)


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError:
        reason = "bitsandbytes is not installed"
        advice = "install it: pip install bitsandbytes"
        raise RunError(Refusal(field=_FIELD, settings=((_FIELD, True),), reason=reason, remedy=(advice,))) from None
    return bitsandbytes
