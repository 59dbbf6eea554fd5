"""ModelStructure: the parts of a causal LM that pipeline stages are made of, found by tracing its own forward pass.

A model consists of embeddings, a list of decoder layers, and a head. Names and details differ between families, so
nothing is looked up by name: one forward pass, on the meta device if the model is there, records which modules run
before, in and after the decoder layers. A model supports pipeline parallelism if each layer's output is the next one's
first input and nothing else passes between layers: trained tensors reach a layer only through its hidden state.
"""

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from toolkit.errors import ModelError, Refusal
from toolkit.files import reason_of


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """The order of modules in one model's forward pass. Names are those of `model.named_modules()`."""

    layers: str
    """The ModuleList of decoder layers."""
    count: int
    tuple_length: int | None
    """Number of values that a layer returns, the hidden state first; None if it returns only the hidden state."""
    before: frozenset[str]
    """Modules outside the layers that own parameters and run before the first layer."""
    after: frozenset[str]
    """Modules outside the layers that own parameters and run after the last layer. A module can also be in `before`;
    its parameters then act at both ends."""
    tied: Mapping[str, str]
    """Other names of a tied parameter -> the name under which Hugging Face saves it."""

    def layer_list(self, model: nn.Module) -> nn.ModuleList:
        """Return the decoder layers of `model`."""
        layers = model.get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers


def analyze_model(model: PreTrainedModel) -> ModelStructure:
    """Trace one forward pass of `model`. Raises UnsupportedPipelineError if its layers do not form a chain."""
    family = model.config.model_type
    check_model_kind(type(model), model.config)
    name, layers = decoder_layer_list(model)
    tied = tied_names(model)
    if any(len({_layer_index(name, owner) for owner in pair} - {None}) > 1 for pair in tied.items()):
        raise UnsupportedPipelineError(family, "layers share parameters")
    record = _Record(model, name, layers)
    try:
        record.run()
    except UnsupportedPipelineError:
        raise
    except Exception as error:
        first = textwrap.shorten(reason_of(error), 60, placeholder=" …")
        reason = f"its forward pass could not be followed ({first})"
        raise UnsupportedPipelineError(family, reason) from error
    record.check_chain()
    ancestors = {"", *(name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1))}
    owners = {owner for owner, module in record.outside() if next(module.parameters(recurse=False), None) is not None}
    # A module around the layers runs before and after them: its own parameters may act at both ends.
    around = ancestors & owners
    return ModelStructure(
        layers=name,
        count=len(layers),
        tuple_length=record.tuple_length,
        before=frozenset(around | (owners & record.before)),
        after=frozenset(around | (owners & record.after) | (owners - record.before - record.after)),
        tied=tied,
    )


def list_layers(model: PreTrainedModel) -> ModelStructure:
    """Find the decoder layers alone, which need not form a chain to be sharded one by one: for expert parallelism."""
    name, layers = decoder_layer_list(model)
    tied = tied_names(model)
    return ModelStructure(
        layers=name, count=len(layers), tuple_length=None, before=frozenset(), after=frozenset(), tied=tied
    )


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return, for every parameter with several names, each other name -> the first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
    return tied


def check_model_kind(model_class: type[PreTrainedModel], config: Any) -> None:
    """Check what a family declares, before a model is built. Raises UnsupportedPipelineError."""
    # The decoder of an encoder-decoder says otherwise in its config, but not in the config's class.
    if config.is_encoder_decoder or getattr(type(config), "is_encoder_decoder", False):
        raise UnsupportedPipelineError(config.model_type, "encoder-decoder")
    if model_class._is_stateful:
        raise UnsupportedPipelineError(config.model_type, "recurrent: a state runs along the sequence")


def decoder_layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the outermost ModuleList with one module per hidden layer; the decoder's if an image tower has one too."""
    config = model.config.get_text_config(decoder=True)
    # Of an encoder-decoder's config the first may count the encoder's.
    counts = [getattr(config, name, None) for name in ("num_hidden_layers", "num_layers", "decoder_layers")]
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [
        (name, module)
        for name, module in lists
        if len(module) in counts and not any(name.startswith(f"{parent}.") for parent, _ in lists)
    ]
    if not outer:
        raise UnsupportedPipelineError(model.config.model_type, "it has no list of decoder layers")
    if len(outer) > 1:
        decoder = set(model.get_decoder().modules())
        outer.sort(key=lambda entry: entry[1] not in decoder)
    return outer[0]


def _layer_index(layers: str, name: str) -> int | None:
    below = name.removeprefix(layers + ".")
    return None if below == name else int(below.split(".", 1)[0])


class _Record:
    """Hooks on every module while one forward pass runs."""

    def __init__(self, model: PreTrainedModel, list_name: str, layers: nn.ModuleList) -> None:
        self.model = model
        self.list_name = list_name
        self.layers = layers
        self.before: set[str] = set()
        self.after: set[str] = set()
        self.calls: list[tuple[int, torch.Tensor, Any]] = []
        self.tuple_length: int | None = None
        self.returned: dict[int, torch.Tensor] = {}
        self.side_input: int | None = None

    def outside(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that are not (in) a decoder layer."""
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
        """Raise unless every layer ran once, in order, on the output of the one before."""
        family = self.model.config.model_type
        if [index for index, _, _ in self.calls] != list(range(len(self.layers))):
            raise UnsupportedPipelineError(family, "its layers do not run once each in their order")
        if self.side_input is not None:
            raise UnsupportedPipelineError(family, f"layer {self.side_input} receives more than the hidden state")
        lengths = {len(result) if isinstance(result, tuple | list) else None for _, _, result in self.calls}
        if len(lengths) > 1:
            reason = "some of its layers return a tensor and others tuples, or tuples of different lengths"
            raise UnsupportedPipelineError(family, reason)
        self.tuple_length = lengths.pop()
        for (_, _, result), (index, hidden, _) in zip(self.calls, self.calls[1:], strict=False):
            if hidden_result(result) is not hidden:
                raise UnsupportedPipelineError(family, f"layer {index} does not take what layer {index - 1} returned")

    def _note_call(self, name: str) -> Any:
        def note(module: nn.Module, arguments: Any) -> None:
            (self.after if len(self.calls) == len(self.layers) else self.before).add(name)

        return note

    def _note_layer(self, index: int) -> Any:
        def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
            hidden = hidden_argument(arguments, keywords)
            self.calls.append((index, hidden, result))
            # After the layer ran, so that what it added to a shared container for later layers counts too.
            for tensor in _tensors([arguments, keywords]):
                if tensor is not hidden and (tensor.requires_grad or id(tensor) in self.returned):
                    self.side_input = index if self.side_input is None else self.side_input
            self.returned |= {id(tensor): tensor for tensor in _tensors(result)}

        return note


@contextmanager
def traceable(model: PreTrainedModel) -> Iterator[None]:
    """Let `model` run inside on the meta device, where tensors have shapes but no values.

    It runs as in training, except for dropout, layer drop, checkpointing and the choice of experts, whose shapes must
    not depend on values.
    """
    modes = [(module, module.training) for module in model.modules()]
    experts = model.get_experts_implementation()
    model.eval()
    model.set_experts_implementation("batched_mm")
    try:
        with _AnswerYes():
            yield
    finally:
        model.set_experts_implementation(experts)
        for module, mode in modes:
            module.training = mode


class _AnswerYes(TorchDispatchMode):
    """Answers for values that meta tensors do not have: True ("are all positions consecutive?") and 1.

    `nonzero` (the tokens of an expert) finds nothing.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        return func(*args, **(kwargs or {}))


def hidden_argument(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    """The hidden state among the arguments of a layer or block: the first one, or the one of that name."""
    value: torch.Tensor = arguments[0] if arguments else keywords["hidden_states"]
    return value


def hidden_result(result: Any) -> Any:
    """The hidden state in what a layer returned: the first of several results, or the only one."""
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


class UnsupportedPipelineError(ModelError):
    """A model that does not support pipeline parallelism, with the reason."""

    def __init__(self, family: str, reason: str) -> None:
        self.family = family
        self.reason = reason
        setting = ("pipeline parallelism", ("model_type", family))
        super().__init__(Refusal(field="parallel.pp", settings=setting, reason=reason, remedy=(("parallel.pp", 1),)))

    def __reduce__(self) -> tuple[type["UnsupportedPipelineError"], tuple[str, str]]:
        return type(self), (self.family, self.reason)
