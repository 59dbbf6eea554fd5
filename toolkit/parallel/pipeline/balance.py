"""Count the cost of each part of a model, by which pipeline stages are balanced (`toolkit.config.stage_balance`)."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from toolkit.config.layout import Recompute
from toolkit.config.stage_balance import CPU_FLOPS_PER_BYTE, Costs, recompute_cost
from toolkit.parallel.model_structure import ModelStructure, traceable

_WITH_WEIGHTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
"""The kernels of linear layers; the matrix products of attention are batched or fused."""


def count_costs(
    model: PreTrainedModel,
    structure: ModelStructure,
    *,
    seq_len: int,
    micro_batch_size: int,
    recompute: Recompute = "none",
    flops_per_byte: float = CPU_FLOPS_PER_BYTE,
) -> Costs:
    """Count the cost of each part of `model` in one forward pass, which takes no memory on the meta device.

    Derivation. Matrix products are counted as they run, and three times: the backward pass has two for each, for the
    gradients of the input and of the weight. `recompute` runs the layers' forward, but not the head's, once more; or of
    it only attention between its projections, which is every product but those of activations with weights. Two things
    are bound by memory instead, and count as the FLOPs that a layer does in that time. A parameter's gradient is
    written once a micro-batch and added to the sum of those before: two reads, two writes. The loss passes over the
    fp32 logits six times: log-softmax reads and writes them, the gradient at the targets is a tensor of their size, and
    the gradient of log-softmax reads two and writes one. A cast from and to 16 bits is two passes more.

    Known error, of the head by a layer, in fp32 on one core for GPT-2 of hidden 256 to 768: within 5 %
    (vocabulary 50,257, samples of 128 to 512), 9 % too high (vocabulary 8,192) and 7 % too low (samples of 1,024, where
    a causal kernel does half of the products of attention that are counted). Embeddings come out a third too low, which
    is a tenth of a layer. The optimizer step is not counted.
    """
    layers = structure.layer_list(model)
    counted, logits = count_flops(model, layers, seq_len)
    forward = [flops / seq_len for flops, _ in counted]
    weighted = [flops / seq_len for _, flops in counted]

    def gradients(modules: Iterable[nn.Module], *, recurse: bool) -> float:
        parameters = (parameter for module in modules for parameter in module.parameters(recurse=recurse))
        bytes_moved = sum(4 * parameter.numel() * parameter.element_size() for parameter in parameters)
        return flops_per_byte * bytes_moved / (micro_batch_size * seq_len)

    before = gradients(map(model.get_submodule, structure.before), recurse=False)
    after = gradients(map(model.get_submodule, structure.after), recurse=False)
    per_layer = zip(forward[1:-1], weighted[1:-1], layers, strict=True)
    return Costs(
        before=3 * forward[0] + before,
        layers=tuple(
            3 * flops + recompute_cost(recompute, index, flops, with_weights) + gradients([layer], recurse=True)
            for index, (flops, with_weights, layer) in enumerate(per_layer)
        ),
        after=3 * forward[-1] + after + flops_per_byte * _loss_bytes(logits),
    )


def count_flops(
    model: PreTrainedModel, layers: Iterable[nn.Module], seq_len: int
) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Run a forward pass over one sample; return (all FLOPs, those of products with weights) of each part, and logits.

    The parts are what runs before the layers, each layer, and what runs behind them.
    """
    counter = FlopCounterMode(display=False)
    marks = [(0, 0)]

    def mark(*_: Any) -> None:
        by_kernel = counter.get_flop_counts().get("Global", {})
        marks.append((counter.get_total_flops(), sum(by_kernel.get(kernel, 0) for kernel in _WITH_WEIGHTS)))

    handles = [layer.register_forward_pre_hook(mark) for layer in layers]
    handles.append(list(layers)[-1].register_forward_hook(mark))
    try:
        ids = torch.zeros(1, seq_len, dtype=torch.long, device=next(model.parameters()).device)
        with torch.no_grad(), traceable(model), counter:
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    mark()
    spans = pairwise(marks)
    return [(stop[0] - start[0], stop[1] - start[1]) for start, stop in spans], logits


def _loss_bytes(logits: torch.Tensor) -> int:
    """Return the bytes that the loss of one token and its gradient read and write."""
    casts = 2 * (4 + logits.element_size()) if logits.element_size() < 4 else 0
    return (6 * 4 + casts) * logits.shape[-1]
