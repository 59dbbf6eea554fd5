"""One pipeline stage: Hugging Face's own forward pass, run over the decoder layers of the stage.

The model keeps its structure. Layers of other stages are replaced by a NonLocalLayer at the same index; embeddings or
head of other stages keep their modules but no memory (zeros of stride 0). The model's own forward pass then creates
masks, rotary tables and everything else: the NonLocalLayer before the stage's first layer inserts the hidden state
received from the previous stage, and the one after its last layer raises StageExit with the result. The preamble runs
once per micro-batch and stage, and no family needs code of its own.

A rank that has several stages, chunks of the model, has the layers of all in one model. Each stage then has a list of
its own, with NonLocalLayers in place of what is not its own, that replaces the model's in its forward pass.

Dims: b samples, s positions, h hidden, v vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function, FunctionCtx
from transformers import PreTrainedModel

from toolkit.parallel.model_structure import ModelStructure, hidden_argument, hidden_result
from toolkit.parallel.packed_documents import documents_known
from toolkit.parallel.tensor.vocabulary import VocabParallelEmbedding

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


class _Chunk(nn.Module):
    """Decoder layers [start, stop): one stage of a rank. `layers` is the model's list as its forward pass sees it."""

    def __init__(self, layers: Sequence[nn.Module], start: int, stop: int, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.is_last = is_last
        self.start = start
        self.stop = stop
        # Layers of this stage belong to the model, and may be replaced there.
        self.others = nn.ModuleDict({str(i): m for i, m in enumerate(layers) if isinstance(m, NonLocalLayer)})
        entry = None if is_first else layers[start - 1]
        assert entry is None or isinstance(entry, NonLocalLayer)
        self.entry = entry
        if stop == len(layers) and not is_last:
            _end_with(layers[-1])
        elif not is_last:
            behind = layers[stop]
            assert isinstance(behind, NonLocalLayer)
            behind.ends_stage = True

    @contextmanager
    def as_layers(self, layers: nn.ModuleList) -> Iterator[None]:
        """Replace the model's layers by those of this stage inside."""
        every = layers._modules
        layers._modules = {name: self.others[name] if name in self.others else every[name] for name in every}
        try:
            yield
        finally:
            layers._modules = every


class PipelineStage(nn.Module):
    """The stages of one pipeline rank: decoder layers of `model`, its embeddings on the first, its head on the last.

    Stage k has decoder layers [bounds[k], bounds[k + 1]). `stages` are those of this rank, several where it has chunks
    of the model; `active` is the one that the next forward pass runs. `sequence_shards`: ranks over which the sequence
    is sharded between layers (sequence parallelism).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: ModelStructure,
        *,
        bounds: tuple[int, ...],
        stages: Sequence[int],
        sequence_shards: int = 1,
    ) -> None:
        super().__init__()
        self.model = model
        self.is_packed = False
        """Whether the next micro-batch has rows of several documents."""
        self.attending: Callable[[], AbstractContextManager[None]] = nullcontext
        """Returns a context for the next forward pass, where ranks share sequences."""
        self._router_sums: RouterSums | None = None
        self._receives_sums = False
        last = len(bounds) - 2
        self.is_first = 0 in stages
        self.is_last = last in stages
        self.active = stages[0]
        self._structure = structure
        self._sequence_shards = sequence_shards
        layers = structure.layer_list(model)
        whole = list(layers)
        self._chunks = nn.ModuleDict()
        for stage in stages:
            start, stop = bounds[stage : stage + 2]
            stage_layers = [
                layer if start <= index < stop else NonLocalLayer(layer, structure.tuple_length)
                for index, layer in enumerate(whole)
            ]
            self._chunks[str(stage)] = _Chunk(stage_layers, start, stop, is_first=stage == 0, is_last=stage == last)
        held = {index for stage in stages for index in range(bounds[stage], bounds[stage + 1])}
        for index, layer in enumerate(whole):
            if index not in held:
                layers[index] = NonLocalLayer(layer, structure.tuple_length)
        used: frozenset[str] = frozenset()
        if self.is_first:
            used |= structure.before
        if self.is_last:
            used |= structure.after
        used_parameters = {id(p) for name in used for p in model.get_submodule(name).parameters(recurse=False)}
        for name in sorted((structure.before | structure.after) - used):
            _drop_parameters(model.get_submodule(name), used_parameters)

    @property
    def entries(self) -> dict[int, NonLocalLayer]:
        """The modules that insert what stages of this rank receive, by the index of the layer that each replaces."""
        return {chunk.start - 1: chunk.entry for chunk in self._every_chunk() if chunk.entry is not None}

    @property
    def ends_model(self) -> bool:
        """Whether the active stage is the model's last, which has the head."""
        return self._chunk.is_last

    @property
    def _chunk(self) -> _Chunk:
        chunk = self._chunks[str(self.active)]
        assert isinstance(chunk, _Chunk)
        return chunk

    def _every_chunk(self) -> Iterator[_Chunk]:
        for chunk in self._chunks.values():
            assert isinstance(chunk, _Chunk)
            yield chunk

    def connect_routers(self, sums: RouterSums, *, have_loss: bool) -> None:
        """Call `sums` after each forward pass. Where routers have a loss, stages hand on what it returns."""
        self._router_sums = sums
        self._receives_sums = have_loss

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
        chunk = self._chunk
        layers = self._structure.layer_list(self.model)
        first, *following = inputs if isinstance(inputs, tuple) else (inputs,)
        sums = None
        if self._receives_sums and chunk.entry is not None:
            sums = first
            first = following.pop(0)
        keywords = {"position_ids": following[0]} if following else {}
        if chunk.entry is None:
            ids = first
        else:
            # After the last layer the sequence is gathered; a stage may have nothing but the head.
            shards = 1 if chunk.start == len(layers) else self._sequence_shards
            ids = torch.zeros(first.shape[0], first.shape[1] * shards, dtype=torch.long, device=first.device)
            chunk.entry.received = first
        try:
            with (
                documents_known(are_packed=self.is_packed),
                self.attending(),
                chunk.as_layers(layers),
                self._idle_embedding(chunk),
            ):
                output = self.model(input_ids=ids, use_cache=False, **keywords)
        except StageExit as end:
            if self._router_sums is not None:
                sums = self._router_sums(sums)
            outputs = (end.hidden,) if sums is None else _together(sums, end.hidden)
            return (*outputs, *following)
        finally:
            if chunk.entry is not None:
                chunk.entry.received = None
        if self._router_sums is not None:
            self._router_sums(sums)
        return output.logits if output.loss is None else output.loss

    @contextmanager
    def _idle_embedding(self, chunk: _Chunk) -> Iterator[None]:
        """Look nothing up inside where a rank has the embedding for another of its stages: ranks would sum for it."""
        embedding = self.model.get_input_embeddings()
        if chunk.is_first or not self.is_first or not isinstance(embedding, VocabParallelEmbedding):
            yield
            return
        embedding.is_idle = True
        try:
            yield
        finally:
            embedding.is_idle = False


def _together(sums: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both outputs of a stage, such that their gradients run through the stage together.

    DeepSpeed's engine calls `backward` on each output of a stage, which would run through all of its layers for each.
    So the gradient of the first output is held until `backward` is called on the second one, the hidden state.
    """
    held: list[torch.Tensor] = []
    return _HoldGradient.apply(sums, hidden, held), _AddHeldGradient.apply(hidden, sums, held)


class _HoldGradient(Function):
    """A copy of the sums. Backward: the gradient goes no further, but into `held`."""

    @staticmethod
    def forward(ctx: FunctionCtx, sums: torch.Tensor, hidden: torch.Tensor, held: list[torch.Tensor]) -> Any:
        # Of the hidden state it only takes that a gradient is required, which a stage without routers lacks in `sums`.
        ctx.held = held  # type: ignore[attr-defined]
        return sums.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.held.append(gradient)
        return None, None, None


class _AddHeldGradient(Function):
    """The hidden state. Backward: its gradient, and to the sums the one in `held`."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: torch.Tensor, sums: torch.Tensor, held: list[torch.Tensor]) -> Any:
        ctx.held = held  # type: ignore[attr-defined]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        assert len(ctx.held) == 1, "backward is called on the sums of the routers before the hidden state"
        return gradient, ctx.held.pop(), None


def _end_with(layer: nn.Module) -> None:
    """Leave the model after its last layer, after which there is no NonLocalLayer: the next stage has only the head.

    It is the class that changes, because Python looks `__call__` up there. A hook would run, and raise, inside
    activation checkpointing; a module around the layer would change the names of its parameters.
    """
    family = type(layer)

    def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        result = family.__call__(module, *arguments, **keywords)
        raise StageExit(hidden_result(result))

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
