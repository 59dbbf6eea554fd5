"""Seconds that one rank computes for one micro-batch: a decoder layer, the embeddings, and the head with its loss.

Legend: T tokens of the micro-batch on this rank, s positions, h hidden, q k widths of queries and keys, f width of the
MLP, v vocabulary, t tensor-parallel ranks.

Layers with and without experts count as one mean layer. Of routed experts the busiest rank counts.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from toolkit.hardware import Gpu, MatmulPrecision
from toolkit.models.experts import ExpertShape
from toolkit.models.shape import ModelShape
from toolkit.planner.execution import QUANTIZED, Execution
from toolkit.planner.kernels import fraction, matmul_seconds, stream_seconds
from toolkit.planner.trained import Trained

COMPILED_SHARE = 0.5
"""Share of the element-wise traffic that is left where torch.compile fuses chains of kernels: each reads and writes
once."""
_RATES = {"flash1": (0.33, 0.28), "flash2": (0.60, 0.53), "flash3": (0.60, 0.48), "cudnn": (0.60, 0.48),
          "flex": (0.54, 0.45)}  # fmt: skip
"""Shares of the 16-bit peak, forward and backward, for heads of 128 and long sequences. Sources: FlashAttention (Dao et
al. 2022) and FlashAttention-2 (Dao 2023, figures 5 to 7: causal, on an A100), FlashAttention-3 (Shah et al. 2024,
figures 5 and 6: on an H100, with cuDNN's). FlexAttention reaches 90 and 85 % of FlashAttention-2 (PyTorch's blog,
"FlexAttention: The Flexibility of PyTorch with the Performance of FlashAttention")."""
_BEFORE_HOPPER = 400e12
"""FlashAttention-2 uses no instructions of Hopper: on later GPUs its rate is about 0.35 of the peak (FlashAttention-3,
figure 5)."""
_OLD_KERNEL = 0.58
"""Share of their rate that kernels without instructions of Hopper reach from Hopper on."""
_OLD_KERNELS = ("flash1", "flash2", "flex")
"""Kernels without instructions of Hopper."""
_PRODUCTS = (4, 8)
"""Bytes moved per score by the matrix products in 16 bits: written and read forward; both twice backward."""
_SINKS = (12, 34)
"""Bytes moved per element of what FlexAttention returns, which knows no sinks: it is scaled by the log-sum-exp, in fp32
and by kernels of its own (NeMo Automodel, components/attention/flex_attention.py)."""
_SCORES = {"fused-softmax": (4, 6), "unfused": (28, 22), "eager": (22, 16), "tiles": (48, 84)}
"""Bytes moved per score by softmax and mask, forward and backward: in one kernel, or in kernels of their own that
convert to fp32 and back. `tiles`: those that context parallelism's attention multiplies by PyTorch's products, in fp32:
converted, scaled, masked, summed, subtracted, exponentiated and converted forward; the first three, the exponential and
the derivative backward (toolkit/parallel/context/kernels.py)."""
TILE = 512
"""Queries of a tile of theirs in a layer with a window: it sees as many keys more than its window has."""
_DROPOUT = (5, 5)
"""Bytes moved per score by dropout, forward and backward."""
_ROUTER = (24, 24)
"""Bytes moved per router logit, in fp32: softmax, choice and normalization forward; the same backward."""
_ROUTING_KERNELS = (16, 20)
"""Kernels of a layer's routing, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of the forward and of the backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(forward=self.forward + other.forward, backward=self.backward + other.backward)

    def __rmul__(self, share: float) -> "Passes":
        return Passes(forward=share * self.forward, backward=share * self.backward)


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """The work of one rank on a micro-batch. `tokens` are those of its sequence shard."""

    tokens: int
    seq_len: int
    tp: int
    sequence_parallel: bool
    heads_split: int = 1
    """Ranks that share the heads of one sequence besides tp: Ulysses."""
    context: int = 1
    """Context-parallel ranks, whose attention is the toolkit's own where there are several."""
    routed_rows: float = 0.0
    """Routed rows, pairs of a token and an expert, that the busiest rank computes; 0 without experts."""
    expert_owners: int = 1
    """Ranks that share out the experts, each of which is on one of them."""
    expert_shards: int = 1
    """Tensor-parallel ranks that shard every expert."""


Product = tuple[int, int, int]
"""The sizes (m, n, k) of a matrix product."""


def attention_products(shape: ModelShape, work: RankWork) -> list[Product]:
    """The projections of a layer's attention on one rank, forward."""
    tokens = work.tokens
    t = work.tp
    h = shape.hidden
    if shape.latent is not None:  # projections of its own shapes: the same products as two square ones
        weights = shape.latent.matmul_parameters(h, shape.heads) // t
        return [(tokens, weights // (2 * h), h), (tokens, h, weights // (2 * h))]
    keys = max(shape.head_dim, shape.kv_dim // t)
    return [(tokens, shape.attention_dim // t + 2 * keys, h), (tokens, h, shape.attention_dim // t)]


def mlp_products(shape: ModelShape, work: RankWork) -> list[Product]:
    """The products of a dense MLP on one rank, forward."""
    tokens = work.tokens
    t = work.tp
    h = shape.hidden
    return [(tokens, (2 if shape.gated else 1) * shape.ffn // t, h), (tokens, h, shape.ffn // t)]


@lru_cache(maxsize=65536)
def layer_seconds(
    gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution, trained: Trained | None = None
) -> Passes:
    """A decoder layer without its communication and without the recomputation of anything."""
    share = 1.0 if trained is None else trained.share
    linear = sum(
        (_linear(gpu, product, execution.unit, share) for product in attention_products(shape, work)), Passes()
    )
    mlp = sum((_linear(gpu, product, execution.unit, share) for product in mlp_products(shape, work)), Passes())
    mixed = expert_share(shape)
    if shape.experts is not None:
        mlp = (1 - mixed) * mlp + mixed * expert_seconds(gpu, shape, shape.experts, work, execution, share)
    seconds = linear + mlp + attention_seconds(gpu, shape, work, execution) + _streams(gpu, shape, work, execution)
    if trained is None:
        return seconds
    forward, backward = trained.adapter_seconds(gpu, work.tokens, work.tp, execution.activation_bytes)
    return seconds + Passes(forward=forward, backward=backward)


@lru_cache(maxsize=65536)
def weight_gradient_seconds(
    gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution, trained: Trained | None = None
) -> float:
    """Seconds of the gradients of a layer's weights that a pipeline schedule may leave for later.

    They are those of its linear layers; routed experts have theirs in the backward pass for the input.
    """
    share = 1.0 if trained is None else trained.share
    attention = sum(matmul_seconds(gpu, k, n, m, execution.unit) for m, n, k in attention_products(shape, work))
    mlp = sum(matmul_seconds(gpu, k, n, m, execution.unit) for m, n, k in mlp_products(shape, work))
    return share * (attention + (1 - expert_share(shape)) * mlp)


def tiled_mlp_seconds(
    gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution, trained: Trained | None = None
) -> float:
    """Seconds that tiled MLPs add to a layer's backward pass: each tile's forward pass again, and sums over the tiles.

    Tiles have h tokens or fewer. The gradients of the weights of a tile are read, and their sums in fp32 read and
    written (toolkit/model_init/tiled_mlp.py).
    """
    products = mlp_products(shape, work)
    tiles = -(-work.tokens // shape.hidden)
    share = 1.0 if trained is None else trained.share
    summed = share * tiles * sum(n * k for _, n, k in products) * (8 + execution.activation_bytes)
    moved = work.tokens * shape.ffn / work.tp * execution.activation_bytes / 2
    moved *= execution.facts["activation"]["gated" if shape.gated else "plain"][0]
    again = sum(matmul_seconds(gpu, m, n, k, execution.unit) for m, n, k in products)
    return again + stream_seconds(gpu, moved, tiles) + stream_seconds(gpu, summed, tiles * len(products))


def expert_share(shape: ModelShape) -> float:
    """Share of the layers that have experts."""
    return 0.0 if shape.experts is None else shape.experts.layers / shape.layers


def expert_seconds(
    gpu: Gpu, shape: ModelShape, experts: ExpertShape, work: RankWork, execution: Execution, trained: float
) -> Passes:
    """Seconds of the block in the place of an MLP: router, routed experts, and experts that every token goes through.

    `routed` are bytes that a framework's kernels move for an element of a routed row: gathering rows in the order of
    experts, weighting and adding up what comes back; `expert_bias` those for an element of the two products' results
    where every expert adds a bias of its own. Router logits are fp32: softmax, choice of experts, normalization.
    """
    h = shape.hidden
    here = max(1, experts.count // work.expert_owners)
    rows = work.routed_rows
    expert_rows = math.ceil(rows / here)
    width = experts.ffn // work.expert_shards
    up = (experts.weights // h - experts.ffn) // work.expert_shards
    into_experts = _linear(gpu, (expert_rows, up, h), execution.unit, trained, here)
    out_of_experts = _linear(gpu, (expert_rows, h, width), execution.unit, trained, here)
    grouped = Passes() + into_experts + out_of_experts
    shared = max(0, experts.always - experts.count * h) // h // work.tp
    gates = shared - shared * experts.ffn * h // experts.weights  # up, or up and gate
    dense = [(work.tokens, experts.count, h), (work.tokens, gates, h), (work.tokens, h, shared - gates)]
    always = sum((_linear(gpu, product, execution.attention_precision, trained) for product in dense), Passes())
    facts = execution.facts
    size = execution.activation_bytes / 2
    passes = []
    for way in (0, 1):
        streams = (
            rows * h * facts["routed"][way]
            + (rows * width + work.tokens * (shared - gates)) * facts["activation"]["gated"][way]
        )
        if experts.biased:
            streams += sum(rows * n * moved[way] for n, moved in zip((up, h), facts["expert_bias"], strict=True))
        streams = size * streams + work.tokens * experts.count * _ROUTER[way]
        if execution.precision in QUANTIZED:
            streams += QUANTIZED[execution.precision] * rows * (h + width if way == 0 else h + up)
        passes.append(stream_seconds(gpu, streams, _ROUTING_KERNELS[way]))
    return grouped + always + Passes(forward=passes[0], backward=passes[1])


@lru_cache(maxsize=4096)
def head_seconds(
    gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution, trained: Trained | None = None
) -> Passes:
    """Final norm, LM head and loss."""
    vocab = -(-shape.vocab // work.tp)
    forward, backward = execution.facts["loss"].get(execution.loss, execution.facts["loss"]["plain"])
    logits = work.tokens * vocab
    rates = (None, None) if gpu.core is None else gpu.core.loss_bytes_per_second
    loss = Passes(
        forward=stream_seconds(gpu, logits * forward, 6, reached=rates[0]),
        backward=stream_seconds(gpu, logits * backward, 4, reached=rates[1]),
    )
    share = 1.0 if trained is None else float(trained.has_head)
    return _linear(gpu, (work.tokens, vocab, shape.embed_dim), execution.attention_precision, share) + loss


@lru_cache(maxsize=4096)
def embedding_seconds(
    gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution, trained: Trained | None = None
) -> Passes:
    """Looking rows up, and adding their gradients to an otherwise empty table."""
    rows = work.tokens * shape.hidden * execution.activation_bytes
    table = shape.vocab * shape.embed_dim // work.tp * execution.activation_bytes
    trains = trained is None or trained.has_embeddings
    backward = stream_seconds(gpu, 4 * rows + 3 * table, 5) if trains else 0.0
    return Passes(forward=stream_seconds(gpu, 3 * rows, 3), backward=backward)


def _linear(gpu: Gpu, product: Product, unit: MatmulPrecision, trained: float, groups: int = 1) -> Passes:
    """The product, then the gradients of its input and of the share of its weight that trains."""
    m, n, k = product
    forward = matmul_seconds(gpu, m, n, k, unit, groups)
    of_weight = trained * matmul_seconds(gpu, k, n, m, unit, groups)
    return Passes(forward=forward, backward=matmul_seconds(gpu, m, k, n, unit, groups) + of_weight)


def attention_seconds(gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution) -> Passes:
    """Scores, softmax and weighted sum of all heads of a rank: causal, as kernels that skip masked blocks have it."""
    heads = shape.heads / work.tp / work.heads_split
    tokens = work.tokens * work.heads_split
    width = shape.head_dim if shape.latent is None else (shape.head_dim + shape.latent.value_dim) / 2
    flops = 4.0 * tokens * work.seq_len * heads * width
    peak = gpu.peak_flops(execution.attention_precision) or gpu.fp32_flops
    if gpu.core is not None:
        rates = gpu.core.attention[execution.attention_precision]
        return Passes(forward=flops / 2 / rates[0], backward=2.5 * flops / 2 / rates[1])
    if work.context > 1 and (shape.windowed or execution.attention == "eager"):
        return _tiled_attention(gpu, shape, work, execution)
    if shape.windowed and execution.attention not in _SCORES:  # kernels that skip blocks outside of a window
        flops *= 1 - shape.windowed * (1 - min(1.0, 2 * shape.window / work.seq_len))
    if execution.attention not in _SCORES:
        forward, backward = _RATES[execution.attention]
        older = _OLD_KERNEL if peak > _BEFORE_HOPPER and execution.attention in _OLD_KERNELS else 1.0
        # Softmax costs narrow heads as much as wide ones, whose products are larger.
        narrow = min(1.0, 0.5 + shape.head_dim / 256)
        moved = heads * tokens * shape.head_dim if shape.sinks and execution.attention == "flex" else 0
        # Blocks on the diagonal are half empty, and pipelines of loads have to fill.
        rate = peak * older * narrow * work.seq_len / (work.seq_len + 512)
        return Passes(
            forward=flops / 2 / (rate * forward) + stream_seconds(gpu, moved * _SINKS[0]),
            backward=2.5 * flops / 2 / (rate * backward) + stream_seconds(gpu, moved * _SINKS[1], 2),
        )
    scores = heads * tokens * work.seq_len * execution.activation_bytes / 2
    seconds = []
    for way, (passes, touched) in enumerate(zip((1, 2), _PRODUCTS, strict=True)):
        # Products over narrow heads write or read every score: they are as often bound by memory as by their units.
        product = max(
            passes * flops / (fraction(gpu, execution.attention_precision) * peak),
            stream_seconds(gpu, scores * touched, 0),
        )
        rest = _SCORES[execution.attention][way] + (_DROPOUT[way] if execution.dropout else 0)
        seconds.append(product + stream_seconds(gpu, scores * rest, 6))
    return Passes(forward=seconds[0], backward=seconds[1])


def _tiled_attention(gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution) -> Passes:
    """Attention with windows or soft caps on a context-parallel rank: no kernel of PyTorch's computes their tiles.

    Layers without a window see half of all pairs; those of a family with soft caps, which has only eager attention, are
    products of tiles as well.
    """
    every = replace(shape, windowed=0.0)
    whole = replace(work, context=1)
    tiled = replace(execution, attention="tiles")
    seen = min(work.seq_len, shape.window + TILE) if shape.windowed else work.seq_len
    windowed = attention_seconds(gpu, every, replace(whole, seq_len=seen), tiled)
    if execution.attention == "eager":
        others = attention_seconds(gpu, every, replace(whole, seq_len=-(-work.seq_len // 2)), tiled)
    else:
        others = attention_seconds(gpu, every, whole, execution)
    return shape.windowed * windowed + (1 - shape.windowed) * others


def _streams(gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution) -> Passes:
    """Element-wise kernels by the bytes that they move, and the casts of 8 and 4-bit products."""
    facts = execution.facts
    size = execution.activation_bytes / 2
    whole = work.tokens * shape.hidden * (1 / work.tp if work.sequence_parallel else 1)
    mlp = (1 - expert_share(shape)) * work.tokens * shape.ffn / work.tp
    heads = work.tokens * (shape.attention_dim + 2 * shape.kv_dim) / work.tp
    norm = facts["norm"] if execution.fused_norm or "unfused_norm" not in facts else facts["unfused_norm"]
    rotary = (0, 0) if shape.learned_positions else facts["rotary"]
    dropout = facts["dropout"] if execution.dropout else (0, 0)
    seconds = []
    for way in (0, 1):
        moved = whole * 2 * (norm[way] + facts["residual"][way] + dropout[way])
        moved += mlp * facts["activation"]["gated" if shape.gated else "plain"][way]
        moved += heads * (rotary[way] + facts["copies"][way])
        moved *= size * (COMPILED_SHARE if execution.compiled else 1)
        if execution.precision in QUANTIZED:
            inputs = work.tokens * (2 * shape.hidden + shape.attention_dim / work.tp) + mlp
            outputs = work.tokens * 2 * shape.hidden + heads + mlp * (2 if shape.gated else 1)
            moved += QUANTIZED[execution.precision] * (inputs if way == 0 else outputs)
        reached = None if gpu.core is None else gpu.core.layer_bytes_per_second[way]
        seconds.append(stream_seconds(gpu, moved, 10 if way == 0 else 14, reached=reached))
    return Passes(forward=seconds[0], backward=seconds[1])
