"""Seconds that context parallelism adds to a decoder layer: keys and values on their way, and blocks that merge.

Legend: c context-parallel ranks, K bytes of a layer's keys and values of whole sequences on a tensor-parallel rank,
a seconds of a rank's attention in one pass.

Gathered, (c - 1)/c K arrive before attention, and backward they arrive again and a reduce-scatter sends as many:
nothing hides them. In a ring c - 1 sends of K/c each run behind the block at hand. Blocks are alike, since zigzag
gives each rank an early and a late chunk, so a send is hidden as far as it takes no longer than a/c. Backward the
gradients of a block follow one step later on the same link, and those of the last block travel when nothing is left
to compute (toolkit/parallel/context/exchange.py). Where u of the ranks exchange heads, c counts their groups, K has the
heads of one rank, and queries, keys, values and outputs take an all-to-all each.

Known error: a rank with several documents in a sample sees less than a whole sequence, and its attention hides less.
"""

from toolkit.config.context_exchange import gathered_bytes
from toolkit.planner import collectives
from toolkit.planner.kernels import stream_seconds
from toolkit.planner.passes import Passes, PassPair
from toolkit.planner.step_request import StepRequest

DOCUMENT_IMBALANCE = 1.05
"""Attention of the slowest rank over the mean, at most, where documents do not see each other: what
tests/parallel/test_context_attention.py holds. Causal work of zigzag chunks is the same on each rank."""
_COPIED_BYTES = PassPair(2, 11)
"""Bytes moved for each byte that is gathered in 16 bits: put in the order of the sequence forward; backward that again,
gradients in fp32 made and converted, and put in the order of ranks."""
_MERGED_BYTES = PassPair(34, 10)
"""Bytes moved for an element of a block's output: two products and a sum in fp32 forward; backward the sum alone."""


def context_seconds(request: StepRequest, attention: Passes) -> Passes:
    """Seconds beyond attention itself, in which nothing else computes; 0 without context parallelism."""
    layout = request.layout
    if layout.cp == 1:
        return Passes()
    u = layout.cp_ulysses
    c = layout.cp // u
    cluster = request.cluster
    itemsize = request.execution.activation_bytes
    tokens = request.setup.micro_batch_size * request.setup.seq_len
    whole = gathered_bytes(request.shape, tp=u * layout.tp, tokens=tokens, itemsize=itemsize)
    ranks = collectives.group(cluster, size=c, stride=u * layout.tp)
    is_ring = request.setup.exchange(itemsize) == "ring"
    merging = _merging(request, whole, blocks=(2 * c + 1) / 2 if is_ring else 2)
    uneven = DOCUMENT_IMBALANCE - 1 if request.setup.computation.documents else 0.0
    added = _heads_exchange(request) + merging + uneven * attention
    if c == 1:
        return added
    if is_ring:
        return added + _exposed(request, ranks, whole / c, attention + merging)
    gathered = collectives.all_gather(cluster, ranks, whole, messages=2)
    forward_copies = stream_seconds(cluster.gpu, _COPIED_BYTES.forward * whole * itemsize / 2, 6)
    backward_copies = stream_seconds(cluster.gpu, _COPIED_BYTES.backward * whole * itemsize / 2, 6)
    return added + Passes(forward=gathered + forward_copies, backward=2 * gathered + backward_copies)


def context_calls(request: StepRequest) -> tuple[int, int]:
    """Collectives that a layer's exchange of keys and values launches, forward and backward."""
    layout = request.layout
    if layout.cp == 1:
        return 0, 0
    u = layout.cp_ulysses
    calls = 4 if u > 1 else 0
    others = layout.cp // u - 1
    if others == 0:
        return calls, calls
    if request.setup.exchange(request.execution.activation_bytes) == "ring":
        return calls + others, calls + 2 * others
    return calls + 2, calls + 4


def _heads_exchange(request: StepRequest) -> Passes:
    """Seconds in which the ranks of Ulysses exchange the heads of queries, keys, values and outputs."""
    layout = request.layout
    cluster = request.cluster
    if layout.cp_ulysses == 1:
        return Passes()
    ranks = collectives.group(cluster, size=layout.cp_ulysses, stride=layout.tp)
    widths = 2 * (request.shape.attention_dim + request.shape.kv_dim) / layout.tp
    size = request.work.tokens * widths * request.execution.activation_bytes
    seconds = collectives.all_to_all(cluster, ranks, size) + 3 * cluster.collective_seconds
    return Passes(forward=seconds, backward=seconds)


def _merging(request: StepRequest, whole: float, blocks: float) -> Passes:
    """Seconds to merge the blocks of each query, and backward to sum gradients of queries, keys and values.

    Of 2c chunks the rank's two see 2c + 1 between them, so that a ring's queries have (2c + 1)/2 blocks each; where all
    keys are at hand, those before a chunk are one block and its own the other.
    """
    layout = request.layout
    c = layout.cp // layout.cp_ulysses
    gpu = request.cluster.gpu
    itemsize = request.execution.activation_bytes
    outputs = request.work.tokens * request.shape.attention_dim / layout.tp
    keys = (2 * c + 1) / (2 * c) * whole / itemsize
    forward = stream_seconds(gpu, blocks * outputs * _MERGED_BYTES.forward, 6)
    backward = stream_seconds(gpu, (blocks * outputs + keys) * _MERGED_BYTES.backward, 6)
    return Passes(forward=forward, backward=backward)


def _exposed(request: StepRequest, ranks: collectives.RankGroup, size: float, computed: Passes) -> Passes:
    """Seconds of a ring's sends, of `size` bytes each, that the blocks computed meanwhile do not hide."""
    c = ranks.size

    def waits(messages: int, behind: float) -> float:
        return max(0.0, collectives.shift(request.cluster, ranks, messages * size) - behind / c)

    forward = (c - 1) * waits(1, computed.forward)
    backward = collectives.shift(request.cluster, ranks, size)
    for step in range(c):
        # Keys and values of the next block, and gradients of the last but one.
        messages = (step < c - 1) + (step >= 2)
        backward += waits(messages, computed.backward)
    return Passes(forward=forward, backward=backward)
