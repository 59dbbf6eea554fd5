"""Seconds that one rank computes for one micro-batch: a decoder layer, the embeddings, and the head with its loss.

Legend: T tokens of the micro-batch on this rank, s positions, h hidden, q k widths of queries and keys, f width of the
MLP, v vocabulary, t tensor-parallel ranks.
"""

from dataclasses import dataclass
from functools import lru_cache

from toolkit.hardware import Gpu, MatmulPrecision
from toolkit.models.shape import ModelShape
from toolkit.planner.execution import QUANTIZED, Execution
from toolkit.planner.kernels import fraction, matmul_seconds, stream_seconds
from toolkit.planner.trained import Trained

COMPILED_SHARE = 0.5
"""Of the element-wise traffic that is left where torch.compile fuses chains of kernels: each reads and writes once."""
_RATES = {"flash1": (0.33, 0.28), "flash2": (0.60, 0.53), "flash3": (0.60, 0.48), "cudnn": (0.60, 0.48)}
"""Shares of the 16-bit peak, forward and backward, for heads of 128 and long sequences. Sources: FlashAttention (Dao et
al. 2022) and FlashAttention-2 (Dao 2023, figures 5 to 7: causal, on an A100), FlashAttention-3 (Shah et al. 2024,
figures 5 and 6: on an H100, with cuDNN's)."""
_BEFORE_HOPPER = 400e12
"""FlashAttention-2 uses no instructions of Hopper: on later GPUs its rate is about 0.35 of the peak (FlashAttention-3,
figure 5)."""
_OLD_KERNEL = 0.58
_PRODUCTS = (4, 8)
"""Bytes moved per score by the matrix products in 16 bits: written and read forward; both twice backward."""
_SCORES = {"fused-softmax": (4, 6), "unfused": (28, 22), "eager": (22, 16)}
"""By softmax and mask: one kernel; kernels of their own that convert to fp32 and back."""
_DROPOUT = (5, 5)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of the forward and of the backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(forward=self.forward + other.forward, backward=self.backward + other.backward)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rank computes of a micro-batch. `tokens` are those of its sequence shard."""

    tokens: int
    seq_len: int
    tp: int
    sequence_parallel: bool
    heads_split: int = 1
    """Ranks that share the heads of one sequence besides tp: Ulysses."""


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
def layer_seconds(gpu: Gpu, shape: ModelShape, work: Work, run: Execution, trained: Trained | None = None) -> Passes:
    """A decoder layer without its communication and without the recomputation of anything."""
    share = 1.0 if trained is None else trained.share
    linear = sum((_linear(gpu, one, run.unit, share) for one in products(shape, work)), Passes())
    seconds = linear + attention_seconds(gpu, shape, work, run) + _streams(gpu, shape, work, run)
    if trained is None:
        return seconds
    forward, backward = trained.adapter_seconds(gpu, work.tokens, work.tp, run.activation_bytes)
    return seconds + Passes(forward=forward, backward=backward)


@lru_cache(maxsize=4096)
def head_seconds(gpu: Gpu, shape: ModelShape, work: Work, run: Execution, trained: Trained | None = None) -> Passes:
    """Final norm, LM head and loss."""
    vocab = -(-shape.vocab // work.tp)
    forward, backward = run.facts["loss"].get(run.loss, run.facts["loss"]["plain"])
    logits = work.tokens * vocab
    rates = (None, None) if gpu.core is None else gpu.core.loss_bytes_per_second
    loss = Passes(
        forward=stream_seconds(gpu, logits * forward, 6, reached=rates[0]),
        backward=stream_seconds(gpu, logits * backward, 4, reached=rates[1]),
    )
    share = 1.0 if trained is None else float(trained.has_head)
    return _linear(gpu, (work.tokens, vocab, shape.embed_dim), run.wide, share) + loss


@lru_cache(maxsize=4096)
def embedding_seconds(
    gpu: Gpu, shape: ModelShape, work: Work, run: Execution, trained: Trained | None = None
) -> Passes:
    """Looking rows up, and adding their gradients to an otherwise empty table."""
    rows = work.tokens * shape.hidden * run.activation_bytes
    table = shape.vocab * shape.embed_dim // work.tp * run.activation_bytes
    trains = trained is None or trained.has_embeddings
    backward = stream_seconds(gpu, 4 * rows + 3 * table, 5) if trains else 0.0
    return Passes(forward=stream_seconds(gpu, 3 * rows, 3), backward=backward)


def _linear(gpu: Gpu, product: tuple[int, int, int], unit: MatmulPrecision, trained: float) -> Passes:
    """The product, then the gradients of its input and of the share of its weight that trains."""
    m, n, k = product
    forward = matmul_seconds(gpu, m, n, k, unit)
    of_weight = trained * matmul_seconds(gpu, k, n, m, unit)
    return Passes(forward=forward, backward=matmul_seconds(gpu, m, k, n, unit) + of_weight)


def attention_seconds(gpu: Gpu, shape: ModelShape, work: Work, run: Execution) -> Passes:
    """Scores, softmax and weighted sum of all heads of a rank: causal, as kernels that skip masked blocks have it."""
    heads = shape.heads / work.tp / work.heads_split
    tokens = work.tokens * work.heads_split
    width = shape.head_dim if shape.latent is None else (shape.head_dim + shape.latent.value_dim) / 2
    flops = 4.0 * tokens * work.seq_len * heads * width
    peak = gpu.peak_flops(run.wide) or gpu.fp32_flops
    if gpu.core is not None:
        rates = gpu.core.attention[run.wide]
        return Passes(forward=flops / 2 / rates[0], backward=2.5 * flops / 2 / rates[1])
    if run.attention not in _SCORES:
        forward, backward = _RATES[run.attention]
        older = _OLD_KERNEL if peak > _BEFORE_HOPPER and run.attention in ("flash1", "flash2") else 1.0
        # Softmax costs narrow heads as much as wide ones, whose products are larger.
        narrow = min(1.0, 0.5 + shape.head_dim / 256)
        # Blocks on the diagonal are half empty, and pipelines of loads have to fill.
        rate = peak * older * narrow * work.seq_len / (work.seq_len + 512)
        return Passes(
            forward=flops / 2 / (rate * forward) + gpu.kernel_seconds,
            backward=2.5 * flops / 2 / (rate * backward) + 2 * gpu.kernel_seconds,
        )
    scores = heads * tokens * work.seq_len * run.activation_bytes / 2
    seconds = []
    for way, (passes, touched) in enumerate(zip((1, 2), _PRODUCTS, strict=True)):
        # Products over narrow heads write or read every score: they are as often bound by memory as by their units.
        product = max(passes * flops / (fraction(gpu, run.wide) * peak), stream_seconds(gpu, scores * touched, 0))
        rest = _SCORES[run.attention][way] + (_DROPOUT[way] if run.dropout else 0)
        seconds.append(product + stream_seconds(gpu, scores * rest, 6))
    return Passes(forward=seconds[0], backward=seconds[1])


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
        reached = None if gpu.core is None else gpu.core.layer_bytes_per_second[way]
        seconds.append(stream_seconds(gpu, moved, 10 if way == 0 else 14, reached=reached))
    return Passes(forward=seconds[0], backward=seconds[1])
