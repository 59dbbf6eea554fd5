"""DropoutMasks: hashes of the dropout masks that a rank draws, for each layer and micro-batch of the first steps.

Nothing that is computed changes: a mask is drawn a second time from the generator's state before it, of ones, and the
state after it is restored.
"""

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from toolkit.engines.base import Engine
from toolkit.parallel.model_structure import decoder_layer_list
from toolkit.parallel.pipeline.stage import NonLocalLayer
from toolkit.parallel.tensor.adapter_layers import AdapterDropout
from toolkit.parallel.tensor.region import drops_activations
from toolkit.parity.masks import PROJECTIONS, Mask

_DROPOUT = F.dropout
_ATTENTION = F.scaled_dot_product_attention
_OUTSIDE = "the embeddings"
"""Place of calls that are in no decoder layer."""
_FEWEST_DROPPED = 64
"""Dropped elements to expect in a mask that is compared: small masks may be equal by chance."""
_ELEMENTS = 4096
"""Elements of an activation that are projected."""


class DropoutMasks:
    """Records from `start` to `stop`; `masks` has what was drawn. Set `step` where a step begins."""

    @classmethod
    def of(cls, engine: Engine) -> "DropoutMasks | None":
        """Return a recorder for a model that drops activations or inputs of adapters; None for others.

        None also for compiled layers, whose masks are drawn inside of a graph.
        """
        if engine.compiled is not None:
            return None
        drops = drops_activations(engine.model.config)
        drops |= any(isinstance(module, AdapterDropout) for module in engine.model.modules())
        return cls(engine) if drops else None

    def __init__(self, engine: Engine) -> None:
        self.masks: list[Mask] = []
        self.step = 1
        self._device = engine.device
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._layer = _OUTSIDE
        self._calls = 0
        self._forwards: Counter[str] = Counter()
        self._directions = np.random.default_rng(0).normal(size=(_ELEMENTS, PROJECTIONS))
        place, layers = decoder_layer_list(engine.model)
        self._hooks: list[Any] = []
        for index, layer in enumerate(layers):
            if isinstance(layer, NonLocalLayer):
                continue
            self._hooks.append(layer.register_forward_pre_hook(self._entering(f"{place}.{index}")))
            self._hooks.append(layer.register_forward_hook(self._leave))
            # A recomputation may begin inside of the layer's own hooks.
            self._hooks += [
                child.register_forward_pre_hook(self._recomputing(f"{place}.{index}")) for child in layer.children()
            ]
        for module in engine.model.modules():
            if isinstance(module, AdapterDropout):
                self._hooks.append(module.register_forward_hook(self._after_adapter))

    def start(self) -> None:
        """Record from here on."""
        # Not a TorchFunctionMode, which the backward pass does not run under when it recomputes.
        F.dropout = self._dropout
        F.scaled_dot_product_attention = self._attention

    def stop(self) -> None:
        """Record no more, and remove the hooks."""
        F.dropout = _DROPOUT
        F.scaled_dot_product_attention = _ATTENTION
        for hook in self._hooks:
            hook.remove()

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if training and 0 < p < 1:
            before = self._state()
            with torch.no_grad():
                mask = _DROPOUT(torch.ones_like(input), p) != 0
            self._restore(before)
            self._add(input, p, _hash(np.packbits(mask.cpu().numpy()).tobytes(), input.shape))
        return _DROPOUT(input, p, training, inplace)

    def _attention(self, query: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        share = keywords.get("dropout_p", arguments[3] if len(arguments) > 3 else 0.0)
        if share:
            # A fused kernel shows no mask: it follows from the generator's state and the shapes.
            self._add(query, share, _hash(self._state().numpy().tobytes(), query.shape))
        return _ATTENTION(query, *arguments, **keywords)

    def _state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def _restore(self, state: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, arguments: Any) -> None:
            self._layer = name
            self._calls = 0
            if not _is_recomputed():
                self._forwards[name] += 1

        return enter

    def _recomputing(self, name: str) -> Any:
        def enter(module: nn.Module, arguments: Any) -> None:
            if _is_recomputed():
                self._layer = name

        return enter

    def _leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        self._layer = _OUTSIDE
        self._calls = 0

    def _after_adapter(self, module: AdapterDropout, arguments: Any, result: torch.Tensor) -> None:
        if module.training:
            mask = (result != 0) | (arguments[0] == 0)
            self._add(arguments[0], module.share, _hash(np.packbits(mask.cpu().numpy()).tobytes(), result.shape))

    def _add(self, x: torch.Tensor, share: float, drawn: bytes) -> None:
        call = self._calls
        self._calls += 1
        if x.numel() * share < _FEWEST_DROPPED:
            return
        flat = x.detach().reshape(-1)
        elements = flat[:: max(1, len(flat) // _ELEMENTS)][:_ELEMENTS].double().cpu().numpy()
        if not elements.any():
            return  # nothing to drop: the last stage of a pipeline looks embeddings up that it has no use for
        projections = elements @ self._directions[: len(elements)]
        self.masks.append(
            Mask(
                rank=self._rank,
                layer=self._layer,
                call=call,
                step=self.step,
                micro_batch=max(self._forwards.values(), default=1),
                drawn=drawn,
                activation=tuple(projections.tolist()),
                is_recomputed=_is_recomputed(),
            )
        )


def _hash(content: bytes, shape: torch.Size) -> bytes:
    return hashlib.blake2b(content + repr(tuple(shape)).encode(), digest_size=16).digest()


def _is_recomputed() -> bool:
    """Whether this runs in a backward pass."""
    return torch._C._current_graph_task_id() != -1
