"""One pipeline stage: Hugging Face's own forward pass, run over the decoder layers of the stage.

The model keeps its structure. Layers of other stages are replaced by a NonLocalLayer at the same index; embeddings or
head of other stages keep their modules but no memory (zeros of stride 0). The model's own forward pass then creates
masks, rotary tables and everything else: the NonLocalLayer before the stage's first layer inserts the hidden state
received from the previous stage, and the one after its last layer raises StageExit with the result. The preamble runs
once per micro-batch and stage, and no family needs code of its own.

Dims: b samples, s positions, h hidden, v vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function, FunctionCtx
from transformers import PreTrainedModel

from toolkit.parallel.model_structure import ModelStructure, hidden_argument
from toolkit.parallel.packed_documents import documents_known

ZERO = "zero_of_another_stage"
"""The buffer that marks a module whose parameters another stage owns."""


RouterSums = Callable[[torch.Tensor | None], torch.Tensor | None]
"""Adds the sums over this stage's routers to those that the stage before handed on; None where routers have no loss."""


class StageExit(Exception):  # noqa: N818 - not an error: how the forward pass is left
    """Leaves the model's forward pass with the hidden state of the stage's last layer."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class NonLocalLayer(nn.Module):
    """Replaces a decoder layer of another stage. Has the layer's plain attributes, some of which models read."""

    def __init__(self, layer: nn.Module, tuple_length: int | None) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training" and not isinstance(value, torch.Tensor | nn.Module):
                setattr(self, name, value)
        self._layer_class = type(layer)
        self.tuple_length = tuple_length
        self.ends_stage = False
        self.received: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Return a no-op for methods of the layer that models call on each layer."""
        kind = self.__dict__.get("_layer_class")
        if kind is not None and not hasattr(nn.Module, name) and callable(getattr(kind, name, None)):
            return lambda *arguments, **keywords: None
        return super().__getattr__(name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Leave the model, or return what another stage computed (before the entry, any value: it is not used)."""
        hidden = hidden_argument(arguments, keywords)
        if self.ends_stage:
            raise StageExit(hidden)
        result = hidden if self.received is None else self.received
        if self.tuple_length is None:
            return result
        missing = [None] * (self.tuple_length - 1)
        return (result, *missing)


class PipelineStage(nn.Module):
    """Decoder layers [start, stop) of `model`, with its embeddings on the first stage and its head on the last.

    `sequence_shards`: ranks over which the sequence is sharded between layers (sequence parallelism).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: ModelStructure,
        *,
        bounds: tuple[int, ...],
        stage: int,
        sequence_shards: int = 1,
    ) -> None:
        super().__init__()
        self.model = model
        self.is_packed = False
        self.attending: Callable[[], AbstractContextManager[None]] = nullcontext
        """Returns a context for the next forward pass, where ranks share sequences."""
        """Whether the next micro-batch has rows of several documents."""
        self._router_sums: RouterSums | None = None
        self._receives_sums = False
        self.is_first = stage == 0
        self.is_last = stage == len(bounds) - 2
        start = bounds[stage]
        stop = bounds[stage + 1]
        layers = structure.layer_list(model)
        # After the last layer the sequence is gathered; a stage may have nothing but the head.
        self.sequence_shards = 1 if start == len(layers) else sequence_shards
        for index in range(len(layers)):
            if not start <= index < stop:
                layers[index] = NonLocalLayer(layers[index], structure.tuple_length)
        entry = None if self.is_first else layers[start - 1]
        assert entry is None or isinstance(entry, NonLocalLayer)
        self._entry = entry
        if stop == len(layers) and not self.is_last:
            _end_with(layers[-1])
        elif not self.is_last:
            behind = layers[stop]
            assert isinstance(behind, NonLocalLayer)
            behind.ends_stage = True
        used: frozenset[str] = frozenset()
        if self.is_first:
            used |= structure.before
        if self.is_last:
            used |= structure.after
        used_parameters = {id(p) for name in used for p in model.get_submodule(name).parameters(recurse=False)}
        for name in sorted((structure.before | structure.after) - used):
            _drop_parameters(model.get_submodule(name), used_parameters)

    def connect_routers(self, sums: RouterSums, *, have_loss: bool) -> None:
        """Call `sums` after each forward pass. Where routers have a loss, stages hand on what it returns."""
        self._router_sums = sums
        self._receives_sums = have_loss and self._entry is not None

    def cast_nonlocal(self, dtype: torch.dtype) -> None:
        """Cast the zeros that replace other stages' parameters to the dtype of this stage's parameters.

        Rotary tables and masks take the dtype of the embeddings, which may be among them.
        """
        for module in self.model.modules():
            if is_nonlocal(module):
                module._buffers[ZERO] = module.get_buffer(ZERO).to(dtype)

    def forward(self, inputs: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        """Map (input_ids [b, s], …), on later stages (hidden [b, s, h], …), to (hidden [b, s, h], …).

        The last stage returns logits [b, s, v], or the loss where its head computes it. The optional second tensor is
        position_ids [b, s], passed on unchanged. Where routers have a loss, the sums of their outputs precede the
        hidden state.
        """
        first, *following = inputs if isinstance(inputs, tuple) else (inputs,)
        sums = None
        if self._receives_sums:
            sums = first
            first = following.pop(0)
        keywords = {"position_ids": following[0]} if following else {}
        if self._entry is None:
            ids = first
        else:
            samples = first.shape[0]
            positions = first.shape[1] * self.sequence_shards
            ids = torch.zeros(samples, positions, dtype=torch.long, device=first.device)
            self._entry.received = first
        try:
            with documents_known(are_packed=self.is_packed), self.attending():
                output = self.model(input_ids=ids, use_cache=False, **keywords)
        except StageExit as end:
            if self._router_sums is not None:
                sums = self._router_sums(sums)
            outputs = (end.hidden,) if sums is None else _together(sums, end.hidden)
            return (*outputs, *following)
        finally:
            if self._entry is not None:
                self._entry.received = None
        if self._router_sums is not None:
            self._router_sums(sums)
        return output.logits if output.loss is None else output.loss


def _together(sums: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both outputs of a stage, such that their gradients run through the stage together.

    DeepSpeed calls `backward` on each output of a stage, which would run through all of its layers for each. So the
    gradient of the first output waits for that of the hidden state.
    """
    gradients: list[torch.Tensor] = []
    return _Waits.apply(sums, hidden, gradients), _Releases.apply(hidden, sums, gradients)


class _Waits(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, sums: torch.Tensor, hidden: torch.Tensor, gradients: list[torch.Tensor]) -> Any:
        # Of the hidden state it only takes that a gradient is required, which a stage without routers lacks in `sums`.
        ctx.gradients = gradients  # type: ignore[attr-defined]
        return sums.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.gradients.append(gradient)
        return None, None, None


class _Releases(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden: torch.Tensor, sums: torch.Tensor, gradients: list[torch.Tensor]) -> Any:
        ctx.gradients = gradients  # type: ignore[attr-defined]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, ctx.gradients.pop(), None


def _end_with(layer: nn.Module) -> None:
    """Leave the model after its last layer, after which there is no NonLocalLayer: the next stage has only the head.

    It is the class that changes, because Python looks `__call__` up there. A hook would run, and raise, inside
    activation checkpointing; a module around the layer would change the names of its parameters.
    """
    family = type(layer)

    def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        result = family.__call__(module, *arguments, **keywords)
        raise StageExit(result[0] if isinstance(result, tuple | list) else result)

    layer.__class__ = type(f"{family.__name__}EndsStage", (family,), {"__call__": call})


def _drop_parameters(module: nn.Module, shared: set[int]) -> None:
    """Replace a module's own parameters by zeros without memory: its forward pass still runs, but has no effect.

    A parameter that another module of this stage also owns stays: a tied embedding next to the head keeps its name. So
    does a frozen one: a table of sines, for example, may reach the layers by another path than the hidden state.
    """
    parameters = module.named_parameters(recurse=False)
    dropped = [(name, p) for name, p in parameters if p.requires_grad and id(p) not in shared]
    if not dropped:
        return
    # One number that moves and casts with the module, expanded on access: moving an expanded tensor takes memory.
    module.register_buffer(ZERO, torch.zeros((), dtype=dropped[0][1].dtype), persistent=False)
    views = {}
    for name, parameter in dropped:
        del module._parameters[name]
        views[name] = _expanded(parameter.shape)
    family = type(module)
    # The family's forward pass reads these names, and Python looks properties up on the class.
    module.__class__ = type(f"{family.__name__}Nonlocal", (family,), views)


def _expanded(shape: torch.Size) -> property:
    """Return a property whose value is the module's zero, expanded to a shape."""

    def zeros(module: nn.Module) -> torch.Tensor:
        expanded: torch.Tensor = getattr(module, ZERO).expand(shape)
        # A parent that initializes the weights of its children writes into those of this stage alone.
        expanded._is_hf_initialized = True  # type: ignore[attr-defined]
        return expanded

    return property(zeros)


def is_nonlocal(module: nn.Module) -> bool:
    """Whether another stage owns the module's parameters."""
    return ZERO in module._buffers
