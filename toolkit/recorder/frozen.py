"""Freeze what does not train, and add LoRA's adapters: by peft itself, as a script does before it trains."""

from fnmatch import fnmatch

import torch
from torch import nn

from toolkit.errors import ModelError
from toolkit.estimate.trainable import Trainable


def freeze(model: nn.Module, trainable: Trainable) -> None:
    """Leave only those parameters trainable. Raises ModelError where there are none, or without peft."""
    if trainable.rank:
        _add_adapters(model, trainable)
    elif trainable.patterns:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(fnmatch(name, pattern) for pattern in trainable.patterns))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ModelError(f"--trainable names no parameter ({', '.join(trainable.patterns)})")


def _add_adapters(model: nn.Module, trainable: Trainable) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ModelError(
            "LoRA is added by peft, which is not installed: pip install 'deepspeed-megatron-toolkit[lora]'"
        ) from None
    targets = trainable.targets
    config = LoraConfig(
        r=trainable.rank,
        lora_dropout=trainable.dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ModelError(f"--trainable names no linear module ({', '.join(targets)})") from error
    if trainable.in_fp32:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.requires_grad:
                    setattr(module, name, nn.Parameter(parameter.to(torch.float32)))


def receives_gradients(model: nn.Module, layers: nn.ModuleList, *, recomputes: bool) -> list[bool]:
    """Whether the backward pass reaches the input of each decoder layer: something before it trains.

    transformers makes the embedding's output require a gradient where layers are recomputed.
    """
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    trains = recomputes
    for parameter in model.parameters():
        if id(parameter) in inside:
            break
        trains = trains or parameter.requires_grad
    found = []
    for layer in layers:
        found.append(trains)
        trains = trains or any(parameter.requires_grad for parameter in layer.parameters())
    return found
