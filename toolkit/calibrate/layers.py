"""Seconds of a decoder layer and a head beyond their matrix products: GPT-2's, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from toolkit.calibrate.kernels import pass_seconds
from toolkit.hardware import Gpu
from toolkit.models.shape import ModelShape
from toolkit.parallel.loss import token_loss_sum
from toolkit.planner.execution import Execution
from toolkit.planner.layer_time import RankWork, head_seconds, layer_seconds
from toolkit.planner.passes import Passes

_RUN = Execution(precision="fp32")
_INFINITE = (1e300, 1e300)
_Model = Callable[[Gpu, ModelShape, RankWork, Execution], Passes]
"""A function of the time model: `layer_seconds` or `head_seconds`."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A GPT-2 of one layer, of which the time model knows the products and measures the rest."""

    hidden: int = 384
    vocab: int = 6144
    large: tuple[int, int] = (4, 128)
    """Samples and positions of a micro-batch."""
    small: tuple[int, int] = (1, 32)

    def rates(self, gpu: Gpu, seconds: float) -> dict[str, tuple[float, float]]:
        """Measure the fields of CoreRates that a layer and a head tell, each of both passes.

        `gpu` is a CPU's rank whose products and attention are known.
        """
        # The small one is so narrow that its weights are in the caches, and hardly anything but Python takes time.
        small = gpt2(64, self.vocab)
        large = gpt2(self.hidden, self.vocab)
        small_passes = _layer_passes(small, self.small, seconds)
        large_passes = _layer_passes(large, self.large, seconds)
        head_passes = _head_passes(large, self.large, seconds)
        layer_rates = []
        layer_overheads = []
        loss_rates = []
        for direction in ("forward", "backward"):
            few = _Beyond.of(small_passes, layer_seconds, gpu, small, self.small, direction)
            many = _Beyond.of(large_passes, layer_seconds, gpu, large, self.large, direction)
            rate, overhead = _line(few, many)
            layer_rates.append(rate)
            layer_overheads.append(overhead)
            loss = _Beyond.of(head_passes, head_seconds, gpu, large, self.large, direction)
            loss_rates.append(loss.moved_bytes / max(loss.seconds, 1e-9))
        return {
            "layer_bytes_per_second": (layer_rates[0], layer_rates[1]),
            "layer_seconds": (layer_overheads[0], layer_overheads[1]),
            "loss_bytes_per_second": (loss_rates[0], loss_rates[1]),
        }


@dataclass(frozen=True, kw_only=True)
class _Beyond:
    """The part of one pass that the time model does not know yet: seconds, and the bytes that kernels move in them."""

    seconds: float
    moved_bytes: float

    @classmethod
    def of(
        cls, measured: Passes, model_of: _Model, gpu: Gpu, model: Any, size: tuple[int, int], direction: str
    ) -> Self:
        known_seconds, moved_bytes = _known(model_of, gpu, model, size, direction)
        return cls(seconds=getattr(measured, direction) - known_seconds, moved_bytes=moved_bytes)


def _line(few: _Beyond, many: _Beyond) -> tuple[float, float]:
    """Return (bytes a second, seconds without any bytes) of the line through two measurements.

    Where the larger one took hardly longer, or less, the rate is bounded: noise gives neither a negative nor an
    infinite one.
    """
    longer = max(many.seconds - few.seconds, 1e-3 * many.seconds, 1e-9)
    rate = (many.moved_bytes - few.moved_bytes) / longer
    return rate, max(0.0, few.seconds - few.moved_bytes / rate)


def gpt2(hidden: int, vocab: int = 256) -> Any:
    """Return a GPT-2 of one layer, in evaluation mode: without dropout."""
    config = GPT2Config(n_embd=hidden, n_head=hidden // 64, n_layer=1, vocab_size=vocab)
    return AutoModelForCausalLM.from_config(config).eval()


def _known(model_of: _Model, gpu: Gpu, model: Any, size: tuple[int, int], direction: str) -> tuple[float, float]:
    """Return the seconds that the time model knows already, and the bytes that element-wise kernels move.

    The model gives both: its seconds where memory is infinitely fast, and what a rate of one byte a second adds.
    """
    core = gpu.core
    assert core is not None
    work = RankWork(tokens=size[0] * size[1], seq_len=size[1], tp=1, sequence_parallel=False)
    shape = ModelShape.from_config(model.config.to_dict())
    seconds = []
    for rate in (_INFINITE, (1.0, 1.0)):
        changed_core = replace(core, layer_bytes_per_second=rate, loss_bytes_per_second=rate)
        passes = model_of(replace(gpu, core=changed_core), shape, work, _RUN)
        seconds.append(getattr(passes, direction))
    return seconds[0], seconds[1] - seconds[0]


def _layer_passes(model: Any, size: tuple[int, int], seconds: float) -> Passes:
    layer = model.transformer.h[0]
    inputs = torch.randn(*size, model.config.n_embd, requires_grad=True)

    def call() -> torch.Tensor:
        output = layer(inputs)
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    forward, backward = pass_seconds(call, [inputs, *layer.parameters()], seconds)
    return Passes(forward=forward, backward=backward)


def _head_passes(model: Any, size: tuple[int, int], seconds: float) -> Passes:
    norm = model.transformer.ln_f
    head = model.lm_head
    inputs = torch.randn(*size, model.config.n_embd, requires_grad=True)
    labels = torch.randint(model.config.vocab_size, size)
    leaves = [inputs, *norm.parameters(), *head.parameters()]
    forward, backward = pass_seconds(lambda: token_loss_sum(head(norm(inputs)), labels), leaves, seconds)
    return Passes(forward=forward, backward=backward)


def layer_times(hidden: int, size: tuple[int, int], seconds: float) -> float:
    """Measure the seconds of both passes of a layer together, for comparison with ranks beside it."""
    passes = _layer_passes(gpt2(hidden), size, seconds)
    return passes.forward + passes.backward
