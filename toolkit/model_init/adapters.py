"""LoRA: peft's adapters on the linear layers of a model that is built, drawn and sharded layer by layer.

peft itself decides which linear layers get adapters, and makes its layers around them. Those are taken out of the model
again, which is then built as it would be without LoRA: names, seeds and files of the weights are the same. As soon as a
decoder layer has its weights, and tensor parallelism its shards, the adapters are put around its linear layers.

A is drawn as in peft, by kaiming_uniform with a = √5, with a seed from its name; B is zero. So each layout begins with
the same adapters.
"""

import math
import warnings
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.config.recipe import LoraSection
from toolkit.errors import ModelError, Refusal, RunError, nearest
from toolkit.files import reason_of
from toolkit.model_init.four_bit import quantize_layer
from toolkit.model_init.model_modules import OnLayer, decoder_layers
from toolkit.parallel.adapter_names import ADAPTER, PREFIX, saved_name
from toolkit.parallel.gather import Names
from toolkit.parallel.tensor.adapter_layers import AdapterDropout, parallelize_adapter, seed_dropouts
from toolkit.parallel.tensor.dora import DoraMagnitude
from toolkit.seeds import derive_seed
from toolkit.units import english_list

ALL_LINEAR = "all-linear"
_FIELD = "model.lora.targets"


class Adapters:
    """The adapters of one model, which is on the meta device. Raises ModelError, and RunError without peft."""

    def __init__(
        self,
        model: PreTrainedModel,
        section: LoraSection,
        *,
        seed: int,
        tensor_parallel: bool = False,
        in_4bit: bool = False,
    ) -> None:
        self.seed = seed
        self.tensor_parallel = tensor_parallel
        self.in_4bit = in_4bit
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        inject(model, section)
        self._take_out(model)
        for parameter in trainable:  # peft has frozen them; what pipeline stages drop is what the family trains
            parameter.requires_grad_()

    def _take_out(self, model: PreTrainedModel) -> None:
        """Remember peft's layers, and put the linear layers back into their places."""
        self._detached: dict[str, Any] = {
            name: module for name, module in model.named_modules() if hasattr(module, "base_layer")
        }
        self.names: Names = [
            (saved_name(name), parameter.shape)
            for name, parameter in model.named_parameters()
            if saved_name(name).startswith(PREFIX)
        ]
        for path, module in self._detached.items():
            model.set_submodule(path, module.base_layer)
        layers = set(decoder_layers(model))
        # By the layer itself: the id of one that another stage owns would soon be that of another object.
        self._prefix = {module: name for name, module in model.named_modules() if module in layers}

    def before(self, on_layer: OnLayer | None, dtype: torch.dtype) -> OnLayer:
        """Return a function that attaches the adapters of a decoder layer before it calls `on_layer`."""

        def attach(module: nn.Module) -> None:
            if module in self._prefix:
                self.attach(module, dtype)
            if on_layer is not None:
                on_layer(module)

        return attach

    def attach(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """Put the adapters around the linear layers of a decoder layer, which have their values and are sharded."""
        if self.in_4bit:
            quantize_layer(layer, dtype)
        prefix = self._prefix[layer]
        inside = {path.removeprefix(f"{prefix}."): path for path in self._detached if path.startswith(f"{prefix}.")}
        for local, path in inside.items():
            lora = self._detached.pop(path)
            lora.base_layer = layer.get_submodule(local)
            a = lora.lora_A[ADAPTER]
            b = lora.lora_B[ADAPTER]
            a.weight = nn.Parameter(self._first_a(a, f"{path}.lora_A").to(dtype))
            b.weight = nn.Parameter(self._first_b(b, f"{path}.lora_B").to(dtype))
            dropout = lora.lora_dropout[ADAPTER]
            if isinstance(dropout, nn.Dropout):
                lora.lora_dropout[ADAPTER] = self._dropout(dropout, path)
            parallelize_adapter(lora, path, tensor_parallel=self.tensor_parallel)
            if lora.use_dora[ADAPTER]:
                lora.lora_magnitude_vector[ADAPTER] = DoraMagnitude(
                    lora.base_layer,
                    lora.lora_A[ADAPTER],
                    lora.lora_B[ADAPTER],
                    lora.scaling[ADAPTER],
                    name=f"{PREFIX}{path}.lora_magnitude_vector",
                )
            layer.set_submodule(local, lora)
        seed_dropouts(layer)

    def _first_a(self, linear: nn.Linear, name: str) -> torch.Tensor:
        values = torch.empty(linear.weight.shape)
        generator = torch.Generator().manual_seed(derive_seed("initial weights", self.seed, name))
        return nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)

    def _dropout(self, dropout: nn.Dropout, path: str) -> nn.Module:
        return AdapterDropout(dropout.p, path)

    def _first_b(self, linear: nn.Linear, name: str) -> torch.Tensor:
        return torch.zeros(linear.weight.shape)


def _is_expert(path: str) -> bool:
    """Whether a module is of a mixture's experts, which `all-linear` means too."""
    return ".experts." in f"{path}."


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a linear layer computes something else than a product: one for each group of heads, for example."""
    return type(module).forward not in (nn.Linear.forward, Conv1D.forward)


def supported_layers(model: nn.Module) -> frozenset[str]:
    """The names of the linear layers that get adapters here: those of decoder layers, but no experts'."""
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not _has_own_forward(module)
    ]
    return frozenset(name for name in linear if model.get_submodule(name) in inside and not _is_expert(name))


def check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise ModelError for a target that no layer of the whole model has, or one that gets no adapter here.

    peft ignores names that no layer has, beside one that has.
    """
    supported = supported_layers(model)
    paths = [path for path, _ in model.named_modules() if path]
    unknown = [target for target in targets if not any(_means(target, path) for path in paths)]
    if unknown:
        names = _offered(paths, supported)
        hint = nearest(unknown[0], names).strip() if len(unknown) == 1 else ""
        reason = f"no layer of this model is called {english_list(unknown, 'or')}"
        raise ModelError.of(_FIELD, list(targets), reason, hint or _choices(names))
    for path in paths:
        if path not in supported and any(_means(target, path) for target in targets):
            raise _no_adapter(model, path, targets, _offered(paths, supported))


def _means(target: str, path: str) -> bool:
    """Whether a target means the module at `path`, as peft reads it."""
    return f".{path}".endswith(f".{target}")


def _no_adapter(model: nn.Module, path: str, targets: Sequence[str], names: Sequence[str]) -> ModelError:
    """The error that says why the module at `path` gets no adapter here, and offers `names`."""
    module = model.get_submodule(path)
    module = getattr(module, "base_layer", module)
    if _is_expert(path):
        reason = f"{path} is of a mixture's experts, whose adapters are not supported"
    elif not isinstance(module, nn.Linear | Conv1D):
        reason = f"{path} is no linear layer"
    elif _has_own_forward(module):
        reason = f"{path} is a {type(module).__name__}, and peft's adapters are for plain linear layers"
    else:
        reason = f"{path} is no part of a decoder layer, and only those get adapters"
    return ModelError.of(_FIELD, list(targets), reason, _choices(names))


def _offered(paths: Iterable[str], supported: Container[str]) -> list[str]:
    """The last parts of the names of modules, where all that have them get adapters."""
    last = {path: path.rpartition(".")[2] for path in paths}
    unsupported = {name for path, name in last.items() if path not in supported}
    return sorted({*last.values()} - unsupported)


def _choices(names: Sequence[str]) -> str:
    return f"choose among {', '.join(names)}" if names else "train without adapters"


def inject(model: nn.Module, section: LoraSection) -> Any:
    """Let peft put its layers into `model` and freeze all others; return its LoraConfig, complete.

    Raises ModelError for what gets no adapters here, and RunError without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        reason = "peft is not installed"
        advice = "install it: pip install '.[lora]'"
        raise RunError(Refusal(field="model.lora", settings=("model.lora",), reason=reason, remedy=(advice,))) from None
    targets = section.targets
    if targets != (ALL_LINEAR,):
        check_targets(model, targets)
    supported = supported_layers(model)
    offered = _offered((path for path, _ in model.named_modules() if path), supported)
    config = LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=targets[0] if targets == (ALL_LINEAR,) else list(targets) or None,
        use_rslora=section.rslora,
        use_dora=section.dora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's of layers that are not linear: the error below names them
            inject_adapter_in_model(config, model, low_cpu_mem_usage=is_on_meta)
    except ValueError as error:
        reason = f"peft finds no such linear layers in this model ({reason_of(error)})"
        raise ModelError.of(_FIELD, list(targets), reason, _choices(offered)) from error
    # `all-linear` and a family's defaults may name layers that get none here.
    unsupported = [
        name for name, module in model.named_modules() if hasattr(module, "base_layer") and name not in supported
    ]
    if unsupported:
        raise _no_adapter(model, next(filter(_is_expert, unsupported), unsupported[0]), targets, offered)
    return config
