"""Parameters without memory: a model is built on the meta device, except for its buffers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device.

    Vectors remember what the constructor put in: some families (Apertus) initialise a few of theirs nowhere else.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            empty.__dict__.update(parameter.__dict__)
            if parameter.dim() <= 1:
                empty.constructed = parameter.detach()  # type: ignore[attr-defined]
            module._parameters[name] = empty

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def constructed_values(parameter: nn.Parameter) -> torch.Tensor:
    """What the constructor of its module gave a meta parameter; NaN where that is not known."""
    values: torch.Tensor | None = getattr(parameter, "constructed", None)
    return torch.full(parameter.shape, torch.nan, dtype=torch.float32) if values is None else values.clone()
