"""The shared expert of a mixture's block runs while the rows of the others are on their way.

A block calls its router, its experts and its shared expert one after the other, in an order that differs between
families. Here the experts call the shared expert once their exchange has started; when the block calls it, it gets what
is known already. Where the block calls it first, the router and the experts are called then, ahead of the block.

Each module is called once, through its hooks, as ZeRO-3 and what records routers need it. The order of calls is the
same in a recomputed pass.
"""

import inspect
from typing import Any

import torch
from torch import nn

_NAMES = ("shared_experts", "shared_expert")
_CALLED_WITH_VIEW = ("aria_text", "hy_v3")
"""Families whose blocks call the experts first, and then the shared expert with a view of their input. While a layer is
traced, nothing tells that it is one, so compiled layers compute the shared expert after the exchange."""
_joined: dict[tuple[Any, Any], type[nn.Module]] = {}
"""The classes that `joined_class` has made."""


class CalledAhead(nn.Module):
    """A module whose result may be known when its block calls it; the family's class is its second base."""

    known: tuple[tuple[torch.Tensor, ...], Any] | None = None
    """Arguments and result of a call ahead; None where there was none."""
    overlap: "Overlap | None" = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.overlap is not None and self.overlap.shared is self:
            self.overlap.shared_is_called(arguments)
        known = self.known
        self.known = None
        if known is not None and not keywords:
            earlier, result = known
            if len(earlier) == len(arguments) and all(map(_same, earlier, arguments)):
                return result.view(arguments[0].shape) if isinstance(result, torch.Tensor) else result
        return super().__call__(*arguments, **keywords)

    def call_ahead(self, *arguments: torch.Tensor) -> Any:
        """Compute and keep the result."""
        result = super().__call__(*arguments)
        self.known = (arguments, result)
        return result


class _Block(nn.Module):
    """A block, which tells its overlap when it begins."""

    overlap: "Overlap"

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling() and not self.overlap.is_traceable:
            return super().forward(*arguments, **keywords)
        self.overlap.begin((*arguments, *keywords.values())[0])
        try:
            return super().forward(*arguments, **keywords)
        finally:
            self.overlap.begin(None)


class Overlap:
    """The overlap of one block. `hidden`: input of its shared expert; None once that is called."""

    def __init__(self, block: nn.Module, shared: Any, experts: Any, gate: Any) -> None:
        self.shared = shared
        self.experts = experts
        self.gate = gate
        self.hidden: torch.Tensor | None = None
        self.is_traceable = experts.config.model_type not in _CALLED_WITH_VIEW
        for module in filter(None, (shared, experts, gate)):
            _adopt(module, CalledAhead, self)
        _adopt(block, _Block, self)

    def begin(self, hidden: torch.Tensor | None) -> None:
        """Forget all: a recomputed pass may have ended midway."""
        self.hidden = hidden
        for module in filter(None, (self.shared, self.experts, self.gate)):
            module.known = None

    def take_input(self) -> torch.Tensor | None:
        """Return the input of the shared expert, for who calls it now; None once it is called."""
        hidden = self.hidden
        self.hidden = None
        return hidden

    def take_output(self) -> torch.Tensor:
        """Return what the shared expert has computed ahead."""
        output: torch.Tensor = self.shared.known[1]
        self.shared.known = None
        return output

    def call_shared(self) -> None:
        """Called by the experts while rows are on their way."""
        hidden = self.take_input()
        if hidden is not None:
            self.shared.call_ahead(hidden)

    def shared_is_called(self, arguments: tuple[Any, ...]) -> None:
        """Call the router and the experts before the block does, unless their exchange called the shared expert."""
        if self.hidden is None:
            return
        self.hidden = None
        if self.gate is not None and len(arguments) == 1:
            routed = self.gate.call_ahead(arguments[0])
            if isinstance(routed, tuple) and len(routed) == 3 and not routed[2].is_floating_point():
                _, weights, index = routed
                self.hidden = arguments[0]
                self.experts.call_ahead(arguments[0], index, weights)


def overlap_shared_expert(block: nn.Module, experts: nn.Module) -> None:
    """Let the shared expert of `block` run during the exchange, if it has one that takes hidden states alone."""
    shared = next(filter(None, (_module_of(block, name) for name in _NAMES)), None)
    if shared is not None:
        Overlap(block, shared, experts, _module_of(block, "gate"))


def _module_of(block: nn.Module, name: str) -> nn.Module | None:
    """The module of that name in the block; None if there is none, or it takes more than one argument."""
    module = getattr(block, name, None)
    if not isinstance(module, nn.Module):
        return None
    parameters = inspect.signature(module.forward).parameters.values()
    return module if sum(parameter.default is inspect.Parameter.empty for parameter in parameters) == 1 else None


def _adopt(module: Any, base: type[nn.Module], overlap: Overlap) -> None:
    # Python looks `__call__` up on the class, so only another class can skip a call with all its hooks; a module
    # around this one would change the names of its parameters.
    module.__class__ = joined_class(base, type(module))
    module.overlap = overlap
    # In the module's own dict from the first pass on: a compiled layer is compiled again if that changes.
    module.known = None


def joined_class(base: type[nn.Module], family: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a family's modules that are also `base`: one for all layers, which share a compiled graph."""
    key = (base, family)
    if key not in _joined:
        _joined[key] = type(family.__name__, key, {"__module__": family.__module__})
    return _joined[key]


def _same(tensor: torch.Tensor, argument: Any) -> bool:
    """Whether both are one tensor, or views of one tensor with all of its elements."""
    if tensor is argument:
        return True
    if torch.compiler.is_compiling() or not isinstance(argument, torch.Tensor):
        return False
    return tensor.numel() == argument.numel() and tensor.untyped_storage()._cdata == argument.untyped_storage()._cdata
