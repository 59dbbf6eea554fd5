"""Aleph Alpha's `scaling`: Llama models with tensor and pipeline parallelism and ZeRO-1 (Hagemann et al. 2023).

The source says which runs had no room. Stages are replayed on PyTorch's allocator, with what the GPU has left beside
the context and NCCL's communicators. A rank holds

- all weights in bf16 in one tensor, all gradients in bf16 until the step, and of its share fp32 masters in one tensor
  and Adam's moments (core/optimizer/parameter_group.py, initialize; optimizer.py, step);
- in the step buckets of 500 million gradients, and what goes over it, copied in bf16 and again in fp32
  (core/optimizer/allreduce.py), then fp32 gradients of its share, and two temporaries of that size
  (torch/optim/adamw.py, _multi_tensor_adamw);
- micro-batches in flight as in DeepSpeed's schedule (core/nn/pipeline_schedule/train.py), whose buffers hold a stage's
  outputs: on the last stage the logits of the micro-batch before, too;
- the passes themselves: see aleph_alpha_stage.py. What NCCL used on its own stream returns to the cache late, for the
  CPU runs ahead of the GPU: at the end of a step, or when the allocator has no room and waits.

The model is a list of embedding, layers, norm and head, cut into stages of equal length
(core/nn/parallel_module/pipeline_partitioning.py, pipe_partition_uniform).
"""

from functools import lru_cache

from published.aleph_alpha_stage import Kernel, Stage, passes
from published.caching_allocator import CachingAllocator, OutOfMemoryError
from published.nccl import GPUS_PER_NODE, communicator_bytes
from published.prediction import Prediction
from published.replay import Replay
from published.rows import Row
from toolkit.estimate.overhead import CONTEXT_BYTES, CUBLAS_BYTES
from toolkit.hardware import Gpu, gpu

_BUCKET = 500_000_000
_STEPS = 2
"""Adam's moments are there from the second step on."""


def predict(row: Row) -> Prediction | str:
    """Whether the stages fit that may need most: the first has most micro-batches in flight, the second nearly as many
    and no embedding among its items, the last the logits."""
    micro_batches = row.micro_batches
    if row.dp is None or micro_batches is None:
        return "without its number of replicas"
    stages = {index: _stage(row, index) for index in {0, min(1, row.pp - 1), row.pp - 1}}
    fits = (_fits(stage, row.pp - 1 - index, row.pp, row.dp, micro_batches) for index, stage in stages.items())
    return Prediction(fits=all(fits))


@lru_cache(maxsize=4096)
def _fits(stage: Stage, ahead: int, pp: int, dp: int, micro_batches: int) -> bool:
    sizes = _parameters(stage)
    total = sum(sizes)
    share = -(-total // dp)
    device = gpu("A100-SXM-80GB")
    allocator = CachingAllocator(device.memory_bytes - CONTEXT_BYTES - _communicators_bytes(stage.tp, dp, pp, device))

    def update(step: int) -> None:
        if dp > 1:
            bucket = _bucket(sizes)
            _borrow(allocator, 2 * bucket, 4 * bucket)
        gradient = allocator.allocate(4 * share)
        if step == 0:
            for _ in range(2):
                allocator.allocate(4 * share)
        _borrow(allocator, 4 * share, 4 * share)
        allocator.free(gradient)

    held = [2 * total, 4 * share, *(2 * size for size in sizes), *[CUBLAS_BYTES["other"]] * 2]
    if stage.last and micro_batches > 1:
        held.append(stage.logits_bytes)
    try:
        for size in held:
            allocator.allocate(size)
        replay = Replay(allocator=allocator, passes=passes(stage), ahead=ahead, runs_ahead=True)
        replay.steps(_STEPS, micro_batches, update)
    except OutOfMemoryError:
        return False
    return True


def _borrow(allocator: CachingAllocator, *sizes: int) -> None:
    for block in [allocator.allocate(size) for size in sizes]:
        allocator.free(block)


def _bucket(sizes: list[int]) -> int:
    """The largest: tensors are gathered until there are more than 500 million elements."""
    largest = bucket = 0
    for size in sizes:
        bucket += size
        largest = max(largest, bucket)
        if bucket > _BUCKET:
            bucket = 0
    return largest


def _communicators_bytes(tp: int, dp: int, pp: int, device: Gpu) -> int:
    """The world's, and one for each axis (core/topology/topology.py)."""
    groups = [(tp * dp * pp, 1), (tp, 1), (dp, tp), (pp, tp * dp)]
    return sum(communicator_bytes(ranks, max(1, min(ranks, GPUS_PER_NODE // step)), device) for ranks, step in groups)


def _stage(row: Row, index: int) -> Stage:
    items = row.layers + 3
    length, longer = divmod(items, row.pp)
    start = index * length + min(index, longer)
    end = start + length + (index < longer)
    kernel: Kernel = "torch" if row.attn_impl == "torch" else "fused" if row.attn_impl == "fused" else "flash"
    return Stage.of(
        row,
        index,
        layers=min(end, row.layers + 1) - max(start, 1),
        norm=start <= row.layers + 1 < end,
        kernel=kernel,
        norm_kernel="RMS kernel" in row.attn_impl,
        recomputes=row.recompute == "full",
    )


def _parameters(stage: Stage) -> list[int]:
    """Elements of each tensor of one rank."""
    h, f, t = stage.hidden, stage.ffn, stage.tp
    table = stage.vocab * h // t
    tensors = [table] if stage.first else []
    for _ in range(stage.layers):
        tensors += [h, 3 * h * h // t, h * h // t, h, h * f // t, h * f // t, h * f // t]
    return tensors + [h] * stage.norm + [table] * stage.last
