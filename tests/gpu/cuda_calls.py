"""Calls of `torch.cuda` outside of a step, on a stub GPU: run in the process of tests/support/stub_cuda.py.

What a call did is returned as plain data, because the tensors end with the process.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cuda_facts import Facts
from cuda_steps import checked, flash_attention, place
from stub_facts import LOG
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from toolkit.calibrate import kernels
from toolkit.checkpoint import tensor_source
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.save_plan import LocalShard, PlannedFile
from toolkit.checkpoint.tensor_source import ShardedTensorGroup, ShardedTensorSource, host_memory
from toolkit.config.layout import Layout
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import prefetched
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.doctor.probe import torch_facts
from toolkit.engines.dropout import seed_generators
from toolkit.engines.factory import check_precision
from toolkit.launch import process_group
from toolkit.launch.environment import describe_device, local_device
from toolkit.launch.rank_environment import RankEnvironment, pick_device
from toolkit.model_init import offload_activations
from toolkit.model_init.float8 import check_float8
from toolkit.model_init.liger import check_liger
from toolkit.parallel.context.attention import SequenceView, attend
from toolkit.parallel.context.exchange import NoExchange
from toolkit.parallel.context.sequence import SequenceSlice
from toolkit.parallel.shard import Shard
from toolkit.parallel.tensor.region import _generator
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity.run.dropout_masks import DropoutMasks
from toolkit.recorder.rehearsal.fake_rank import fake_rank
from toolkit.training.metrics import peak_memory_bytes
from toolkit.training.plan_launch import _rank_device
from toolkit.training.printer import _peak_flops

GPU = torch.device("cuda", 0)


def devices(recipe: Recipe) -> dict[str, Any]:
    """Return what is asked of the device before and around training."""
    here = RankEnvironment(rank=0, world_size=1, local_rank=0, master_addr="localhost", master_port=1)
    check_precision(recipe, GPU)
    check_float8("tensorwise", GPU)
    check_liger(GPU)
    with mock.patch.object(dist, "is_nccl_available", return_value=True):
        facts = torch_facts()
    return {
        "picked": str(pick_device(here)),
        "set": [call for call in LOG if call[0] == "set_device"],
        "local": str(local_device()),
        "described": describe_device(GPU),
        "peak bytes": peak_memory_bytes(GPU),
        "peak FLOP/s": _peak_flops(recipe, GPU),
        "planned": (_rank_device(GPU).device, _rank_device(GPU).memory_bytes),
        "doctor": (facts["devices"], facts["bf16"], facts["nccl"]),
    }


def without_bf16(recipe: Recipe) -> str:
    """Return the refusal of a recipe in bf16 on a GPU that has none."""
    with mock.patch.object(torch.cuda, "is_bf16_supported", return_value=False):
        try:
            check_precision(recipe, GPU)
        except Exception as error:
            return str(error)
    return ""


def joined() -> dict[str, Any]:
    """Return the arguments with which a rank on a GPU joins the process group."""
    asked: dict[str, Any] = {}
    here = RankEnvironment(rank=0, world_size=1, local_rank=0, master_addr="localhost", master_port=0)
    with (
        mock.patch.object(dist, "init_process_group", lambda **options: asked.update(options)),
        mock.patch.object(dist, "barrier"),
        mock.patch.object(dist, "destroy_process_group"),
        process_group.process_group(here, GPU, hang_timeout_seconds=0),
    ):
        pass
    return {"backend": asked["backend"], "device": str(asked["device_id"])}


def pinned_micro_batches() -> list[tuple[bool, bool, str]]:
    """Return of prefetched micro-batches whether they were pinned, are pinned behind `with`, and where they go."""
    batches = [MicroBatch(input_ids=torch.full((2, 4), n), labels=torch.full((2, 4), n)) for n in range(3)]
    found = []
    with prefetched(iter(batches)) as ahead:
        for number, batch in enumerate(ahead):
            assert batch.input_ids[0, 0] == number
            with FakeTensorMode(allow_non_fake_inputs=True):
                moved = batch.to(GPU)
            found.append((batch.input_ids.is_pinned(), batch.labels.is_pinned(), str(moved.labels.device)))
    return found


def snapshot_memory() -> dict[str, Any]:
    """Return of the host memory of a snapshot whether it is pinned and aligned, and of what takes its place."""
    memory = host_memory(10_000)
    with mock.patch.object(torch, "empty", side_effect=[RuntimeError("cudaHostAlloc failed")]):
        unpinned = host_memory(10_000)
    return {
        "pinned": memory.is_pinned(),
        "bytes": memory.numel(),
        "offset": memory.data_ptr() % tensor_source.PAGE_BYTES,
        "without": (unpinned.is_pinned(), unpinned.numel()),
    }


def generators() -> dict[str, Any]:
    """Return the seeds that the dropout of one rank and of tensor-parallel ranks leaves on the GPU."""
    seed_generators(1234, GPU)
    seeded = torch.cuda.default_generators[0].initial_seed()
    masks = DropoutMasks.__new__(DropoutMasks)
    masks._device = GPU
    before = masks._state()
    seed_generators(99, GPU)
    masks._restore(before)
    return {
        "seeded": seeded,
        "host": torch.initial_seed(),
        "restored": torch.cuda.default_generators[0].initial_seed(),
        "of a region": str(_generator(GPU).device),
        "of a region without an index": str(_generator(torch.device("cuda")).device),
    }


def offloaded_activations() -> list[tuple[str, ...]]:
    """Return what streams and events do in a pass over three layers whose activations are offloaded."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(offload_activations, "SMALLEST_BYTES", 1),
        mock.patch.object(offload_activations, "_is_plain", return_value=True),
    ):
        with torch.device(GPU):
            config = tiny_config("llama", num_hidden_layers=3)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
        offload_activations.offload_activations(model)
        copies = _copies()
        LOG.clear()
        with copies:
            ids = torch.zeros(2, 16, dtype=torch.long, device=GPU)
            model(input_ids=ids, use_cache=False).logits.sum().backward()
    return list(LOG)


def documents_in_flash_attention() -> dict[str, Any]:
    """Return what flash attention gets for a row of several documents, whose bounds transformers is given."""
    facts = Facts()
    with FakeTensorMode(allow_non_fake_inputs=True), flash_attention(facts):
        q, k, v = (torch.empty(1, 12, 2, 8, dtype=torch.bfloat16, device=GPU, requires_grad=True) for _ in range(3))
        bounds = torch.empty(4, dtype=torch.int32, device=GPU)
        lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 6, "max_length_k": 6}
        out = _flash_attention_forward(q, k, v, None, 12, True, attn_implementation="flash_attention_2", **lengths)
        out.sum().backward()
        assert q.grad is not None
        gradient = place(q.grad)
    return {"given": facts.flash, "shape": tuple(out.shape), "gradient": gradient}


def documents_in_blocks(size: int) -> dict[str, Any]:
    """Return what PyTorch's flash attention gets for packed documents, attended in blocks by heads of this size."""
    calls: dict[str, list[tuple[Any, ...]]] = {"forward": [], "backward": []}
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            if function is forward:
                calls["forward"].append(tuple(checked(each) for each in arguments[:3]))
            if function is backward:
                sums, *bounds = arguments[5:8]
                assert all(place == f"{GPU} bfloat16" for place in map(checked, arguments[:5]))
                calls["backward"].append((sums.is_contiguous(), str(sums.dtype), *bounds))
            return function(*arguments, **(keywords or {}))

    sequence = SequenceSlice(rank=0, ranks=1, length=24, starts=((0, 5, 16), (0, 11)))
    view = SequenceView(sequence=sequence, exchange=NoExchange())
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(2, 4, 24, size, dtype=torch.bfloat16, device=GPU, requires_grad=True)
        key, value = (torch.empty(2, 2, 24, size, dtype=torch.bfloat16, device=GPU, requires_grad=True) for _ in "kv")
        with Watch():
            attend(torch.nn.Identity(), query, key, value, view)[0].sum().backward()
        assert query.grad is not None
        gradient = place(query.grad)
    return {**calls, "gradient": gradient}


@contextmanager
def _copies() -> Iterator[None]:
    """Log each direction of copies between host and GPU once, with the stream that it runs on."""
    copy = torch.Tensor.copy_

    def logged(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if target.device != source.device:
            entry = (
                "copy",
                str(torch.cuda.current_stream().stream_id),
                f"{source.device.type} to {target.device.type}",
            )
            if LOG[-1:] != [entry]:
                LOG.append(entry)
            assert non_blocking
        return copy(target, source, non_blocking)

    with mock.patch.object(torch.Tensor, "copy_", logged):
        yield


def sent_checkpoint() -> dict[str, Any]:
    """Return where tensors are that one of two tensor-parallel ranks sends, receives and writes for a checkpoint."""
    layout = Layout(tp=2, dp=1)
    spec = TensorSpec(name="weight", shape=(8, 6), dtype=torch.float32)
    whole = TensorSpec(name="bias", shape=(8,), dtype=torch.float32)
    files = [
        PlannedFile(path="a", kind="model", rank=0, specs=(spec,)),
        PlannedFile(path="b", kind="model", rank=1, specs=(whole,)),
    ]
    shards = [
        [
            LocalShard(shard=Shard(name="weight", shape=(8, 6), dim=1, pieces=((3 * rank, 3),)), start=0, length=24),
            LocalShard(shard=Shard(name="bias", shape=(8,), owner=rank == 0), start=0, length=8),
        ][: 2 - rank]
        for rank in range(2)
    ]
    transferred: list[tuple[str, str]] = []

    def batch(operations: Sequence[Any]) -> list[Any]:
        transferred.extend((operation.op.__name__, str(operation.tensor.device)) for operation in operations)
        return [SimpleNamespace(wait=lambda: None)]

    def gather(ranks: Ranks, value: Any) -> list[Any]:
        return [{"model": of_rank} for of_rank in shards]

    with (
        fake_rank(layout, 0, device=GPU),
        mock.patch.object(Ranks, "gather", gather),
        mock.patch.object(dist, "batch_isend_irecv", batch),
    ):
        values = [torch.zeros(24, device=GPU), torch.zeros(8, device=GPU)]
        group = ShardedTensorGroup(kind="model", specs=[spec, whole], local_shards=shards[0], values=values.__getitem__)
        source = ShardedTensorSource(groups=[group])
        written = {}
        for _, name, value in source.tensors(files, Ranks.of()):
            assert isinstance(value, torch.Tensor)
            written[name] = (str(value.device), tuple(value.shape))
    return {"transferred": transferred, "written": written}


def calibrated() -> list[float]:
    """Return the rates that are measured of a GPU, here of one that computes nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        rates = [
            kernels.product_rates([(64, 64, 64)], "bf16", GPU, 0.0)[0][3],
            kernels.memory_rate(GPU, 0.0, 1 << 12),
            kernels.kernel_seconds(GPU, 0.0),
            kernels.host_rate(GPU, 0.0, 1 << 12),
        ]
    assert ("synchronize", str(GPU)) in LOG
    return rates
