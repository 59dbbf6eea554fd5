"""Anatomy: where a causal LM can be cut into stages, found by watching its own forward pass.

A model is embeddings, a list of decoder layers, and a head. Names and details differ between families, so nothing is
looked up by name: the forward pass runs once, on the meta device if the model lies there, and what is called before,
in and after the decoder layers is recorded. A model can be cut between layers where a layer's output is the next one's
first input and nothing else is handed from layer to layer: no trained tensor reaches a layer but by its hidden state.
"""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import ModelError
from toolkit.families.tracing import traceable


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """What runs where in the forward pass of one model. Names are those of `model.named_modules()`."""

    layers: str
    """The ModuleList of decoder layers."""
    count: int
    tuple_length: int | None
    """How many values a layer returns, the hidden state first; None where it returns the hidden state alone."""
    before: frozenset[str]
    """Modules outside the layers that own parameters and run before the first layer."""
    after: frozenset[str]
    """The same after the last layer. A module can be in both, and its parameters then act at both ends."""
    tied: Mapping[str, str]
    """Further names of a parameter -> the name under which Hugging Face saves it."""

    def layer_list(self, model: nn.Module) -> nn.ModuleList:
        """The decoder layers of `model`."""
        found = model.get_submodule(self.layers)
        assert isinstance(found, nn.ModuleList)
        return found


def examine(model: PreTrainedModel) -> Anatomy:
    """Run the model's forward pass once and say how it is built. Raises UncuttableError where layers form no chain."""
    family = model.config.model_type
    refuse_by_kind(type(model), model.config)
    name, layers = decoder_layers(model)
    tied = tied_names(model)
    if any(len({_layer_index(name, owner) for owner in pair} - {None}) > 1 for pair in tied.items()):
        raise UncuttableError(family, "layers share parameters")
    record = _Record(model, name, layers)
    try:
        record.run()
    except UncuttableError:
        raise
    except Exception as error:
        first = textwrap.shorten((str(error).strip() or type(error).__name__).splitlines()[0], 60, placeholder=" …")
        reason = f"its forward pass could not be followed ({first})"
        raise UncuttableError(family, reason) from error
    record.check_chain()
    ancestors = {"", *(name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1))}
    owners = {owner for owner, module in record.outside() if next(module.parameters(recurse=False), None) is not None}
    # A module around the layers is entered before and left after them: its own parameters may act at both ends.
    around = ancestors & owners
    return Anatomy(
        layers=name,
        count=len(layers),
        tuple_length=record.tuple_length,
        before=frozenset(around | (owners & record.before)),
        after=frozenset(around | (owners & record.after) | (owners - record.before - record.after)),
        tied=tied,
    )


def tied_names(model: nn.Module) -> dict[str, str]:
    """For every parameter with several names: each further name -> the first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
    return tied


def refuse_by_kind(model_class: type[PreTrainedModel], config: Any) -> None:
    """What a family says about itself, before a model is built."""
    # The decoder half of an encoder-decoder denies it in its own config, but not in the class of the config.
    if config.is_encoder_decoder or getattr(type(config), "is_encoder_decoder", False):
        raise UncuttableError(config.model_type, "encoder-decoder")
    if model_class._is_stateful:
        raise UncuttableError(config.model_type, "recurrent: a state runs along the sequence")


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The outermost ModuleList with one module per hidden layer; the decoder's where a tower for images has one too."""
    config = model.config.get_text_config(decoder=True)
    counts = [getattr(config, name, None) for name in ("num_hidden_layers", "num_layers")]
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [
        (name, module)
        for name, module in lists
        if len(module) in counts and not any(name.startswith(other + ".") for other, _ in lists if other != name)
    ]
    if not outer:
        raise UncuttableError(model.config.model_type, "it has not one list of decoder layers")
    if len(outer) > 1:
        decoder = set(model.get_decoder().modules())
        outer.sort(key=lambda entry: entry[1] not in decoder)
    return outer[0]


def _layer_index(layers: str, name: str) -> int | None:
    """The index of the decoder layer that a parameter belongs to."""
    rest = name.removeprefix(layers + ".")
    return None if rest == name else int(rest.split(".", 1)[0])


class _Record:
    """Hooks on every module while one forward pass runs."""

    def __init__(self, model: PreTrainedModel, list_name: str, layers: nn.ModuleList) -> None:
        self.model, self.list_name, self.layers = model, list_name, layers
        self.before: set[str] = set()
        self.after: set[str] = set()
        self.calls: list[tuple[int, torch.Tensor, Any]] = []
        self.tuple_length: int | None = None
        self.handed: dict[int, torch.Tensor] = {}
        self.side_input: int | None = None

    def outside(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that are not (in) a decoder layer."""
        for name, module in self.model.named_modules():
            if name != self.list_name and not name.startswith(self.list_name + "."):
                yield name, module

    def run(self) -> None:
        handles = []
        for name, module in self.outside():
            handles.append(module.register_forward_pre_hook(self._note_call(name)))
        for index, layer in enumerate(self.layers):
            handles.append(layer.register_forward_hook(self._note_layer(index), with_kwargs=True))
        try:
            device = next(self.model.parameters()).device
            ids = torch.zeros(2, 4, dtype=torch.long, device=device)
            with torch.enable_grad(), traceable(self.model):
                self.model(input_ids=ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()

    def check_chain(self) -> None:
        """Every layer ran once, in order, on what the one before returned."""
        family = self.model.config.model_type
        if [index for index, _, _ in self.calls] != list(range(len(self.layers))):
            raise UncuttableError(family, "its layers do not run once each in their order")
        if self.side_input is not None:
            raise UncuttableError(family, f"layer {self.side_input} is handed more than the hidden state")
        lengths = {len(result) if isinstance(result, tuple | list) else None for _, _, result in self.calls}
        if len(lengths) > 1:
            raise UncuttableError(family, "its layers return different things")
        self.tuple_length = lengths.pop()
        for (_, _, result), (index, hidden, _) in zip(self.calls, self.calls[1:], strict=False):
            if _first(result) is not hidden:
                raise UncuttableError(family, f"layer {index} does not take what layer {index - 1} returned")

    def _note_call(self, name: str) -> Any:
        def note(module: nn.Module, arguments: Any) -> None:
            (self.after if len(self.calls) == len(self.layers) else self.before).add(name)

        return note

    def _note_layer(self, index: int) -> Any:
        def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
            hidden = hidden_argument(arguments, keywords)
            self.calls.append((index, hidden, result))
            # Seen after the layer ran: what it left in a shared container for the layers behind it counts too.
            for tensor in _tensors([arguments, keywords]):
                if tensor is not hidden and (tensor.requires_grad or id(tensor) in self.handed):
                    self.side_input = index if self.side_input is None else self.side_input
            self.handed |= {id(tensor): tensor for tensor in _tensors(result)}

        return note


def hidden_argument(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    """The hidden state among the arguments of a layer or block: the first one, or the one of that name."""
    value: torch.Tensor = arguments[0] if arguments else keywords["hidden_states"]
    return value


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple | list) else result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors(inner)


class UncuttableError(ModelError):
    """A model that cannot be cut into pipeline stages, and why."""

    def __init__(self, family: str, reason: str) -> None:
        self.family, self.reason = family, reason
        super().__init__(f"{family} cannot be cut into pipeline stages: {reason}. Set parallel.pp=1.")

    def __reduce__(self) -> tuple[type["UncuttableError"], tuple[str, str]]:
        return type(self), (self.family, self.reason)
