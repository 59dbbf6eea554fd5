"""Context parallelism against PyTorch's ring attention and DeepSpeed's Ulysses: time of a step, and bytes it sends.

    python benchmarks/context_parallel.py               # nine rounds: some minutes
    python benchmarks/context_parallel.py --quick       # does it run? The figures mean nothing.
    python benchmarks/context_parallel.py --save        # also writes benchmarks/results/context_parallel.md

Two CPU ranks share each sequence of a small Llama in fp32, whose decoder layers are transformers' own on every side;
only the attention between projections differs. `gather`, `ring` and `heads` are the toolkit's
(`toolkit/parallel/context/`). PyTorch's `context_parallel` refuses the CPU's kernel of attention
(aten._scaled_dot_product_flash_attention_for_cpu has no sharding strategy), so that its ring is called below the part
that refuses, with this kernel: its own loops, load balance, transfers and merging. DeepSpeed's side is the attention of
Arctic Long Sequence Training, `UlyssesSPAttentionHF`, which also gathers the position ids in every layer.

A round runs a step, forward and backward, of each side in turn on the same ranks. All sides agree with one process in
loss and in the norm of the gradients within 1e-4, which is checked. Bytes are those that a rank sends to the other one
for attention, counted where the collectives are called.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from measure.table import publish
from torch.distributed.tensor.experimental._context_parallel import _attention as pytorch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from toolkit.engines.deepspeed_patches import skip_shared_memory_op
from toolkit.launch.local_ranks import run_ranks
from toolkit.launch.output import quiet
from toolkit.parallel.context import attention
from toolkit.parallel.context.exchange import Exchange, GatherExchange, NoExchange, RingExchange
from toolkit.parallel.context.sequence import SequenceShare

RANKS = 2
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
LENGTHS = (1_024, 2_048)
_aten = torch.ops.aten
Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A way to share a sequence: the attention it registers, and the positions that this rank has."""

    name: str
    attention: str
    held: tuple[range, ...]
    around: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a rank has seen of one side."""

    loss: float
    gradient_norm: float
    sent_bytes: int
    seconds: list[float]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="steps of each side")
    parser.add_argument("--quick", action="store_true", help="two rounds of short sequences")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/context_parallel.md")
    options = parser.parse_args()
    quiet(debug=False)
    rows = []
    for length in (128,) if options.quick else LENGTHS:
        rounds = 2 if options.quick else options.rounds
        measured = run_ranks(measure, RANKS, length, rounds, timeout_seconds=1800)[0]
        check_equal(measured)
        theirs = measured["PyTorch's ring"]
        for name, side in measured.items():
            if name == "one process":
                continue
            ratios = sorted(ours / other for ours, other in zip(side.seconds, theirs.seconds, strict=True))
            spread = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            milliseconds = f"{statistics.median(side.seconds) * 1e3:.0f}"
            rows.append([f"{length:,}", name, milliseconds, spread, f"{side.sent_bytes / 2**20:.2f}"])
    model = f"{SIZES['num_hidden_layers']} layers of width {SIZES['hidden_size']}, {SIZES['num_attention_heads']} heads"
    model = f"{model} and {SIZES['num_key_value_heads']} key-value heads, fp32, one sample"
    publish(
        "context_parallel",
        title="Two ranks that share each sequence",
        headings=("tokens", "side", "ms a step", "to PyTorch's ring, in the same round", "MiB sent a step"),
        rows=rows,
        text_columns=2,
        notes=[f"{model}; {RANKS} gloo ranks. Of ratios the median, the smallest and the largest."],
        save=options.save,
    )


def check_equal(measured: dict[str, Measured]) -> None:
    """Raise RuntimeError where a side computes another loss or gradient than one process."""
    whole = measured["one process"]
    for name, side in measured.items():
        for ours, exact in ((side.loss, whole.loss), (side.gradient_norm, whole.gradient_norm)):
            if abs(ours - exact) > 1e-4 * abs(exact):
                raise RuntimeError(f"{name} computes {ours}, and one process {exact}")


def measure(length: int, rounds: int) -> dict[str, Measured]:
    """Run all sides on this rank."""
    group = dist.group.WORLD
    assert group is not None
    torch.set_num_threads(1)
    skip_shared_memory_op()
    deepspeed.init_distributed("gloo", verbose=False)
    sides = rivals(group, length)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=length))
    ids = torch.randint(SIZES["vocab_size"], (1, length + 1))
    results = {side.name: first_step(model, ids, side) for side in sides}
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            dist.barrier()
            start = time.perf_counter()
            step(model, ids, side)
            dist.barrier()
            seconds[side.name].append(time.perf_counter() - start)
    return {
        name: Measured(loss=loss, gradient_norm=norm, sent_bytes=sent, seconds=seconds[name])
        for name, (loss, norm, sent) in results.items()
    }


def step(model: LlamaForCausalLM, ids: Tensor, side: Rival) -> Tensor:
    """Compute the token losses of this rank's positions and their gradients, for the mean over the sequence."""
    positions = torch.cat([torch.arange(run.start, run.stop) for run in side.held])
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation(side.attention)
    with side.around():
        logits = model(input_ids=ids[:, positions], position_ids=positions[None], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits[0], ids[0, positions + 1], reduction="sum")
        loss = losses / (ids.shape[1] - 1)
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def first_step(model: LlamaForCausalLM, ids: Tensor, side: Rival) -> tuple[float, float, int]:
    """Return the loss and the norm of the gradients of all ranks, and the bytes that this one sends for them."""
    with SentBytes() as sent:
        loss = step(model, ids, side)
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    if side.name != "one process":
        dist.all_reduce(loss)
        dist.all_reduce(flat)
    return float(loss), float(flat.norm()), sent.total


class SentBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a rank sends to the other one: collectives of process groups, and PyTorch's functional ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            own = args[0].nbytes
            if name == "all_to_all_single":
                # Rows that stay on this rank: `input_split_sizes` has one number a rank.
                kept = args[2][dist.get_rank()] / sum(args[2])
                self.total += round(own * (1 - kept))
            elif name == "all_gather_into_tensor":
                self.total += own * (RANKS - 1)
            else:
                raise RuntimeError(f"what {name} sends is not counted here")
        elif func.namespace == "c10d":
            if name == "send":
                self.total += sum(tensor.nbytes for tensor in args[0])
            elif name == "_allgather_base_":
                self.total += args[1].nbytes * (RANKS - 1)
            elif name == "allgather_":
                self.total += sum(tensor.nbytes for tensor in args[1]) * (RANKS - 1)
            elif name in ("_reduce_scatter_base_", "alltoall_base_"):
                self.total += args[1].nbytes * (RANKS - 1) // RANKS
            elif name not in ("recv_", "barrier"):
                raise RuntimeError(f"what {name} sends is not counted here")
        elif name == "dim_zero_all_to_all":
            self.total += args[0].nbytes * (RANKS - 1) // RANKS
        return func(*args, **(kwargs or {}))


def rivals(group: dist.ProcessGroup, length: int) -> list[Rival]:
    """Register the attentions, and say what each side has."""
    attention.register()
    for name, attend in (
        ("pytorch_ring", pytorch_ring(group)),
        ("deepspeed_alst", deepspeed_alst(group, length)),
    ):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, lambda *_, **__: None)
    rank = dist.get_rank()
    half = (range(rank * length // RANKS, (rank + 1) * length // RANKS),)
    shared = SequenceShare(rank=rank, ranks=RANKS, length=length)
    zigzag = shared.held(shared.sequence(((0,),)))
    heads = SequenceShare(rank=rank, ranks=RANKS, heads=RANKS, length=length)

    def ours(share: SequenceShare, exchange: Exchange, exchanges_heads: bool = False) -> Any:
        @contextmanager
        def around() -> Iterator[None]:
            of_heads = group if exchanges_heads else None
            with attention.attending(share.sequence(((0,),)), exchange, of_heads):
                yield

        return around

    name = attention.NAME
    return [
        Rival(name="one process", attention="sdpa", held=(range(length),)),
        Rival(name="PyTorch's ring", attention="pytorch_ring", held=zigzag),
        Rival(name="toolkit: ring", attention=name, held=zigzag, around=ours(shared, RingExchange(group))),
        Rival(name="toolkit: gather", attention=name, held=zigzag, around=ours(shared, GatherExchange(group))),
        Rival(name="DeepSpeed's ALST", attention="deepspeed_alst", held=half),
        Rival(name="toolkit: heads", attention=name, held=half, around=ours(heads, NoExchange(), exchanges_heads=True)),
    ]


def pytorch_ring(group: dist.ProcessGroup) -> Callable[..., tuple[Tensor, None]]:
    """Return an attention function that is PyTorch's ring around the CPU's kernel."""

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            kernel = _aten._scaled_dot_product_flash_attention_for_cpu.default
            output, sums, *_ = pytorch._templated_ring_attention(
                group, 2, kernel, query, key, value, is_causal=True, dropout_p=0.0
            )
            ctx.save_for_backward(query, key, value, output, sums)
            return output

        @staticmethod
        def backward(ctx: Any, *received: Tensor) -> Any:
            query, key, value, output, sums = ctx.saved_tensors
            kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            return pytorch._templated_ring_attention_backward(
                group,
                2,
                kernel,
                received[0].contiguous(),
                "grad_out",
                query,
                key,
                value,
                output,
                sums,
                is_causal=True,
                dropout_p=0.0,
            )[:3]

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
        output: Tensor = Ring.apply(query, key, value)  # type: ignore[no-untyped-call]
        return output.transpose(1, 2).contiguous(), None

    return attend


def deepspeed_alst(group: dist.ProcessGroup, length: int) -> UlyssesSPAttentionHF:
    """Return DeepSpeed's attention of Arctic Long Sequence Training, around transformers' function for PyTorch's."""
    return UlyssesSPAttentionHF(
        sdpa_attention_forward,
        batch_size=1,
        attn_head_count=SIZES["num_attention_heads"],
        attn_head_size=SIZES["hidden_size"] // SIZES["num_attention_heads"],
        kv_head_count=SIZES["num_key_value_heads"],
        num_hidden_layers=SIZES["num_hidden_layers"],
        process_group=group,
        local_seq_length=length // RANKS,
        global_seq_length=length,
    )


if __name__ == "__main__":
    main()
