"""Seconds that one rank computes for one micro-batch: a decoder layer, the embeddings, and the head with its loss.

Legend: T tokens of the micro-batch on this rank, s positions, h hidden, q k widths of queries and keys, f width of the
MLP, v vocabulary, t tensor-parallel ranks.

Layers with and without experts count as one mean layer. Of routed experts the busiest rank counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from toolkit.hardware import Gpu, MatmulPrecision
from toolkit.models.experts import ExpertShape
from toolkit.models.shape import ModelShape
from toolkit.planner.execution import QUANTIZED, Execution
from toolkit.planner.kernels import fraction, matmul_seconds, stream_seconds
from toolkit.planner.passes import BACKWARD, FORWARD, Passes, PassPair
from toolkit.planner.trained import Trained

COMPILED_SHARE = 0.5
"""Share of the element-wise traffic that is left where torch.compile fuses chains of kernels: each reads and writes
once."""

_NOTHING = PassPair(0, 0)
_FLASH_PEAK_SHARES = {
    "flash1": PassPair(0.33, 0.28),
    "flash2": PassPair(0.60, 0.53),
    "flash3": PassPair(0.60, 0.48),
    "cudnn": PassPair(0.60, 0.48),
    "flex": PassPair(0.54, 0.45),
}
"""Shares of the 16-bit peak that kernels reach which keep no scores, for heads of 128 and long sequences. Sources:
FlashAttention (Dao et al. 2022) and FlashAttention-2 (Dao 2023, figures 5 to 7: causal, on an A100), FlashAttention-3
(Shah et al. 2024, figures 5 and 6: on an H100, with cuDNN's). FlexAttention reaches 90 and 85 % of FlashAttention-2
(PyTorch's blog, "FlexAttention: The Flexibility of PyTorch with the Performance of FlashAttention")."""
_BEFORE_HOPPER = 400e12
"""16-bit peak FLOP/s that no GPU before Hopper has. FlashAttention-2 uses no instructions of Hopper: from there on its
rate is about 0.35 of the peak (FlashAttention-3, figure 5)."""
_OLD_KERNEL = 0.58
"""Share of their rate that kernels without instructions of Hopper reach from Hopper on."""
_OLD_KERNELS = ("flash1", "flash2", "flex")
"""Kernels without instructions of Hopper."""
_BACKWARD_FLASH_FLOPS = 2.5
"""FLOPs of the backward pass of kernels that keep no scores, over those of the forward pass: five products, of which
one computes the scores again, instead of two."""
_BACKWARD_PRODUCTS = 2
"""FLOPs of the backward pass over those of the forward pass where scores are kept: four products instead of two."""
_PRODUCT_BYTES = PassPair(4, 8)
"""Bytes moved per score by the matrix products in 16 bits: written and read forward; both twice backward."""
_SINK_BYTES = PassPair(12, 34)
"""Bytes moved per element of what FlexAttention returns, which knows no sinks: it is scaled by the log-sum-exp, in fp32
and by kernels of its own (NeMo Automodel, components/attention/flex_attention.py)."""
_SCORE_BYTES = {
    "fused-softmax": PassPair(4, 6),
    "unfused": PassPair(28, 22),
    "eager": PassPair(22, 16),
    "tiles": PassPair(48, 84),
}
"""Bytes moved per score by softmax and mask: in one kernel, or in kernels of their own that convert to fp32 and back.
`tiles`: those that context parallelism's attention multiplies by PyTorch's products, in fp32: converted, scaled,
masked, summed, subtracted, exponentiated and converted forward; the first three, the exponential and the derivative
backward (toolkit/parallel/context/kernels.py)."""
TILE = 512
"""Queries of one tile of context parallelism's attention in a layer with a window: it sees the keys of a window, and
as many more as it has queries."""
_SCORE_DROPOUT_BYTES = PassPair(5, 5)
"""Bytes moved per score by dropout."""
_ROUTER_BYTES = PassPair(24, 24)
"""Bytes moved per router logit, in fp32: softmax, choice and normalization forward; the same backward."""
_FP32_BYTES = 4
_ROUTING_KERNELS = PassPair(16, 20)
"""Kernels of a layer's routing."""
_ELEMENTWISE_KERNELS = PassPair(10, 14)
"""Element-wise kernels of a layer."""


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
    projections = Passes()
    for product in attention_products(shape, work):
        projections += _linear(gpu, product, execution.unit, share)
    mlp = Passes()
    for product in mlp_products(shape, work):
        mlp += _linear(gpu, product, execution.unit, share)
    if shape.experts is not None:
        with_experts = expert_share(shape)
        experts = expert_seconds(gpu, shape, shape.experts, work, execution, share)
        mlp = (1 - with_experts) * mlp + with_experts * experts
    attention = attention_seconds(gpu, shape, work, execution)
    seconds = projections + mlp + attention + _elementwise_seconds(gpu, shape, work, execution)
    if trained is None:
        return seconds
    return seconds + trained.adapter_seconds(gpu, work.tokens, work.tp, execution.activation_bytes)


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
    weights = sum(n * k for _, n, k in products)
    tiles = -(-work.tokens // shape.hidden)
    trained_share = 1.0 if trained is None else trained.share
    summed_bytes = trained_share * tiles * weights * (2 * _FP32_BYTES + execution.activation_bytes)
    # The constants count bytes of 16-bit activations.
    activated_bytes = work.tokens * shape.ffn / work.tp * execution.activation_bytes / 2
    activated_bytes *= _activation_bytes(shape, execution.facts).forward
    again = sum(matmul_seconds(gpu, m, n, k, execution.unit) for m, n, k in products)
    again += stream_seconds(gpu, activated_bytes, tiles)
    return again + stream_seconds(gpu, summed_bytes, tiles * len(products))


def expert_share(shape: ModelShape) -> float:
    """Share of the layers that have experts."""
    return 0.0 if shape.experts is None else shape.experts.layers / shape.layers


@dataclass(frozen=True, kw_only=True)
class _ExpertSizes:
    """Sizes of the experts that one rank computes. Their first product is up, or gate and up; their second is down."""

    local_experts: int
    rows_per_expert: int
    """Routed rows of each of the rank's experts."""
    first_width: int
    """Columns of an expert's first product."""
    ffn: int
    """Width of an expert's activation function."""
    shared_first_width: int
    """Columns of the first product of the shared experts, which every token goes through."""
    shared_ffn: int
    """Width of the shared experts' activation function."""

    @classmethod
    def of(cls, experts: ExpertShape, work: RankWork, *, hidden: int) -> Self:
        """Read the sizes of a layer's experts on one rank; `experts.always` also counts the router's weights."""
        local_experts = max(1, experts.count // work.expert_owners)
        shared_columns = max(0, experts.always - experts.count * hidden) // hidden // work.tp
        shared_ffn = shared_columns * experts.ffn * hidden // experts.weights
        return cls(
            local_experts=local_experts,
            rows_per_expert=math.ceil(work.routed_rows / local_experts),
            first_width=(experts.weights // hidden - experts.ffn) // work.expert_shards,
            ffn=experts.ffn // work.expert_shards,
            shared_first_width=shared_columns - shared_ffn,
            shared_ffn=shared_ffn,
        )


def expert_seconds(
    gpu: Gpu, shape: ModelShape, experts: ExpertShape, work: RankWork, execution: Execution, trained: float
) -> Passes:
    """Seconds of the block in the place of an MLP: router, routed experts, and experts that every token goes through.

    `trained` is the share of the weights that train.
    """
    h = shape.hidden
    sizes = _ExpertSizes.of(experts, work, hidden=h)
    groups = sizes.local_experts
    first_product = (sizes.rows_per_expert, sizes.first_width, h)
    second_product = (sizes.rows_per_expert, h, sizes.ffn)
    routed = _linear(gpu, first_product, execution.unit, trained, groups)
    routed += _linear(gpu, second_product, execution.unit, trained, groups)
    router_product = (work.tokens, experts.count, h)
    shared_products = [(work.tokens, sizes.shared_first_width, h), (work.tokens, h, sizes.shared_ffn)]
    always = Passes()
    for product in [router_product, *shared_products]:
        always += _linear(gpu, product, execution.attention_precision, trained)
    forward_bytes = _routing_bytes(experts, work, execution, sizes, hidden=h, direction=FORWARD)
    backward_bytes = _routing_bytes(experts, work, execution, sizes, hidden=h, direction=BACKWARD)
    routing = Passes(
        forward=stream_seconds(gpu, forward_bytes, _ROUTING_KERNELS.forward),
        backward=stream_seconds(gpu, backward_bytes, _ROUTING_KERNELS.backward),
    )
    return routed + always + routing


def _routing_bytes(
    experts: ExpertShape, work: RankWork, execution: Execution, sizes: _ExpertSizes, *, hidden: int, direction: int
) -> float:
    """Bytes that the element-wise kernels of a block with experts move in one pass.

    Of a framework's facts `routed` are bytes for an element of a routed row: gathering rows in the order of experts,
    weighting and adding up what comes back. `expert_bias` are those for an element of the two products' results where
    every expert adds a bias of its own. Router logits are fp32: softmax, choice of experts, normalization.
    """
    facts = execution.facts
    rows = work.routed_rows
    activated = rows * sizes.ffn + work.tokens * sizes.shared_ffn
    moved: float = rows * hidden * facts["routed"][direction] + activated * facts["activation"]["gated"][direction]
    if experts.biased:
        first_bias, second_bias = facts["expert_bias"]
        moved += rows * sizes.first_width * first_bias[direction] + rows * hidden * second_bias[direction]
    moved = execution.activation_bytes / 2 * moved + work.tokens * experts.count * _ROUTER_BYTES[direction]
    if execution.precision in QUANTIZED:
        inputs = hidden + sizes.ffn
        outputs = hidden + sizes.first_width
        moved += QUANTIZED[execution.precision] * rows * (inputs if direction == FORWARD else outputs)
    return moved


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


@dataclass(frozen=True, kw_only=True)
class _AttentionWork:
    """The attention of one rank in a pass over a micro-batch."""

    heads: float
    queries: int
    """Queries of each head."""
    flops: float
    """FLOPs of the forward pass over all positions, masked or not: two products of 2 x queries x positions x width."""

    @classmethod
    def of(cls, shape: ModelShape, work: RankWork) -> Self:
        """Count the attention of a rank. Ulysses gives each of its ranks all queries of some heads."""
        heads = shape.heads / work.tp / work.heads_split
        queries = work.tokens * work.heads_split
        mean_width = shape.head_dim if shape.latent is None else (shape.head_dim + shape.latent.value_dim) / 2
        return cls(heads=heads, queries=queries, flops=4.0 * queries * work.seq_len * heads * mean_width)

    @property
    def causal_flops(self) -> float:
        """FLOPs of the forward pass without masked blocks."""
        return self.flops / 2


def attention_seconds(gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution) -> Passes:
    """Scores, softmax and weighted sum of all heads of a rank: causal, as kernels that skip masked blocks have it."""
    attention = _AttentionWork.of(shape, work)
    if gpu.core is not None:
        forward_rate, backward_rate = gpu.core.attention[execution.attention_precision]
        return Passes(
            forward=attention.causal_flops / forward_rate,
            backward=_BACKWARD_FLASH_FLOPS * attention.causal_flops / backward_rate,
        )
    if work.context > 1 and (shape.windowed or execution.attention == "eager"):
        return _tiled_attention(gpu, shape, work, execution)
    if execution.attention in _SCORE_BYTES:
        return _attention_with_scores(gpu, work, execution, attention)
    return _flash_attention(gpu, shape, work, execution, attention)


def _flash_attention(
    gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution, attention: _AttentionWork
) -> Passes:
    """Attention by kernels that keep no scores, and that skip blocks which are masked or outside of a window."""
    flops = attention.causal_flops
    if shape.windowed:
        seen_share = min(1.0, 2 * shape.window / work.seq_len)
        flops *= 1 - shape.windowed * (1 - seen_share)
    peak = _attention_peak(gpu, execution)
    kernel_share = _OLD_KERNEL if peak > _BEFORE_HOPPER and execution.attention in _OLD_KERNELS else 1.0
    # Softmax costs narrow heads as much as wide ones, whose products are larger.
    width_share = min(1.0, 0.5 + shape.head_dim / 256)
    # Blocks on the diagonal are half empty, and pipelines of loads have to fill.
    rate = peak * kernel_share * width_share * work.seq_len / (work.seq_len + 512)
    peak_shares = _FLASH_PEAK_SHARES[execution.attention]
    scaled = attention.heads * attention.queries * shape.head_dim
    if not (shape.sinks and execution.attention == "flex"):
        scaled = 0
    return Passes(
        forward=flops / (rate * peak_shares.forward) + stream_seconds(gpu, scaled * _SINK_BYTES.forward),
        backward=_BACKWARD_FLASH_FLOPS * flops / (rate * peak_shares.backward)
        + stream_seconds(gpu, scaled * _SINK_BYTES.backward, 2),
    )


def _attention_with_scores(gpu: Gpu, work: RankWork, execution: Execution, attention: _AttentionWork) -> Passes:
    """Attention that writes the scores of all pairs to memory, masked or not.

    Products over narrow heads write or read every score: they are as often bound by memory as by their units.
    """
    rate = fraction(gpu, execution.attention_precision) * _attention_peak(gpu, execution)
    # The constants count bytes of 16-bit scores.
    scores = attention.heads * attention.queries * work.seq_len * execution.activation_bytes / 2
    softmax_bytes = _SCORE_BYTES[execution.attention]
    dropout_bytes = _SCORE_DROPOUT_BYTES if execution.dropout else _NOTHING
    forward_product = max(attention.flops / rate, stream_seconds(gpu, scores * _PRODUCT_BYTES.forward, 0))
    backward_product = max(
        _BACKWARD_PRODUCTS * attention.flops / rate, stream_seconds(gpu, scores * _PRODUCT_BYTES.backward, 0)
    )
    forward_bytes = scores * (softmax_bytes.forward + dropout_bytes.forward)
    backward_bytes = scores * (softmax_bytes.backward + dropout_bytes.backward)
    return Passes(
        forward=forward_product + stream_seconds(gpu, forward_bytes, 6),
        backward=backward_product + stream_seconds(gpu, backward_bytes, 6),
    )


def _attention_peak(gpu: Gpu, execution: Execution) -> float:
    """Peak FLOP/s of a GPU in the precision of attention."""
    return gpu.peak_flops(execution.attention_precision) or gpu.fp32_flops


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


def _elementwise_seconds(gpu: Gpu, shape: ModelShape, work: RankWork, execution: Execution) -> Passes:
    """Element-wise kernels by the bytes that they move, and the casts of 8 and 4-bit products."""
    forward_rate: float | None = None
    backward_rate: float | None = None
    if gpu.core is not None:
        forward_rate, backward_rate = gpu.core.layer_bytes_per_second
    forward_bytes = _elementwise_bytes(shape, work, execution, FORWARD)
    backward_bytes = _elementwise_bytes(shape, work, execution, BACKWARD)
    return Passes(
        forward=stream_seconds(gpu, forward_bytes, _ELEMENTWISE_KERNELS.forward, reached=forward_rate),
        backward=stream_seconds(gpu, backward_bytes, _ELEMENTWISE_KERNELS.backward, reached=backward_rate),
    )


def _elementwise_bytes(shape: ModelShape, work: RankWork, execution: Execution, direction: int) -> float:
    """Bytes that the element-wise kernels of a layer move in one pass.

    Two norms, residual sums and dropouts work on [T, h], the activation function on [T, f/t], rotary embeddings and
    copies on queries, keys and values [T, (q + 2k)/t]. A framework's facts have the bytes of each for an element.
    """
    facts = execution.facts
    hidden_elements = work.tokens * shape.hidden * (1 / work.tp if work.sequence_parallel else 1)
    mlp_elements = (1 - expert_share(shape)) * work.tokens * shape.ffn / work.tp
    head_elements = work.tokens * (shape.attention_dim + 2 * shape.kv_dim) / work.tp
    norm = facts["norm"] if execution.fused_norm or "unfused_norm" not in facts else facts["unfused_norm"]
    rotary = _NOTHING if shape.learned_positions else facts["rotary"]
    dropout = facts["dropout"] if execution.dropout else _NOTHING
    moved: float = hidden_elements * 2 * (norm[direction] + facts["residual"][direction] + dropout[direction])
    moved += mlp_elements * _activation_bytes(shape, facts)[direction]
    moved += head_elements * (rotary[direction] + facts["copies"][direction])
    moved *= execution.activation_bytes / 2 * (COMPILED_SHARE if execution.compiled else 1)
    if execution.precision in QUANTIZED:
        inputs = work.tokens * (2 * shape.hidden + shape.attention_dim / work.tp) + mlp_elements
        outputs = work.tokens * 2 * shape.hidden + head_elements + mlp_elements * (2 if shape.gated else 1)
        moved += QUANTIZED[execution.precision] * (inputs if direction == FORWARD else outputs)
    return moved


def _activation_bytes(shape: ModelShape, facts: Mapping[str, Any]) -> PassPair:
    """Bytes that the activation function of an MLP moves for each element of its width."""
    return PassPair(*facts["activation"]["gated" if shape.gated else "plain"])
