"""Floating-point operations of training, per token, and the model FLOPs utilization (MFU) they give.

Legend: N = weights that a token multiplies (of routed experts those that it goes through), L = layers, h = width of all
query heads, s = tokens in a sample.
"""

from dataclasses import replace

from toolkit.estimate.parameters import ModelParameters
from toolkit.models.experts import ExpertShape
from toolkit.models.shape import ModelShape
from toolkit.models.weights import attention_matmul_parameters, layers_matmul_parameters, matmul_parameters


def train_flops_per_token(shape: ModelShape, seq_len: int, *, recompute: bool = False) -> int:
    """FLOPs of forward and backward for one token: 6N + 12Lhs, and with `recompute` the layers' forward once more.

    Derivation. A weight costs a token one multiplication and one addition forward; the backward pass does that twice,
    for the gradient of the input and of the weight: 6N. The scores of a token against s keys and the weighted sum of s
    values cost 2hs each a layer, three times over with the backward pass: 12Lhs. Recomputing every layer's forward adds
    2 a weight of the layers and 4Lhs, but not the LM head.

    Sources: Chowdhery et al. 2022 (PaLM), appendix B, where N is all parameters: here embeddings that are only looked
    up do not count. Narayanan et al. 2021 (SC21), section 3, is the `recompute` form: 96BsLh²(1 + s/6h + V/16Lh).

    Known error. Attention is counted full, as both papers do: a causal kernel does about half of 12Lhs, one with a
    sliding window less. Norms, activations, softmax, rotary embeddings, the loss and the optimizer are neglected, under
    1 % at h ≥ 1024. PyTorch's non-reentrant checkpointing stops before the last product of a layer: its recomputation
    costs 2·hidden·ffn a layer less.
    """
    attention = 4 * shape.layers * shape.attention_dim * seq_len
    flops = 6 * matmul_parameters(shape) + 3 * attention
    if recompute:
        flops += 2 * layers_matmul_parameters(shape) + attention
    return flops


def mfu(tokens_per_second_per_gpu: float, shape: ModelShape, seq_len: int, peak_flops: float) -> float:
    """Model FLOPs utilization: FLOP/s of one GPU over its peak. Recomputed FLOPs do not count (PaLM, appendix B)."""
    return tokens_per_second_per_gpu * train_flops_per_token(shape, seq_len) / peak_flops


def with_experts(shape: ModelShape, model: ModelParameters) -> ModelShape:
    """The shape with the routed experts that a model's parameters have, if there are any.

    Their products are the FLOPs that neither a linear layer nor attention has, so that the code of the model says how
    many experts a token goes through, and the rest of a layer's weights are the router's and shared experts'.
    """
    kinds = [[parameter for parameter in kind if parameter.is_experts] for kind in model.kinds]
    kind = next((index for index, experts in enumerate(kinds) if experts), None)
    if kind is None:
        return shape
    matrices = [parameter for parameter in kinds[kind] if len(parameter.shape) == 3]
    count = matrices[0].shape[0]
    expert_weights = sum(matrix.numel for matrix in matrices) // count
    down = next(matrix for matrix in matrices if "down" in matrix.name)
    flops = model.flops[1 + kind].flops[0]
    weighted = model.flops[1 + kind].with_weights[0]
    experts = ExpertShape(
        count=count,
        per_token=round((flops - weighted) / (2 * expert_weights)),
        weights=expert_weights,
        ffn=down.numel // count // shape.hidden,
        layers=sum(bool(kinds[index]) for index in model.pattern),
        biased=len(matrices) < len(kinds[kind]),
        always=max(0, round(weighted / 2) - attention_matmul_parameters(shape)),
    )
    return replace(
        shape, experts=experts, sinks=any(parameter.name.endswith("sinks") for parameter in model.kinds[kind])
    )


def has_these_flops(shape: ModelShape, model: ModelParameters, seq_len: int) -> bool:
    """Whether the formula for a shape counts what was counted while the model's own code ran, within 2 %."""
    layers = [model.flops[1 + kind] for kind in model.pattern]
    parts = (model.flops[0], model.flops[-1], *layers)
    counted = sum(part.flops_at(seq_len) for part in parts)
    return abs(train_flops_per_token(shape, seq_len) / (3 * counted) - 1) < 0.02
