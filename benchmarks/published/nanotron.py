"""nanotron: Llama models under data, tensor and pipeline parallelism, ZeRO-0 and 1 (Ultra-Scale Playbook, early 2025).

What the source calls "GPU memory" is `max_memory_reserved`: nanotron's table has what is allocated too (helpers.py,
create_table_log), and the published figure is that of "Mem Res" in every row. So the steps are replayed on PyTorch's
allocator. A rank holds

- weights in bf16, one fp32 buffer for all gradients, masters in one fp32 buffer, divided over data-parallel ranks by
  ZeRO-1 parameter by parameter (optim/gradient_accumulator.py, optim/zero.py);
- Adam's moments in fp32, from the end of the first step on (torch/optim/adam.py), divided as the masters are;
- with ZeRO-0 and several replicas DDP's buckets of all gradients in bf16 (trainer.py, _init_model: no DDP with ZeRO-1);
- gradients in bf16 until a micro-batch's backward pass is over (gradient_accumulator.py, backward);
- with ZeRO-1 at the end of a step one flat copy of the rank's weights and two of all weights: distributed.py,
  all_gather_coalesced makes one, and PyTorch's ProcessGroupNCCL::allgather another;
- the passes themselves: see nanotron_stage.py;
- in the cache, until weights take their place, tensors of 1 GiB that measured the network (trainer.py,
  measure_bandwidth);
- beside the allocator the context, and NCCL's communicators (parallel/context.py): the default one, those of world and
  node, of tensor, data and pipeline parallel groups, and of a replica.

Layers go to stages by cost (models/base.py, build_model; models/llama.py, get_block_compute_costs). Where the cost up
to a layer is just a stage's share, released code gives one more layer to the stage. Most of these runs did not: for
nanotron_ultrascale-0001 the table has 11.88 GiB allocated at the end of a step, which is one layer less.

With tp > 1 NCCL works on streams of its own, and a block that it used returns to the cache only when the GPU has done
with it (record_stream). How much more is reserved depends on how far the CPU runs ahead of the GPU; both extremes are
in the table, for runs that nothing in it tells apart. The peak is what is reserved without delay; a run fits if it does
with a CPU that is ahead all the time, until the allocator has no room and waits.
"""

from functools import lru_cache

from published.caching_allocator import CachingAllocator, OutOfMemoryError
from published.nanotron_stage import Stage, passes
from published.nccl import GPUS_PER_NODE, communicator_bytes
from published.prediction import Prediction
from published.replay import Replay
from published.rows import Row
from toolkit.estimate.overhead import CONTEXT_BYTES
from toolkit.hardware import Gpu, gpu

_STEPS = 3
"""The figures are taken at the end of the third."""
_GIB = 2**30


def predict(row: Row) -> Prediction | str:
    """What the first rank reserves without delays, and whether the first and the last stage fit with the longest."""
    micro_batches = row.micro_batches
    if row.dp is None or micro_batches is None:
        return "without its number of replicas"
    try:
        peak = _reserved(row, 0, micro_batches, runs_ahead=False)
    except OutOfMemoryError:
        return Prediction(fits=False)
    return Prediction(peak=peak, fits=all(_fits(row, stage, micro_batches) for stage in {0, row.pp - 1}))


def _fits(row: Row, index: int, micro_batches: int) -> bool:
    if row.tp == 1 and index == 0:
        return True  # there are no delays, and without them it does
    try:
        _reserved(row, index, micro_batches, runs_ahead=True)
    except OutOfMemoryError:
        return False
    return True


def _reserved(row: Row, index: int, micro_batches: int, *, runs_ahead: bool) -> int:
    assert row.dp is not None
    stage = _stage(row, index)
    sizes = _parameters(row, stage)
    device = gpu("H100-SXM-80GB")
    allocator = CachingAllocator(device.memory_bytes - CONTEXT_BYTES - _communicators_bytes(row, device))
    _measure_network(allocator, row.dp * row.tp * row.pp)
    shards = row.dp if row.zero else 1
    for size in sizes:
        allocator.allocate(2 * size)
    if row.dp > 1 and not row.zero:
        allocator.allocate(2 * sum(sizes))
    allocator.allocate(4 * sum(sizes))
    allocator.allocate(4 * sum(-(-size // shards) for size in sizes))
    allocator.empty_cache()  # trainer.py, train

    def update(step: int) -> None:
        if step == 0:
            for size in sizes:
                for _ in range(2):
                    allocator.allocate(4 * -(-size // shards))
        if shards > 1:
            share = -(-2 * sum(sizes) // shards)
            blocks = [allocator.allocate(share) for _ in range(1 + shards)]
            blocks.append(allocator.allocate(2 * sum(sizes)))
            for block in blocks:
                allocator.free(block)

    replay = Replay(allocator=allocator, passes=passes(stage), ahead=row.pp - 1 - index, runs_ahead=runs_ahead)
    replay.steps(_STEPS, micro_batches, update)
    return allocator.reserved


def _communicators_bytes(row: Row, device: Gpu) -> int:
    """Ranks are counted along tp first, then dp, then pp. Groups of the same ranks share a communicator."""
    assert row.dp is not None
    world = row.tp * row.dp * row.pp
    local_world = min(world, GPUS_PER_NODE)
    groups = {(row.tp, 1), (row.dp, row.tp), (row.pp, row.tp * row.dp)}
    sizes = [(world, local_world)] * 3
    sizes += [(ranks, max(1, min(ranks, local_world // step))) for ranks, step in groups]
    if row.tp > 1 and row.pp > 1:
        sizes.append((row.tp * row.pp, min(row.tp, local_world) * max(1, local_world // (row.tp * row.dp))))
    return sum(communicator_bytes(ranks, local, device) for ranks, local in sizes)


def _measure_network(allocator: CachingAllocator, ranks: int) -> None:
    share, local_share = _GIB // ranks, _GIB // min(ranks, GPUS_PER_NODE)
    inputs = (_GIB, _GIB, share, local_share, share, _GIB, local_share, _GIB)
    copies = (_GIB, _GIB)  # all_reduce of a clone; ProcessGroupNCCL's flat copy of a list of tensors
    for block in [allocator.allocate(size) for size in (*inputs, *copies)]:
        allocator.free(block)


def _stage(row: Row, index: int) -> Stage:
    layers = _layers_by_stage(row.layers, row.pp, _layer_cost(row), row.vocab * row.hidden)
    return Stage.of(row, index, layers=layers[index])


def _layer_cost(row: Row) -> int:
    return 4 * row.hidden * row.hidden + 3 * row.hidden * row.ffn


@lru_cache(maxsize=256)
def _layers_by_stage(layers: int, stages: int, layer: int, head: int) -> tuple[int, ...]:
    """A stage is full once its and the earlier stages' cost reaches their share."""
    counts, stage, done = [0] * stages, 0, 0
    for _ in range(layers):
        counts[stage] += 1
        done += layer
        if done * stages >= (layers * layer + head) * (stage + 1):
            stage += 1
    return tuple(counts)


def _parameters(row: Row, stage: Stage) -> list[int]:
    """Elements of each tensor of one rank."""
    h, f, t = row.hidden, row.ffn, row.tp
    table = row.vocab * h // t
    tensors = [table] if stage.first else []
    for _ in range(stage.layers):
        tensors += [h, 3 * h * h // t, h * h // t, h, 2 * h * f // t, h * f // t]
    if stage.last:
        tensors += [h] if row.tied_emb and stage.first else [h, table]
    return tensors
