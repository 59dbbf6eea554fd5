"""One pipeline stage: Hugging Face's own forward pass, run over the decoder layers that the stage owns.

The model keeps its shape. Layers of other stages become placeholders at their own index; embeddings or head of other
stages keep their modules but lose their memory (zeros of stride 0). The model's forward pass then runs as always and
builds masks, rotary tables and all else by itself: the placeholder in front of the stage's first layer puts in the
hidden state that the previous stage sent, and the one behind its last layer takes the result and ends the pass. The
preamble therefore runs once per micro-batch and stage, and no family needs code of its own.

Dims: b samples, s positions, h hidden, v vocabulary.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.families.anatomy import Anatomy, hidden_argument

ZERO = "zero_of_another_stage"
"""The buffer of a module whose parameters another stage owns."""


class StageEnd(Exception):  # noqa: N818 - not an error: how the forward pass is left
    """Carries the hidden state of the stage's last layer out of the model's forward pass."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class LayerElsewhere(nn.Module):
    """The place of a decoder layer that another stage owns. Has the layer's plain attributes: models read some."""

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
        """Methods of the layer that models call on each: here they have nothing to do."""
        kind = self.__dict__.get("_layer_class")
        if kind is not None and not hasattr(nn.Module, name) and callable(getattr(kind, name, None)):
            return lambda *arguments, **keywords: None
        return super().__getattr__(name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Leave the model, or pass on what another stage computed (or anything, where nobody will look)."""
        hidden = hidden_argument(arguments, keywords)
        if self.ends_stage:
            raise StageEnd(hidden)
        result = hidden if self.received is None else self.received
        return result if self.tuple_length is None else (result, *(None,) * (self.tuple_length - 1))


class PipelineStage(nn.Module):
    """Decoder layers [start, stop) of `model`, with its embeddings on the first stage and its head on the last.

    `sequence_shards`: ranks over which the hidden state's sequence lies split between layers (sequence parallelism).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        anatomy: Anatomy,
        *,
        bounds: tuple[int, ...],
        stage: int,
        sequence_shards: int = 1,
    ) -> None:
        super().__init__()
        self.model = model
        self.is_first, self.is_last = stage == 0, stage == len(bounds) - 2
        start, stop = bounds[stage], bounds[stage + 1]
        layers = anatomy.layer_list(model)
        # Behind the last layer the sequence is whole again, and a stage may have nothing but the head.
        self.sequence_shards = 1 if start == len(layers) else sequence_shards
        for index in range(len(layers)):
            if not start <= index < stop:
                layers[index] = LayerElsewhere(layers[index], anatomy.tuple_length)
        entry = None if self.is_first else layers[start - 1]
        assert entry is None or isinstance(entry, LayerElsewhere)
        self._entry = entry
        if stop == len(layers) and not self.is_last:
            _end_with(layers[-1])
        elif not self.is_last:
            behind = layers[stop]
            assert isinstance(behind, LayerElsewhere)
            behind.ends_stage = True
        used = (anatomy.before if self.is_first else frozenset()) | (anatomy.after if self.is_last else frozenset())
        kept = {id(p) for name in used for p in model.get_submodule(name).parameters(recurse=False)}
        for name in sorted((anatomy.before | anatomy.after) - used):
            _drop_parameters(model.get_submodule(name), kept)

    def cast_elsewhere(self, dtype: torch.dtype) -> None:
        """Give the zeros that stand for other stages' parameters the dtype of this stage's.

        Rotary tables, masks and the like take the dtype of the embeddings, which may be among them.
        """
        for module in self.model.modules():
            if is_elsewhere(module):
                module._buffers[ZERO] = module.get_buffer(ZERO).to(dtype)

    def forward(self, inputs: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        """First stage: (input_ids [b, s], …) in; later ones: (hidden [b, s, h], …). Out: the same with a hidden state.

        The last stage returns logits [b, s, v]. What follows the first tensor is position_ids [b, s], handed on.
        """
        first, *rest = inputs if isinstance(inputs, tuple) else (inputs,)
        keywords = {"position_ids": rest[0]} if rest else {}
        if self._entry is None:
            ids = first
        else:
            samples, positions = first.shape[0], first.shape[1] * self.sequence_shards
            ids = torch.zeros(samples, positions, dtype=torch.long, device=first.device)
            self._entry.received = first
        try:
            logits = self.model(input_ids=ids, use_cache=False, **keywords).logits
        except StageEnd as end:
            return (end.hidden, *rest)
        finally:
            if self._entry is not None:
                self._entry.received = None
        return logits


def _end_with(layer: nn.Module) -> None:
    """Leave the model after its last layer, behind which no placeholder lies: the next stage has the head alone.

    Not by a hook: that would run, and raise, inside activation checkpointing.
    """
    family = type(layer)

    def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        result = family.__call__(module, *arguments, **keywords)
        raise StageEnd(result[0] if isinstance(result, tuple | list) else result)

    layer.__class__ = type(f"{family.__name__}EndsStage", (family,), {"__call__": call})


def _drop_parameters(module: nn.Module, kept: set[int]) -> None:
    """Replace a module's own parameters by zeros that take no memory: its forward pass still runs, for nobody.

    A parameter that another module of this stage owns too stays, because it is there anyway: a tied embedding beside
    the head keeps its name that way. So does a frozen one: a table of sines, say, may reach the layers by another way
    than the hidden state.
    """
    own = module.named_parameters(recurse=False)
    dropped = [(name, p) for name, p in own if p.requires_grad and id(p) not in kept]
    if not dropped:
        return
    # One number that moves and casts with the module; expanded when asked for, for a moved expansion takes memory.
    module.register_buffer(ZERO, torch.zeros((), dtype=dropped[0][1].dtype), persistent=False)
    views = {}
    for name, parameter in dropped:
        del module._parameters[name]
        views[name] = _expanded(parameter.shape)
    family = type(module)
    module.__class__ = type(f"{family.__name__}Elsewhere", (family,), views)


def _expanded(shape: torch.Size) -> property:
    return property(lambda module: getattr(module, ZERO).expand(shape))


def is_elsewhere(module: nn.Module) -> bool:
    """Whether the module is one whose parameters another stage owns."""
    return ZERO in module._buffers
