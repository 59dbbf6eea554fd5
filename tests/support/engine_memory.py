"""Every tensor that a live engine holds, by storage, counted once: what the memory estimate is compared with.

Two ways find them: the garbage collector's list of all tensors in the process, and a walk over the attributes of
engine, optimizer and model, which says what each one is for. What only the first one finds is counted too.
"""

import gc
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.estimate.deepspeed_states import deepspeed_states
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.pipeline_buffers import PipelineBuffers, routing_counters
from toolkit.estimate.recorded.recordings import parameters
from toolkit.estimate.trainable import Trainable
from toolkit.planner.run_memory import model_config, settings_of

CPU = torch.device("cpu")
Change = Callable[[dict[str, Any]], None]
Count = dict[str, int]

_KINDS = {
    "buckets": ("ipg_buckets", "temp_grad_buffer_for_cpu_offload", "temp_grad_buffer_for_gpu_offload"),
    "parameters": (
        "lp_param_buffer",
        "fp16_partitioned_groups_flat",
        "param_groups_fp16_flat_cpu_memory",
        "param_buffer_of_bit16_for_cpu_offload_groups",
    ),
    "masters": (
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
        "fp32_partitioned_groups_flat",
        "fp32_groups",
        "fp32_groups_flat",
    ),
    "gradients": (
        "non_expert_gradients",
        "grad_partitions_flat_buffer",
        "averaged_gradients",
        "all_grad_tensors",
        "accumulated_grads_in_cpu",
        "norm_for_param_grads",
        "grads_in_partition",
    ),
}
"""Attributes of DeepSpeed's optimizers."""
_CHANNELS = ("pipe_buffers", "pipe_recv_buf", "grad_layer", "_grad_layer_buf")


def live_tensors() -> Iterator[torch.Tensor]:
    """Every tensor of the process, and its gradient: that one may have no Python object yet."""
    time.sleep(0.05)  # the thread of a collective lets go of its tensors a moment after it is done
    gc.collect()
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def storages(tensors: Any) -> dict[int, int]:
    """Bytes by address."""
    found = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def reachable(root: Any) -> Iterator[torch.Tensor]:
    """Tensors in a structure of containers and objects, their gradients and attributes included."""
    seen: set[int] = set()
    waiting = deque([root])
    while waiting:
        thing = waiting.popleft()
        plain = isinstance(thing, str | bytes | int | float | type | types.ModuleType | torch.dtype | torch.device)
        if thing is None or plain or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad
        elif isinstance(thing, dict):
            waiting.extend(thing.values())
        elif isinstance(thing, list | tuple | set | deque):
            waiting.extend(thing)
        elif hasattr(thing, "__dict__"):
            waiting.extend(vars(thing).values())


def by_kind(engine: Any, bucket_bytes: set[int]) -> dict[int, str]:
    """What each storage is for, by address; the first kind that claims one keeps it."""
    claims: dict[int, str] = {}

    def claim(kind: str, tensors: Any) -> None:
        for address in storages(tensors):
            claims.setdefault(address, kind)

    optimizer, model = engine.optimizer, engine.model
    for kind in ("buckets", "parameters"):
        for name in _KINDS[kind]:
            claim(kind, reachable(getattr(optimizer, name, None)))
    claim("buckets", _swap_buffers(optimizer, model))
    parameters = list(model.parameters())
    claim("parameters", parameters)
    claim("parameters", [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")])
    second = [(p, getattr(p, "ds_secondary_tensor", None)) for p in parameters]
    claim("gathered", [tensor for p, tensor in second if p.requires_grad and tensor is not None])
    claim("parameters", [tensor for _, tensor in second if tensor is not None])
    accumulated = [t for p in parameters for t in (p.grad, getattr(p, "grad_accum", None)) if t is not None]
    for tensor in accumulated:
        # A gradient may lie in a reduction bucket, and keeps all of it.
        in_bucket = tensor.untyped_storage().nbytes() in bucket_bytes
        claim("alive_buckets" if in_bucket else "gradients", [tensor])
    for name in _KINDS["masters"]:
        held = list(reachable(getattr(optimizer, name, None)))
        claim("gradients", [t.grad for t in held if t.is_leaf and t.grad is not None])
    for name in _KINDS["gradients"]:
        claim("gradients", reachable(getattr(optimizer, name, None)))
    for name in _KINDS["masters"]:
        claim("masters", reachable(getattr(optimizer, name, None)))
    base = getattr(optimizer, "optimizer", optimizer)
    claim("optimizer", reachable((base.state, getattr(base, "name2qmap", None))))  # tables of 8-bit moments
    named = dict(model.named_buffers())
    claim("model_buffers", [b for name, b in named.items() if not name.endswith("zero_of_another_stage")])
    routing = getattr(engine, "routing", None)
    claim("counters", reachable(vars(routing)) if routing is not None else ())
    for name in _CHANNELS:
        claim("channels", reachable(getattr(engine.engine, name, None)))
    return claims


def _swap_buffers(optimizer: Any, model: Any) -> Iterator[Any]:
    """What DeepSpeed's files pass through: page-locked buffers."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        yield from swapper.swap_buffer_manager.all_buffers
    for parameter in model.parameters():
        one = getattr(parameter, "nvme_swapper", None)
        if one is not None:
            yield from (one.buffers, one.partitioned_swap_buffer)


def count(engine: Any, before: set[int], bucket_bytes: set[int]) -> Count:
    """Bytes by kind of all that has come since `before`; `counters` is what no kind claims."""
    claims = by_kind(engine, bucket_bytes)
    totals: Count = {}
    is_cut = engine.partition is not None and engine.partition.stage is not None
    tensors = list(live_tensors())
    whole_numbers = storages(t for t in tensors if t.dtype == torch.int64)
    for address, size in storages(tensors).items():
        if address in before or address in whole_numbers:
            continue  # token ids are the loader's
        kind = claims.get(address)
        if kind is None:
            kind = "channels" if is_cut and size > 64 else "counters"
        totals[kind] = totals.get(kind, 0) + size
    return totals


@dataclass
class Cell:
    """Bytes by kind on one rank."""

    measured: Count
    """Between two steps."""
    estimated: Count
    measured_at_update: Count
    """When all gradients are reduced and nothing has been updated. Without counters."""
    estimated_at_update: Count


def measure(recipe: Recipe, change: Change | None = None, *, steps: int = 2) -> Cell:
    """On this rank, in an engine that has taken some steps. `change` edits the DeepSpeed config that it gets."""
    from toolkit.data.samples.loader import MicroBatchLoader
    from toolkit.data.tokens.token_cache import prepare
    from toolkit.engines.factory import create_engine
    from toolkit.training.preflight import check_model, deepspeed_config, find_shape

    allow_fp16()
    rank, model = dist.get_rank(), check_model(recipe, CPU)
    job = Job.of(recipe, dist.get_world_size(), find_shape(model))
    config = deepspeed_config(job, model, CPU)
    if change is not None:
        change(config)
    corpus = prepare(recipe.data, progress=False)
    before = set(storages(live_tensors()))
    engine: Any = create_engine(job, CPU, config, eos_id=corpus.eos_id)
    bucket = config["zero_optimization"].get("reduce_bucket_size", 0)
    bucket_bytes = {2 * bucket, 4 * bucket}
    snapshots: list[Count] = []
    loader = MicroBatchLoader.open(job, corpus, rank=rank)
    with loader.prefetch(0) as ahead:
        for step in range(steps):
            if step == steps - 1:
                engine.before_update = lambda: snapshots.append(count(engine, before, bucket_bytes))
            tokens = loader.target_tokens(step)
            engine.train_step(loader.micro_batches(step, ahead), target_tokens=tokens, learning_rate=1e-3)
    (at_update,) = snapshots
    del at_update["counters"]
    between, update = estimated(recipe, config, engine)
    return Cell(
        measured=count(engine, before, bucket_bytes) | in_files(recipe.parallel.nvme_path, rank),
        estimated=between,
        measured_at_update=at_update,
        estimated_at_update=update,
    )


def in_files(nvme_path: str | None, rank: int) -> Count:
    """Bytes by kind of a rank's files on NVMe."""
    found: Count = {}
    for path in Path(nvme_path).glob(f"*/zero_stage_3/*/rank{rank}/*.swp") if nvme_path else ():
        kind = "parameters" if "_param" in path.name else "optimizer" if "exp_avg" in path.name else "masters"
        kind = "nvme gradients" if "_gradient_" in path.name else f"nvme {kind}"
        found[kind] = found.get(kind, 0) + path.stat().st_size
    return found


def estimated(recipe: Recipe, config: dict[str, Any], engine: Any) -> tuple[Count, Count]:
    """The same two counts out of the estimate: both memories together, for here they are one."""
    layout = recipe.layout(dist.get_world_size())
    batch = recipe.resolve_batch(layout)
    place = layout.coordinate(dist.get_rank())
    model = ModelFacts.from_config(model_config(recipe))
    layers = engine.stage_layers[place.pipe] if engine.stage_layers else model.shape.layers
    before = sum(engine.stage_layers[: place.pipe])
    trainable = Trainable.of(recipe.model).text
    whole = parameters(model.config, trainable) if trainable else model.parameters
    held = whole.rank_parameters(
        layers=range(before, before + layers),
        first=place.pipe == 0,
        last=place.pipe == layout.pp - 1,
        tp=layout.tp,
        ep=layout.ep,
        inner=layout.experts == "inner",
        by_matrix=recipe.optimizer.name in ("muon", "adamw8bit"),
        by_copies=recipe.optimizer.name == "adamw8bit",
    )
    settings = settings_of(config, recipe, "cpu")
    states = deepspeed_states(settings, held, dp=layout.dp, data_rank=place.data, accumulation=batch.accumulation)
    between = {
        kind: getattr(states.resident, kind) + getattr(states.host, kind)
        for kind in ("parameters", "gradients", "masters", "optimizer", "buckets", "model_buffers", "counters")
    }
    files = {f"nvme {kind}": getattr(states.nvme, kind) for kind in vars(states.nvme)}
    between["counters"] += routing_counters(model.shape)
    if layout.pp > 1:
        last, shape = place.pipe == layout.pp - 1, model.shape
        tokens = recipe.batch.micro_batch_size * recipe.data.seq_len
        buffers = PipelineBuffers(
            hidden=tokens * shape.hidden * settings.model_bytes // (layout.tp if layout.sequence_parallel else 1),
            weight_bytes=settings.model_bytes,
            is_last=last,
            micro_batches=batch.accumulation,
        )
        between["channels"] = buffers.between
        between["counters"] += buffers.counters(held)
    update = dict(between)
    del update["counters"]  # the step's own sums of losses are there too
    update["gradients"] += states.complete + states.host_complete
    update["gathered"] = states.reduction if settings.hpz > 1 else 0
    update["alive_buckets"] = states.complete_buckets
    return _without_zeros(between | files), _without_zeros(update)


def _without_zeros(count: Count) -> Count:
    return {kind: size for kind, size in count.items() if size}


def allow_fp16() -> None:
    """DeepSpeed refuses fp16 on CPUs because they are slow at it, not because PyTorch cannot."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    kind.is_fp16_supported = lambda self: True
    kind.supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]
