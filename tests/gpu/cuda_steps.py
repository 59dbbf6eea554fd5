"""Training steps of one rank on fake tensors of a stub GPU: run in the process of tests/support/stub_cuda.py.

What a step did is returned as plain data, because the tensors end with the process.
"""

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cuda_facts import Facts
from stub_facts import LOG
from torch.nn.parallel import distributed as torch_ddp
from transformers import PreTrainedModel, modeling_flash_attention_utils

from toolkit.checkpoint import tensor_source
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines import accelerate_engine, gradient_norm, optimizer
from toolkit.engines.base import Engine
from toolkit.engines.deepspeed_engine import DeepSpeedEngine
from toolkit.engines.local_tensors import local_tensors
from toolkit.engines.optimizer_states import MASTER
from toolkit.model_init.build_model import load_config
from toolkit.recorder.gpu_kernels import attend
from toolkit.recorder.rehearsal import rank_step
from toolkit.recorder.rehearsal.collectives import _caller
from toolkit.recorder.rehearsal.fake_rank import FakeRank
from toolkit.recorder.rehearsal.preload import preload
from toolkit.recorder.rehearsal.rank_step import Partitioned, micro_batches, rehearse_rank
from toolkit.recorder.rehearsal.rehearse import rehearsed_config, rehearsed_job, whole_structure

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
preload(debug=False)
# What one rank imports late, each would; what is there already, no rank has to search for garbage.
for name in ("deepspeed.compile.backend", "peft"):
    importlib.import_module(name)
gc.collect()
gc.freeze()


def take_steps(
    recipe: Recipe, layout: str, rank: int = 0, received: Sequence[list[int]] = (), fault: str = ""
) -> Facts:
    """Train a rank for some steps, evaluate, gather, copy what is saved, and resume. Raises RehearsalFailure."""
    strategy = Strategy.parse(layout)
    job = Job.of(strategy.apply(recipe, 1), strategy.world_size(1))
    small = rehearsed_job(job)
    facts = Facts()
    with ddp_without_values(), flash_attention(facts), watched(facts), FAULTS[fault]():
        model_config = load_config(small.recipe.model)
        layers = model_config.num_hidden_layers
        stages = len(job.layout.stage_ranks)  # virtual ones, under a schedule
        bounds = tuple(stage * layers // stages for stage in range(stages + 1))
        partitioned = Partitioned(structure=whole_structure(small), bounds=bounds)
        config = None
        if job.recipe.train.engine == "deepspeed":
            config = rehearsed_config(small, hidden_size=model_config.hidden_size, on_gpu=True, device=GPU)
        step = rehearse_rank(
            small,
            config,
            rank,
            partitioned,
            received=received,
            device=GPU,
            inspect=lambda engine: inspect(engine, small, facts),
        )
    facts.sent = step.sent
    facts.collectives = {(call.kind, call.group, call.dtype) for call in step.calls[slice(*step.step)]}
    return facts


def inspect(engine: Engine, job: Job, facts: Facts) -> None:
    """Look at what the engine holds, and run what runs between steps: validation, gathering, a snapshot."""
    facts.is_over = True
    facts.log = list(LOG)
    facts.held["parameters"] = {place(parameter) for parameter in engine.model.parameters()}
    facts.held["buffers"] = {str(buffer.device) for buffer in engine.model.buffers()}
    for kind in (MASTER, *engine.states.kinds):
        with engine.states.opened(kind):
            values = [engine.states.local(parameter, kind) for _, parameter in kept(engine, kind)]
        facts.held[kind] = {place(value) for value in values}
    memory = tensor_source.SnapshotMemory()
    with mock.patch.object(tensor_source, "host_memory", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)):
        for group in local_tensors(engine).groups:
            values = [group.values(index) for index in range(len(group.local_shards))]
            memory.clear(sum(value.nbytes for value in values), len(values))
            facts.saved |= {str(memory.copy(value).device) for value in values}
    assert engine.evaluate(micro_batches(job)) >= 0
    if job.layout.pp > 1:
        return  # which stage has a parameter is a value that other ranks send
    for _ in engine.full_parameters():
        pass
    for _ in engine.full_states(MASTER):
        pass


def kept(engine: Engine, kind: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of which this rank has a part of a state."""
    for name, parameter in engine.named_parameters():
        if parameter.requires_grad and engine.states.extent(parameter, kind)[1]:
            yield name, parameter


def place(tensor: torch.Tensor) -> str:
    """Return device and dtype in one word."""
    return f"{tensor.device} {str(tensor.dtype).removeprefix('torch.')}"


@contextmanager
def watched(facts: Facts) -> Iterator[None]:
    """Note the operations of the last step."""
    dispatch = FakeRank.__torch_dispatch__
    wait = torch.cuda.Event.synchronize
    take = rank_step.take_step

    def noting(mode: FakeRank, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if facts.is_over:
            return dispatch(mode, func, types, args, kwargs)
        facts.operations[func._schema.name] += 1
        if func is aten._local_scalar_dense.default and args[0].device.type == "cuda":
            facts.reads[_caller(sys._getframe(1))] += 1
            facts.order.append("read")
        if _is_blocking_copy(func, args, kwargs or {}):
            facts.blocking_copies[_caller(sys._getframe(1))] += 1
        if func._schema.name == "aten::_fused_adamw_":
            tensors = [tensor for tensors in args[:6] for tensor in tensors]
            facts.order.append("update")
            facts.fused.append(({str(one.device) for one in tensors}, {str(one.dtype) for one in tensors}))
        return dispatch(mode, func, types, args, kwargs)

    def synchronize(event: torch.cuda.Event) -> None:
        facts.reads[_caller(sys._getframe(1))] += 1
        facts.order.append("read")
        wait(event)

    def take_step(engine: Engine, job: Job) -> None:
        LOG.clear()
        facts.operations.clear()
        facts.reads.clear()
        facts.order.clear()
        facts.blocking_copies.clear()
        facts.fused.clear()
        take(engine, job)

    with (
        mock.patch.object(FakeRank, "__torch_dispatch__", noting),
        mock.patch.object(torch.cuda.Event, "synchronize", synchronize),
        mock.patch.object(rank_step, "take_step", take_step),
    ):
        yield


def _is_blocking_copy(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation copies between the host and the GPU, and returns when the GPU has got there."""
    if func is aten._to_copy.default:
        device = kwargs.get("device")
        target = args[0].device if device is None else torch.device(device)
        source = args[0].device
        waits = not kwargs.get("non_blocking")
    elif func is aten.copy_.default:
        target = args[0].device
        source = args[1].device
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    else:
        return False
    return waits and {target.type, source.type} == {"cpu", "cuda"}


@contextmanager
def ddp_without_values() -> Iterator[None]:
    """Let DDP do in Python what its C++ code cannot do with fake tensors: average gradients over other ranks.

    The shapes of all ranks are not compared, and no rank is sent the weights of the first one.
    """
    build = torch_ddp.DistributedDataParallel.__init__

    def average(group: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
        averaged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        averaged.set_result(bucket.buffer())
        return averaged

    def init(module: torch_ddp.DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        build(module, *arguments, **options)
        module.register_comm_hook(None, average)

    with (
        mock.patch.object(torch_ddp.DistributedDataParallel, "__init__", init),
        mock.patch.object(torch_ddp, "_verify_param_shape_across_processes"),
        mock.patch.object(torch_ddp, "_sync_module_states"),
    ):
        yield


def _host_tokens() -> Any:
    """Leave the micro-batches of the rank on the host."""
    return mock.patch.object(MicroBatch, "to", lambda batch, device: batch)


def _waiting_tokens() -> Any:
    """Copy micro-batches to the GPU as from ordinary memory: the host waits."""
    return mock.patch.object(MicroBatch, "to", lambda batch, device: batch._map(lambda tensor: tensor.to(device)))


def _host_losses() -> Any:
    """Sum the losses over replicas on the host, which gloo does and NCCL cannot."""
    return mock.patch.object(
        DeepSpeedEngine, "_sum_over_replicas", lambda engine, values: dist.all_reduce(values.cpu())
    )


def _host_squares() -> Any:
    """Compute a part of the gradient norm on the host."""
    total = gradient_norm.total_norm
    return mock.patch.object(
        gradient_norm, "total_norm", lambda gradients: total([total(gradients).reshape(1).cpu(), *gradients])
    )


def _late_optimizer() -> Any:
    """Choose the kernels of the optimizer for where the parameters are, which DDP has not moved yet."""
    build = optimizer.torch_optimizer

    def chosen(recipe: Any, groups: Any, *, on_gpu: bool) -> Any:
        return build(recipe, groups, on_gpu=any(p.is_cuda for group in groups for p in group["params"]))

    return mock.patch.object(accelerate_engine, "torch_optimizer", chosen)


FAULTS: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "tokens on the host": _host_tokens,
    "tokens copied with a wait": _waiting_tokens,
    "losses summed on the host": _host_losses,
    "a part of the norm on the host": _host_squares,
    "an optimizer chosen too early": _late_optimizer,
}


@contextmanager
def flash_attention(facts: Facts) -> Iterator[None]:
    """Have a package flash_attn, whose functions check what the real ones do, and note what they are given."""

    def dense(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> torch.Tensor:
        facts.flash.add(("dense", *map(checked, (q, k, v)), str(causal)))
        attended = attend(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=dropout_p, is_causal=causal)
        return attended.transpose(1, 2)

    def varlen(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> torch.Tensor:
        assert q.dim() == k.dim() == v.dim() == 3, "varlen takes [tokens, heads, size]"
        for bounds in (cu_seqlens_q, cu_seqlens_k):
            assert bounds.is_cuda
            assert bounds.dtype == torch.int32
        facts.flash.add(("varlen", *map(checked, (q, k, v)), str(causal)))
        return q + k.sum() + v.sum()

    package = ModuleType("flash_attn")
    padding = ModuleType("flash_attn.bert_padding")
    for name, value in (("flash_attn_func", dense), ("flash_attn_varlen_func", varlen)):
        setattr(package, name, value)
    package.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    padding.pad_input = padding.unpad_input = None  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, {"flash_attn": package, "flash_attn.bert_padding": padding}),
        mock.patch.object(modeling_flash_attention_utils, "is_flash_attn_2_available", return_value=True),
        mock.patch.object(PreTrainedModel, "_flash_attn_import_error"),
    ):
        yield


def checked(x: torch.Tensor) -> str:
    """Return where an argument of flash attention is, once it is what the kernels take."""
    assert x.is_cuda
    assert x.dtype in (torch.bfloat16, torch.float16)
    assert x.stride(-1) == 1
    assert x.shape[-1] <= 256
    return place(x)
