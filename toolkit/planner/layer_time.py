"""Seconds that one rank computes for one micro-batch: a decoder layer, the embeddings, and the head with its loss.

Legend: T tokens of the micro-batch on this rank, s positions, h hidden, q k widths of queries and keys, f width of the
MLP, v vocabulary, t tensor-parallel ranks.
"""

from functools import lru_cache

from toolkit.hardware import Gpu, MatmulPrecision
from toolkit.models.shape import ModelShape
from toolkit.planner.attention_time import attention_seconds
from toolkit.planner.execution import QUANTIZED, Execution
from toolkit.planner.kernels import matmul_seconds, stream_seconds
from toolkit.planner.passes import Passes, Work

COMPILED_SHARE = 0.5
"""Of the element-wise traffic that is left where torch.compile fuses chains of kernels: each reads and writes once."""


def products(shape: ModelShape, work: Work) -> list[tuple[int, int, int]]:
    """The matrix products of a layer's forward pass on one rank, as (m, n, k)."""
    tokens, t = work.tokens, work.tp
    h = shape.hidden
    mlp = [(tokens, (2 if shape.gated else 1) * shape.ffn // t, h), (tokens, h, shape.ffn // t)]
    if shape.latent is not None:  # projections of its own shapes: the same products as two square ones
        weights = shape.latent.matmul_parameters(h, shape.heads) // t
        return [(tokens, weights // (2 * h), h), (tokens, h, weights // (2 * h)), *mlp]
    keys = max(shape.head_dim, shape.kv_dim // t)
    return [(tokens, shape.attention_dim // t + 2 * keys, h), (tokens, h, shape.attention_dim // t), *mlp]


@lru_cache(maxsize=65536)
def layer_seconds(gpu: Gpu, shape: ModelShape, work: Work, run: Execution) -> Passes:
    """A decoder layer without its communication and without the recomputation of anything."""
    linear = sum((_linear(gpu, one, run.unit) for one in products(shape, work)), Passes())
    return linear + attention_seconds(gpu, shape, work, run) + _streams(gpu, shape, work, run)


@lru_cache(maxsize=4096)
def head_seconds(gpu: Gpu, shape: ModelShape, work: Work, run: Execution) -> Passes:
    """Final norm, LM head and loss."""
    vocab = -(-shape.vocab // work.tp)
    forward, backward = run.facts["loss"].get(run.loss, run.facts["loss"]["plain"])
    logits = work.tokens * vocab
    loss = Passes(forward=stream_seconds(gpu, logits * forward, 6), backward=stream_seconds(gpu, logits * backward, 4))
    return _linear(gpu, (work.tokens, vocab, shape.embed_dim), run.wide) + loss


@lru_cache(maxsize=4096)
def embedding_seconds(gpu: Gpu, shape: ModelShape, work: Work, run: Execution) -> Passes:
    """Looking rows up, and adding their gradients to an otherwise empty table."""
    rows = work.tokens * shape.hidden * run.activation_bytes
    table = shape.vocab * shape.embed_dim // work.tp * run.activation_bytes
    return Passes(forward=stream_seconds(gpu, 3 * rows, 3), backward=stream_seconds(gpu, 4 * rows + 3 * table, 5))


def _linear(gpu: Gpu, product: tuple[int, int, int], unit: MatmulPrecision) -> Passes:
    """The product, then the gradients of its input and of its weight."""
    m, n, k = product
    forward = matmul_seconds(gpu, m, n, k, unit)
    return Passes(forward=forward, backward=matmul_seconds(gpu, m, k, n, unit) + matmul_seconds(gpu, k, n, m, unit))


def _streams(gpu: Gpu, shape: ModelShape, work: Work, run: Execution) -> Passes:
    """Element-wise kernels by the bytes that they move, and the casts of 8 and 4-bit products."""
    facts, size = run.facts, run.activation_bytes / 2
    whole = work.tokens * shape.hidden * (1 / work.tp if work.sequence_parallel else 1)
    mlp = work.tokens * shape.ffn / work.tp
    heads = work.tokens * (shape.attention_dim + 2 * shape.kv_dim) / work.tp
    norm = facts["norm"] if run.fused_norm or "unfused_norm" not in facts else facts["unfused_norm"]
    rotary = (0, 0) if shape.learned_positions else facts["rotary"]
    dropout = facts["dropout"] if run.dropout else (0, 0)
    seconds = []
    for way in (0, 1):
        moved = whole * 2 * (norm[way] + facts["residual"][way] + dropout[way])
        moved += mlp * facts["activation"]["gated" if shape.gated else "plain"][way]
        moved += heads * (rotary[way] + facts["copies"][way])
        moved *= size * (COMPILED_SHARE if run.compiled else 1)
        if run.precision in QUANTIZED:
            inputs = work.tokens * (2 * shape.hidden + shape.attention_dim / work.tp) + mlp
            outputs = work.tokens * 2 * shape.hidden + heads + mlp * (2 if shape.gated else 1)
            moved += QUANTIZED[run.precision] * (inputs if way == 0 else outputs)
        seconds.append(stream_seconds(gpu, moved, 10 if way == 0 else 14))
    return Passes(forward=seconds[0], backward=seconds[1])
