"""What a decoder layer and the head of a model take beyond their matrix products: GPT-2's, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from toolkit.calibrate.kernels import pass_seconds
from toolkit.hardware import Gpu
from toolkit.models.shape import ModelShape
from toolkit.parallel.loss import token_loss_sum
from toolkit.planner.execution import Execution
from toolkit.planner.layer_time import Passes, Work, head_seconds, layer_seconds

_RUN = Execution(precision="fp32")
_INFINITE = (1e300, 1e300)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A GPT-2 of one layer, of which the time model knows the products and measures the rest."""

    hidden: int = 384
    vocab: int = 6144
    large: tuple[int, int] = (4, 128)
    """Samples and positions of a micro-batch."""
    small: tuple[int, int] = (1, 32)

    def rates(self, gpu: Gpu, seconds: float) -> dict[str, tuple[float, float]]:
        """The fields of CoreRates that a layer and a head tell, on a CPU whose products and attention are known."""
        found: dict[str, list[float]] = {"layer_bytes_per_second": [], "layer_seconds": [], "loss_bytes_per_second": []}
        # The small one is so narrow that its weights are in the caches, and hardly anything but Python takes time.
        models = [(gpt2(hidden, self.vocab), size) for hidden, size in ((64, self.small), (self.hidden, self.large))]
        times = [_layer_passes(model, size, seconds) for model, size in models]
        head = _head_passes(*models[1], seconds)
        for way in ("forward", "backward"):
            known = [_known(layer_seconds, gpu, model, size, way) for model, size in models]
            rest = [getattr(one, way) - products for one, (products, _) in zip(times, known, strict=True)]
            rate = (known[1][1] - known[0][1]) / max(rest[1] - rest[0], 1e-3 * rest[1], 1e-9)
            found["layer_bytes_per_second"].append(rate)
            found["layer_seconds"].append(max(0.0, rest[0] - known[0][1] / rate))
            products, moved = _known(head_seconds, gpu, *models[1], way)
            found["loss_bytes_per_second"].append(moved / max(getattr(head, way) - products, 1e-9))
        return {name: (pair[0], pair[1]) for name, pair in found.items()}


def gpt2(hidden: int, vocab: int = 256) -> Any:
    """A GPT-2 of one layer, without dropout."""
    config = GPT2Config(n_embd=hidden, n_head=hidden // 64, n_layer=1, vocab_size=vocab)
    return AutoModelForCausalLM.from_config(config).eval()


def _known(
    function: Callable[..., Passes], gpu: Gpu, model: Any, size: tuple[int, int], way: str
) -> tuple[float, float]:
    """Seconds that are known already, and the bytes that element-wise kernels move."""
    core = gpu.core
    assert core is not None
    work = Work(tokens=size[0] * size[1], seq_len=size[1], tp=1, sequence_parallel=False)
    shape, seconds = ModelShape.from_config(model.config.to_dict()), []
    for rate in (_INFINITE, (1.0, 1.0)):
        changed: Any = {"layer_bytes_per_second": rate, "loss_bytes_per_second": rate}
        changed_gpu = replace(gpu, core=replace(core, **changed))
        seconds.append(getattr(function(changed_gpu, shape, work, _RUN), way))
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
    norm, head = model.transformer.ln_f, model.lm_head
    inputs = torch.randn(*size, model.config.n_embd, requires_grad=True)
    labels = torch.randint(model.config.vocab_size, size)
    leaves = [inputs, *norm.parameters(), *head.parameters()]
    forward, backward = pass_seconds(lambda: token_loss_sum(head(norm(inputs)), labels), leaves, seconds)
    return Passes(forward=forward, backward=backward)


def layer_times(hidden: int, size: tuple[int, int], seconds: float) -> float:
    """Seconds of both passes of a layer, for comparison with ranks beside it."""
    passes = _layer_passes(gpt2(hidden), size, seconds)
    return passes.forward + passes.backward
