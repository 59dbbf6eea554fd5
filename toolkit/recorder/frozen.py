"""Freeze what does not train, and add LoRA's adapters: by the functions that do so before training."""

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.config.recipe import LoraSection
from toolkit.errors import ModelError, Refusal
from toolkit.estimate.trainable import Trainable
from toolkit.model_init.adapters import Adapters, inject
from toolkit.model_init.frozen import freeze_others, trained_names


def freeze(model: nn.Module, trainable: Trainable) -> None:
    """Leave only those parameters trainable. Raises ModelError where there are none, and RunError without peft."""
    if trainable.rank:
        targets = () if trainable.targets == ("default",) else trainable.targets
        try:
            inject(model, LoraSection(r=trainable.rank, dropout=trainable.dropout, targets=targets))
        except ModelError as error:
            raise ModelError(_without_field(error, "--trainable or model.lora")) from error
        weights = next(parameter.dtype for parameter in model.parameters() if not parameter.requires_grad)
        _cast_adapters(model, torch.float32 if trainable.in_fp32 else weights)
    elif trainable.patterns or trainable.frozen:
        try:
            trained = trained_names(model, freeze=trainable.frozen, train_only=trainable.patterns)
        except ModelError as error:
            raise ModelError(_without_field(error, "--trainable, or the recipe")) from error
        freeze_others(model, trained)


def _without_field(error: ModelError, origin: str) -> str:
    """Return the message of an error about a recipe's field, without the field: an option may have set it."""
    refusal = error.as_refusal()
    setting = Refusal(field="", settings=(origin,), reason=refusal.reason, remedy=refusal.remedy)
    return str(setting).removesuffix(".")


class RecordedAdapters(Adapters):
    """The adapters that are in a model, taken out while tensor parallelism shards it; they have no values."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tensor_parallel = True
        self.in_4bit = False
        self._take_out(model)

    def _first_a(self, linear: nn.Linear, name: str) -> torch.Tensor:
        return torch.empty(linear.weight.shape)

    def _dropout(self, dropout: nn.Dropout, path: str) -> nn.Module:
        return dropout


def _cast_adapters(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                setattr(module, name, nn.Parameter(parameter.to(dtype)))


def receives_gradients(model: nn.Module, layers: nn.ModuleList, *, recomputes: bool) -> list[bool]:
    """Return for each decoder layer whether the backward pass reaches its input: whether something before it trains.

    transformers makes the embedding's output require a gradient where layers are recomputed.
    """
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    trains = recomputes
    for parameter in model.parameters():
        if id(parameter) in inside:
            break
        trains = trains or parameter.requires_grad
    reached = []
    for layer in layers:
        reached.append(trains)
        trains = trains or any(parameter.requires_grad for parameter in layer.parameters())
    return reached
