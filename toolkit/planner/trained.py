"""Trained: which weights of a model train, as far as the time of a step depends on it.

The backward pass of a linear layer has two products: the gradient of its input, which what comes before needs, and that
of its weight, which only a weight that trains has. A gradient is reduced, and updates something, where one exists.

An adapter of rank r beside a layer [o, i] adds (B (A x)) s to its output. Its products have few FLOPs (r is small) and
are bound by memory, as are scaling and addition, which peft runs as kernels of their own.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from toolkit.estimate.parameters import ModelParameters, Parameter
from toolkit.hardware import Gpu
from toolkit.models.shape import ModelShape
from toolkit.models.weights import head_matmul_parameters, layer_matmul_parameters
from toolkit.planner.kernels import stream_seconds

_A = ".lora_A."
_B = ".lora_B."
_INPUTS, _OUTPUTS = (1, 5), (6, 4)
"""Reads and writes of an adapter's inputs and outputs by its kernels, forward and backward. Forward: A reads x; B
writes; scaling and addition read three and write two. Backward: scaling reads and writes the gradient, dB and the
gradient of B's input read it; dA reads x, the gradient of x is written, and added to that of the layer."""
_DROPOUT = (8, 4)
"""Reads and writes of an adapter's inputs by its dropout, forward and backward: random numbers in fp32, the mask, two
products."""
_KERNELS = (4, 7)
"""Kernels of an adapter, forward and backward."""
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
        kinds = [model.kinds[kind] for kind in model.pattern]
        front = any(p.trainable for p in model.outside if p.first)
        below = 0 if front else next((i for i, kind in enumerate(kinds) if any(p.trainable for p in kind)), len(kinds))
        matrices = [p for kind in kinds[below:] for p in kind if p.is_linear and _A not in p.name and _B not in p.name]
        by_name = {p.name: p for p in kinds[-1]}
        return cls(
            layer=sum(p.numel for kind in kinds for p in kind if p.trainable) / len(kinds),
            outside=sum(p.numel for p in model.outside if p.trainable),
            share=sum(p.numel for p in matrices if p.trainable) / max(1, sum(p.numel for p in matrices)),
            reached=1 - below / len(kinds),
            has_embeddings=front,
            has_head=any(p.trainable for p in model.outside if p.is_head),
            adapters=tuple((p, by_name[name.replace(_A, _B)]) for name, p in by_name.items() if _A in name),
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

    def adapter_seconds(self, gpu: Gpu, tokens: int, tp: int, activation_bytes: int) -> tuple[float, float]:
        """Return the seconds of a layer's adapters, forward and backward; tp shards their inputs or outputs."""
        forward = backward = 0.0
        for a, b in self.adapters:
            rank = a.shape[0]
            inputs = sum(a.local_numels(tp)) // rank
            outputs = sum(b.local_numels(tp)) // rank
            passes = [
                stream_seconds(
                    gpu,
                    tokens
                    * activation_bytes
                    * ((_INPUTS[way] + _DROPOUT[way] * self.dropout) * inputs + _OUTPUTS[way] * outputs),
                    _KERNELS[way],
                )
                for way in (0, 1)
            ]
            forward += passes[0]
            backward += passes[1]
        return forward, backward
