"""A model as it is initialized: first on the meta device, without memory for its parameters, which are then
materialized in units: decoder layers one by one, then everything else."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.models.support import find
from toolkit.parallel.shard import FullTensor

OnLayer = Callable[[nn.Module], None]
"""Called with each initialized module: every decoder layer, every module outside them with parameters of its own, and
finally the model. ZeRO-3 shards them there."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the children of the outermost module lists, in order."""
    layers: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                layers.extend(child)
            else:
                visit(child)

    visit(model)
    return layers


def outside_layers(model: nn.Module) -> list[nn.Module]:
    """Return the other modules that own parameters directly, children before their parents."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    modules: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        if id(module) not in inside and any(parameter is not None for parameter in module._parameters.values()):
            modules.append(module)

    visit(model)
    return modules


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters only: buffers such as rotary frequencies are too coarse in 16 bits."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not parameter.is_meta and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)


def round_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast buffers too in families whose layers multiply them by activations; rotary frequencies stay in fp32."""
    support = find(model.config.model_type)
    if support is None or not support.rounds_buffers:
        return
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not name.endswith("inv_freq"):
            buffer.data = buffer.data.to(dtype)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of the buffers that a state dict contains."""
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer.detach()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules constructed inside have their parameters on the meta device; buffers stay real.

    One-dimensional parameters remember the values that their constructor set: some families (Apertus) initialize a few
    of them nowhere else. They stay real until the end of the block, because a constructor may register a parameter
    first and fill it later (`reset_parameters`).
    """
    register = nn.Module.register_parameter
    vectors: list[tuple[nn.Module, str]] = []

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or parameter.is_meta:
            return
        if parameter.dim() <= 1:
            vectors.append((module, name))
        else:
            module._parameters[name] = _on_meta(parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        moved: dict[nn.Parameter, nn.Parameter] = {}
        for module, name in vectors:
            parameter = module._parameters.get(name)
            if parameter is None or parameter.is_meta:
                continue
            if parameter not in moved:
                moved[parameter] = _on_meta(parameter)
                moved[parameter].constructed = parameter.detach()  # type: ignore[attr-defined]
            module._parameters[name] = moved[parameter]


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        vars(empty).setdefault(name, value)  # a fake tensor has a device of its own there
    return empty


def constructed_values(parameter: nn.Parameter) -> torch.Tensor:
    """Return what its module's constructor set a meta parameter to; NaN where that is unknown."""
    values: torch.Tensor | None = getattr(parameter, "constructed", None)
    return torch.full(parameter.shape, torch.nan, dtype=torch.float32) if values is None else values.clone()


class Materializer:
    """Replaces the meta parameters of `model` by real ones. Tied parameters stay one object."""

    def __init__(self, model: nn.Module) -> None:
        counts = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        self._tied = {parameter for parameter, count in counts.items() if count > 1}
        self._real: dict[nn.Parameter, nn.Parameter] = {}

    def replace(self, module: nn.Module, key: str) -> bool:
        """Replace one parameter, with the values of its source or its constructor. True if it is a new object."""
        parameter = module._parameters[key]
        assert parameter is not None
        real = self._real.get(parameter)
        is_new = real is None
        if real is None:
            source: FullTensor | None = getattr(parameter, "source", None)
            values = constructed_values(parameter) if source is None else source.clone()
            real = nn.Parameter(values, requires_grad=parameter.requires_grad)
            if parameter in self._tied:
                # No others: a reference here would keep a layer's memory long after the layer was sharded.
                self._real[parameter] = real
        module._parameters[key] = real
        return is_new

    def fill(self, module: nn.Module) -> None:
        """Replace all meta parameters of `module` and of the modules inside it."""
        for child in module.modules():
            for key, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter.is_meta:
                    self.replace(child, key)
