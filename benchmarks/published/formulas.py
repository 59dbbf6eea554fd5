"""What the formulas of others say of a published run, derived anew from their descriptions; in bytes on one rank.

Each is read in its own favour where it is silent: parameters count per model-parallel rank where it knows no tensor or
pipeline parallelism. A formula says nothing (None) of what its authors leave out altogether.

Letters: P parameters of the model, N of a rank after tensor and pipeline cuts, D data-parallel ranks, L layers, b s h
a v micro-batch, positions, hidden size, heads, vocabulary, f width of the MLP, t p tensor and pipeline ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from published.rows import Row


@dataclass(frozen=True, kw_only=True)
class FormulaBytes:
    """What a formula says of a rank: at the peak, and between two steps. None where it says nothing."""

    peak: float | None = None
    static: float | None = None


Formula = Callable[[Row], FormulaBytes]


def parameter_count(row: Row) -> int:
    """P: embeddings, positions where they are learned, L layers, the norm behind them, and the head where it is untied.

    A layer: queries and output h² each, keys and values h²k/a each, 2hf or, gated, 3hf, two norms, and biases where the
    norm is LayerNorm.
    """
    h, f = row.hidden, row.ffn
    kv = h * row.kv_heads // row.heads
    is_llama = "RMSNorm" in row.arch or row.gated_mlp
    norm = h if is_llama else 2 * h
    biases = 0 if is_llama else (h + 2 * kv) + h + f + h
    layer = 2 * h * h + 2 * h * kv + (3 if row.gated_mlp else 2) * h * f + 2 * norm + biases
    tables = row.vocab * h * (1 if row.tied_emb else 2) + (0 if is_llama else row.seq_len * h)
    return row.layers * layer + tables + norm


def deepspeed(row: Row) -> FormulaBytes:
    """ZeRO-2: 2N + 18N/D; ZeRO-3: 4 x largest module + 18N/D. Model states alone, without activations and buckets.

    Source: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs, and
    runtime/zero/stage3.py, estimate_zero3_model_states_mem_needs, both without offload. 18 is a 16-bit and a 32-bit
    gradient, a 32-bit weight and two moments. The largest module is one that has parameters of its own: a single linear
    layer or embedding. ZeRO-0 and ZeRO-1 have no formula.
    """
    if row.zero not in (2, 3) or row.dp is None:
        return FormulaBytes()
    held = parameter_count(row) / (row.tp * row.pp)
    if row.zero == 2:
        states = 2 * held + 18 * held / row.dp
        return FormulaBytes(peak=states, static=states)
    h, f = row.hidden, row.ffn
    largest = max(row.vocab * h, h * f, h * h + 2 * h * h * row.kv_heads // row.heads) / row.tp
    return FormulaBytes(peak=4 * largest + 18 * held / row.dp, static=18 * held / row.dp)


def megatron(row: Row) -> FormulaBytes:
    """18 bytes a parameter of the first stage, or 6 + 12/D with a distributed optimizer, and activations.

    Activations of the first stage, of all L layers, for it keeps L/p layers of p micro-batches: L sbh(18 + 4f/h)/t with
    sequence parallelism and selective recomputation, else L sbh(10 + 24/t) and 5 % on top, whatever is recomputed.
    Logits where p = 1; an interleaved schedule multiplies by 1 + (p - 1)/(p x chunks).
    Source: Megatron-LM, megatron/training/theoretical_memory_usage.py.
    """
    if row.dp is None:
        return FormulaBytes()
    is_sharded = "dist" in row.optimizer_sharding or bool(row.zero)
    states = _megatron_parameters(row) * (6 + 12 / row.dp if is_sharded else 18)
    return FormulaBytes(peak=states + _megatron_activations(row), static=states)


def _megatron_parameters(row: Row) -> float:
    """Of the stage that holds most: L/p layers and one embedding, a second one where p = 1 and the head is untied."""
    h, f = row.hidden, row.ffn
    norm = h if "RMSNorm" in row.arch else 2 * h
    matrices = 2 * h * h * (1 + row.kv_heads / row.heads) + 2 * h * f * (3 / 2 if row.gated_mlp else 1)
    tables = 1 if row.tied_emb or row.pp > 1 else 2
    split = row.layers * matrices / row.pp + tables * row.vocab * h
    return split / row.tp + (row.layers * 2 * norm + norm) / row.pp


def _megatron_activations(row: Row) -> float:
    s, b, h, t, p = row.seq_len, row.micro_batch, row.hidden, row.tp, row.pp
    selective = row.sp and row.recompute.startswith("selective")
    layer = s * b * h * (18 + 4 * row.ffn / h if selective else 10 + 24 / t)
    total = row.layers * layer + 8 * s * b * p + s * b * h * p
    if row.vpp is not None and row.vpp > 1 and p > 1:
        total *= 1 + (p - 1) / (p * row.vpp)
    elif p > 1 and row.micro_batches is not None:
        total *= min(1, row.micro_batches / p)
    if selective:
        return (total + (4 * s * b * h * (1 + row.vocab / h) if p == 1 else 0)) / t
    return 1.05 * (total + (2 * s * b * (row.vocab / t + h) if p == 1 else 0))


def eleuther(row: Row) -> FormulaBytes:
    """Weights 2P/(tp), gradients 4P, 12P of states, divided over GPUs from ZeRO-3, 2 and 1 on; buckets; activations.

    GPUs are all of them, not D. Activations are L sbh x 34, without recomputation plus 5as/h, of all L layers whatever
    t and p are. Buckets: 5e8 elements from ZeRO-1 on, 1e9 more under ZeRO-3. Positions count, and the embedding twice.
    Source: EleutherAI's cookbook, calc/calc_transformer_mem.py; its ZeRO stage, where none is given, is 1.
    """
    if row.n_gpus is None:
        return FormulaBytes()
    h, s, gpus, zero = row.hidden, row.seq_len, row.n_gpus, 1 if row.zero is None else row.zero
    linears = 3 if row.gated_mlp else 2
    matrices = 2 * (1 + row.kv_heads / row.heads) * h * h + linears * h * row.ffn
    total = 2 * row.vocab * h + h * s + row.layers * (8 * h + matrices) + 2 * h
    weights = 2 * total / (row.tp * row.pp) / (gpus if zero == 3 else 1)
    gradients = 4 * total / (gpus if zero >= 2 else 1)
    states = 12 * total / (gpus if zero >= 1 else 1)
    buckets = 0.0
    if gpus > 1:
        buckets = 2 * 5e8 * (zero >= 1) + 2 * 1e9 * (zero == 3)
    layer = 34 if row.recompute == "full" else 34 + 5 * row.heads * s / h
    activations = s * row.micro_batch * h * row.layers * layer
    if "partition_activations=True" in row.notes:
        activations /= row.tp
    static = weights + gradients + states
    return FormulaBytes(peak=static + buckets + activations, static=static)


def accelerate(row: Row) -> FormulaBytes:
    """One GPU that holds everything: 16P in fp32, 8P in 16 bits. Nothing of sharding, nothing of activations.

    Source: accelerate 1.15, commands/estimate.py: the largest of weights 4P, gradients 6P, moments 8P and update 8P.
    """
    if row.tp * row.pp > 1 or (row.zero or 0) > 0:
        return FormulaBytes()
    return FormulaBytes(peak=(16 if row.precision == "fp32" else 8) * parameter_count(row))


FORMULAS: Mapping[str, Formula] = {
    "DeepSpeed": deepspeed,
    "Megatron": megatron,
    "EleutherAI": eleuther,
    "accelerate": accelerate,
}
