"""Parameters without memory: a model is built on the meta device, except for its buffers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device.

    Vectors remember what the constructor put in: some families (Apertus) initialise a few of theirs nowhere else. They
    stay real until the end of the block, because a constructor may register first and fill later (`reset_parameters`).
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
    empty.__dict__.update(parameter.__dict__)
    return empty


def constructed_values(parameter: nn.Parameter) -> torch.Tensor:
    """What the constructor of its module gave a meta parameter; NaN where that is not known."""
    values: torch.Tensor | None = getattr(parameter, "constructed", None)
    return torch.full(parameter.shape, torch.nan, dtype=torch.float32) if values is None else values.clone()
