"""Trained: which weights of a model train, as far as the time of a step depends on it.

The backward pass of a linear layer has two products: the gradient of its input, which what comes before needs, and that
of its weight, which only a weight that trains has. A gradient is reduced, and updates something, where one exists.

An adapter of rank r beside a layer [o, i] adds (B (A x)) s to its output. Its products have few FLOPs (r is small) and
are bound by memory, as are scaling and addition, which peft runs as kernels of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from toolkit.estimate.parameters import ModelParameters, Parameter
from toolkit.hardware import Gpu
from toolkit.models.shape import ModelShape
from toolkit.models.weights import head_matmul_parameters, layer_matmul_parameters
from toolkit.planner.kernels import stream_seconds
from toolkit.planner.passes import BACKWARD, FORWARD, Passes, PassPair

_A = ".lora_A."
_B = ".lora_B."
_INPUT_MOVES = PassPair(1, 5)
_OUTPUT_MOVES = PassPair(6, 4)
"""Reads and writes of an adapter's inputs and outputs by its kernels. Forward: A reads x; B writes; scaling and adding
read three and write two. Backward: scaling reads and writes the gradient, dB and the gradient of B's input read it; dA
reads x, the gradient of x is written, and added to that of the layer."""
_DROPOUT_MOVES = PassPair(8, 4)
"""Reads and writes of an adapter's inputs by its dropout: random numbers in fp32, the mask, two products."""
_KERNELS = PassPair(4, 7)
"""Kernels of an adapter."""
HOST_SHARES = (0.20, 0.13)
"""Host time of an adapter as shares of a layer's, forward and backward: peft beside the seven linear layers of a Llama,
in layers so small that a CPU takes no time for their numbers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """The parameters that train where some are frozen. Layers are averaged. Compared by identity."""

    layer: float
    """Parameters that train, of a decoder layer."""
    outside: int
    """Parameters that train outside the decoder layers."""
    share: float
    """Share of the weights that train, among those of linear layers that the backward pass reaches."""
    reached: float
    """Share of the layers that it reaches: it ends at the first one in which something trains."""
    has_embeddings: bool
    has_head: bool
    """Whether the LM head trains; `has_embeddings`: whether the embeddings do."""
    adapters: tuple[tuple[Parameter, Parameter], ...]
    """A and B of each adapter of a layer."""
    dropout: bool

    @classmethod
    def of(cls, model: ModelParameters, *, dropout: bool) -> Self:
        """Read which parameters of a model train."""
        layers = [model.kinds[kind] for kind in model.pattern]
        has_embeddings = any(parameter.trainable for parameter in model.outside if parameter.first)
        first_reached = 0 if has_embeddings else _first_trained(layers)
        linear = [
            parameter
            for layer in layers[first_reached:]
            for parameter in layer
            if parameter.is_linear and _A not in parameter.name and _B not in parameter.name
        ]
        return cls(
            layer=sum(map(_trained_weights, layers)) / len(layers),
            outside=_trained_weights(model.outside),
            share=_trained_weights(linear) / max(1, sum(parameter.numel for parameter in linear)),
            reached=1 - first_reached / len(layers),
            has_embeddings=has_embeddings,
            has_head=any(parameter.trainable for parameter in model.outside if parameter.is_head),
            adapters=_adapters(layers[-1]),
            dropout=dropout,
        )

    @cached_property
    def recomputed(self) -> "Trained":
        """Return these weights with recomputed layers: transformers lets the backward pass go through all of them."""
        return replace(self, reached=1.0, share=self.share * self.reached)

    @cached_property
    def adapter_weights(self) -> int:
        """Weights of a layer's adapters."""
        return sum(p.numel for pair in self.adapters for p in pair)

    def flops_per_token(self, shape: ModelShape, seq_len: int) -> float:
        """FLOPs of forward and backward for one token, as `train_flops_per_token` counts them.

        Known error: the first layer in which something trains computes no gradient of its own input, unless something
        before it trains or layers are recomputed.
        """
        layers = shape.layers
        adapters = layers * self.adapter_weights
        weights = layers * layer_matmul_parameters(shape)
        head = head_matmul_parameters(shape)
        attention = 4 * layers * shape.attention_dim * seq_len
        forward = 2 * (weights + head) + attention
        backward = self.reached * (2 * weights * (1 + self.share) + 2 * attention) + 2 * head * (1 + self.has_head)
        return forward + backward + 6 * adapters

    def adapter_seconds(self, gpu: Gpu, tokens: int, tp: int, activation_bytes: int) -> Passes:
        """Return the seconds of a layer's adapters; tp shards their inputs or outputs."""
        seconds = Passes()
        for a, b in self.adapters:
            rank = a.shape[0]
            inputs = sum(a.local_numels(tp)) // rank
            outputs = sum(b.local_numels(tp)) // rank
            forward_bytes = tokens * activation_bytes * self._moves(inputs, outputs, FORWARD)
            backward_bytes = tokens * activation_bytes * self._moves(inputs, outputs, BACKWARD)
            seconds += Passes(
                forward=stream_seconds(gpu, forward_bytes, _KERNELS.forward),
                backward=stream_seconds(gpu, backward_bytes, _KERNELS.backward),
            )
        return seconds

    def _moves(self, inputs: int, outputs: int, direction: int) -> float:
        """Numbers that an adapter of these sizes reads and writes for each token in one pass."""
        input_moves = _INPUT_MOVES[direction]
        if self.dropout:
            input_moves += _DROPOUT_MOVES[direction]
        return input_moves * inputs + _OUTPUT_MOVES[direction] * outputs


def _first_trained(layers: Sequence[Sequence[Parameter]]) -> int:
    """Return the first layer in which something trains; the number of layers where none does."""
    for index, layer in enumerate(layers):
        if any(parameter.trainable for parameter in layer):
            return index
    return len(layers)


def _trained_weights(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.numel for parameter in parameters if parameter.trainable)


def _adapters(layer: Sequence[Parameter]) -> tuple[tuple[Parameter, Parameter], ...]:
    """Return A and B of each adapter of a layer."""
    by_name = {parameter.name: parameter for parameter in layer}
    return tuple((by_name[name], by_name[name.replace(_A, _B)]) for name in by_name if _A in name)
