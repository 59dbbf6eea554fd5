"""Floating-point operations of training, per token, and the model FLOPs utilization (MFU) they give.

Legend: N = weights that multiply activations, L = layers, h = width of all query heads, s = tokens in a sample.
"""

from toolkit.models.shape import ModelShape, layer_matmul_parameters, matmul_parameters


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
        flops += 2 * shape.layers * layer_matmul_parameters(shape) + attention
    return flops


def mfu(tokens_per_second_per_gpu: float, shape: ModelShape, seq_len: int, peak_flops: float) -> float:
    """Model FLOPs utilization: FLOP/s of one GPU over its peak. Recomputed FLOPs do not count (PaLM, appendix B)."""
    return tokens_per_second_per_gpu * train_flops_per_token(shape, seq_len) / peak_flops
