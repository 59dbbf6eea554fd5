"""What is tested on GPUs, as tables: runs that must train alike, and setups whose memory was estimated.

A row holds overrides of `base`, as on the command line of `dstk train`. The rehearsal on a CPU runs the same rows with
fewer steps, and a tiny model where memory is measured; what a machine lacks is skipped and named.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

# Before anything asks for GPUs: asking the driver itself would keep forks of this process from using them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
Overrides = tuple[str, ...]
REHEARSAL = "DSTK_REHEARSAL"
"""Set to `cpu`: a rehearsal on CPU ranks, although there may be a GPU."""
GPUS = int(os.environ.get("DSTK_GPUS", "1"))


def on_cpu() -> bool:
    return os.environ.get(REHEARSAL) == "cpu"


REFERENCE: Overrides = ("train.engine=reference",)
FP32 = 1e-5
"""Ten times what CPU ranks are held to: a GPU's kernels sum in other orders, some with atomic additions."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run: what it changes of the base recipe."""

    overrides: Overrides
    ranks: int = 1
    stops_at: int = 0
    measures_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run that has to train what another one trains."""

    group: str
    name: str
    run: Overrides
    like: Overrides = REFERENCE
    ranks: int = 1
    within: float = FP32
    """Relative, of every step's loss; ten times as much of the gradient norm. With `only_last`, of the last loss."""
    only_last: bool = False
    needs: str = ""
    """A module, a program, or `cuda`, without which the cell is skipped."""

    stops_at: int = 0
    """Stop after this step, and resume in new processes."""

    @property
    def id(self) -> str:
        return f"{self.group}-{self.name}".replace(" ", "-")

    @property
    def specs(self) -> list[Spec]:
        return [Spec(overrides=self.run, ranks=self.ranks, stops_at=self.stops_at), Spec(overrides=self.like)]


@dataclass(frozen=True, kw_only=True)
class MemoryCell:
    """A setup whose peak is estimated, and measured."""

    group = "memory"

    name: str
    model: str
    run: Overrides
    seq_len: int = 1024
    micro_batch_size: int = 4

    @property
    def overrides(self) -> Overrides:
        model, seq_len = ("gpt2-tiny", 64) if on_cpu() else (self.model, self.seq_len)
        size = 2 if on_cpu() else self.micro_batch_size
        batch = f"batch.micro_batch_size={size}", f"batch.global_batch_size={2 * size}"
        model_fields = f"model.name_or_path={model}", "model.overrides={}"
        return (*model_fields, f"data.seq_len={seq_len}", "train.steps=3", *batch, *self.run)

    @property
    def id(self) -> str:
        return f"memory-{self.name}".replace(" ", "-")

    @property
    def specs(self) -> list[Spec]:
        return [Spec(overrides=self.overrides, measures_memory=True)]


def zero(stage: int, *more: str) -> Overrides:
    return (f"parallel.zero_stage={stage}", *more)


def low_precision() -> Iterable[Cell]:
    """Sixteen bits learn what fp32 learns: two units of their roundoff."""
    for name, unit in (("bf16", 2.0**-8), ("fp16", 2.0**-11)):
        for stage in range(4):
            run = zero(stage, f"precision={name}")
            yield Cell(group=name, name=f"ZeRO-{stage}", run=run, within=2 * unit, only_last=True, needs=name)


MUON = ("optimizer.name=muon", "optimizer.lr=0.01", "optimizer.adamw_lr=1e-3")
ADAFACTOR = ("optimizer.name=adafactor", "optimizer.lr=0.01")
EIGHT_BITS = ("optimizer.name=adamw8bit",)
LORA = ("model.lora={r: 4, alpha: 8}",)
BLOCKS = ("model.attn_implementation=blocks", "model.overrides.attn_pdrop=0.0")
DOCUMENTS = ("data.document_masking=true", "model.overrides.attn_pdrop=0.0")
BF16 = ("precision=bf16",)
LLAMA = ("model.name_or_path=llama-tiny", "model.overrides={vocab_size: 320}")
CELLS = [
    *(Cell(group="fp32", name=f"ZeRO-{stage}", run=zero(stage)) for stage in range(4)),
    *low_precision(),
    Cell(group="attention", name="sdpa", run=zero(2, "model.attn_implementation=sdpa"), like=(
        *REFERENCE, "model.attn_implementation=eager")),
    Cell(group="attention", name="sdpa in bf16", run=zero(2, *BF16, "model.attn_implementation=sdpa"), like=zero(
        2, *BF16, "model.attn_implementation=eager"), within=2.0**-7, only_last=True),
    Cell(group="attention", name="blocks, documents", run=zero(2, *BLOCKS, *DOCUMENTS), like=(*REFERENCE, *DOCUMENTS)),
    Cell(group="attention", name="blocks in bf16, documents", run=zero(2, *BF16, *BLOCKS, *DOCUMENTS), like=zero(
        2, *BF16, *DOCUMENTS), within=2.0**-7, only_last=True),
    Cell(group="attention", name="flash", run=zero(2, *BF16, "model.attn_implementation=flash_attention_2"),
         within=2.0**-7, only_last=True, needs="flash_attn"),
    Cell(group="compile", name="ZeRO-1", run=zero(1, "train.compile=true"), needs="c++"),
    Cell(group="compile", name="ZeRO-3", run=zero(3, "train.compile=true"), needs="c++ on a GPU"),
    Cell(group="loss", name="chunked", run=zero(2, "model.loss=chunked")),
    Cell(group="loss", name="chunked in bf16", run=zero(3, *BF16, "model.loss=chunked"), within=2.0**-7,
         only_last=True),
    Cell(group="liger", name="fp32", run=zero(2, *LLAMA, "model.kernels=liger"), like=(*REFERENCE, *LLAMA),
         needs="liger_kernel on a GPU"),
    Cell(group="liger", name="bf16, ZeRO-3", run=zero(3, *LLAMA, *BF16, "model.kernels=liger"), like=zero(
        3, *LLAMA, *BF16), within=2.0**-7, only_last=True, needs="liger_kernel on a GPU"),
    Cell(group="float8", name="tensorwise", run=zero(2, *LLAMA, *BF16, "model.float8=tensorwise"), like=zero(
        2, *LLAMA, *BF16), within=2.0**-5, only_last=True, needs="torchao"),
    Cell(group="LoRA", name="ZeRO-2", run=zero(2, *LORA), like=(*REFERENCE, *LORA)),
    Cell(group="LoRA", name="ZeRO-3", run=zero(3, *LORA), like=(*REFERENCE, *LORA)),
    Cell(group="recompute", name="full", run=zero(2, "parallel.recompute=full")),
    Cell(group="recompute", name="every_2", run=zero(1, "parallel.recompute=every_2")),
    Cell(group="recompute", name="selective", run=zero(3, "parallel.recompute=selective")),
    Cell(group="offload", name="activations", run=zero(2, "parallel.offload_activations=true")),
    Cell(group="offload", name="optimizer to the CPU", run=zero(2, "parallel.offload_optimizer=cpu"), needs="nvcc"),
    Cell(group="optimizers", name="muon, ZeRO-1", run=zero(1, *MUON), like=(*REFERENCE, *MUON)),
    Cell(group="optimizers", name="muon, ZeRO-3", run=zero(3, *MUON), like=(*REFERENCE, *MUON)),
    Cell(group="optimizers", name="adafactor, ZeRO-3", run=zero(3, *ADAFACTOR), like=(*REFERENCE, *ADAFACTOR)),
    Cell(group="optimizers", name="adamw8bit", run=zero(2, *EIGHT_BITS), like=(*REFERENCE, *EIGHT_BITS), within=1e-3,
         needs="bitsandbytes"),
    Cell(group="optimizers", name="lion", run=zero(1, "optimizer.name=lion", "optimizer.lr=1e-4"), like=(
        *REFERENCE, "optimizer.name=lion", "optimizer.lr=1e-4")),
]  # fmt: skip
"""On one GPU. The first ones matter most: they start first."""

RESUME_CELLS = [
    Cell(group="resume", name=f"ZeRO-{stage}", run=zero(stage, *BF16), like=zero(stage, *BF16), within=2e-5, stops_at=2)
    for stage in (1, 3)
]
"""Stopped, and resumed from the checkpoint in new processes."""

LAYOUT_CELLS = [
    Cell(group="layouts", name=f"{name} on {ranks}", run=run, ranks=ranks)
    for name, ranks, run in (
        ("dp z1", 2, zero(1)),
        ("dp z3", 2, zero(3)),
        ("tp2", 2, zero(1, "parallel.tp=2")),
        ("tp2 sp", 2, zero(1, "parallel.tp=2", "parallel.sequence_parallel=true")),
        ("pp2", 2, zero(1, "parallel.pp=2")),
        ("ulysses2 z3", 2, zero(3, "parallel.ulysses=2", "model.overrides.resid_pdrop=0.0")),
        ("tp2, chunked loss", 2, zero(1, "parallel.tp=2", "model.loss=chunked")),
        ("tp2, compiled", 2, zero(1, "parallel.tp=2", "train.compile=true")),
        ("hpz2 z3", 4, zero(3, "parallel.hpz=2")),
        ("tp2-dp2 z3", 4, zero(3, "parallel.tp=2")),
        ("pp2-dp2 z1", 4, zero(1, "parallel.pp=2")),
        ("tp2-pp2-dp2 z1", 8, zero(1, "parallel.tp=2", "parallel.pp=2")),
        ("tp2-pp2-dp2 z1 sp", 8, zero(1, "parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true")),
    )
]
LAYOUT_CELLS.append(
    Cell(group="layouts", name="pp2 in fp16 on 2", run=zero(1, "parallel.pp=2", "precision=fp16"), ranks=2,
         within=2.0**-10, only_last=True, needs="fp16"))  # fmt: skip
"""Over NCCL, against one GPU."""

MEMORY_CELLS = [
    MemoryCell(name="gpt2 ZeRO-0 fp32", model="gpt2", run=zero(0)),
    MemoryCell(name="gpt2 ZeRO-0 bf16", model="gpt2", run=zero(0, *BF16)),
    MemoryCell(name="gpt2 ZeRO-1 bf16", model="gpt2", run=zero(1, *BF16)),
    MemoryCell(name="gpt2 ZeRO-2 bf16", model="gpt2", run=zero(2, *BF16)),
    MemoryCell(name="gpt2 ZeRO-3 bf16", model="gpt2", run=zero(3, *BF16)),
    MemoryCell(name="gpt2 ZeRO-1 fp32", model="gpt2", run=zero(1)),
    MemoryCell(name="gpt2-medium ZeRO-2 bf16, full recompute", model="gpt2-medium",
               run=zero(2, *BF16, "parallel.recompute=full")),
    MemoryCell(name="gpt2-medium ZeRO-2 bf16, selective", model="gpt2-medium",
               run=zero(2, *BF16, "parallel.recompute=selective")),
    MemoryCell(name="gpt2 ZeRO-1 bf16, eager", model="gpt2", run=zero(1, *BF16, "model.attn_implementation=eager")),
    MemoryCell(name="gpt2 ZeRO-2 bf16, chunked loss", model="gpt2", run=zero(2, *BF16, "model.loss=chunked")),
    MemoryCell(name="gpt2-medium ZeRO-2 bf16, activations on the host", model="gpt2-medium",
               run=zero(2, *BF16, "parallel.offload_activations=true")),
    MemoryCell(name="smollm2-360m ZeRO-2 bf16, 2048 tokens", model="smollm2-360m", run=zero(2, *BF16), seq_len=2048),
    MemoryCell(name="qwen3-0.6b ZeRO-3 bf16", model="qwen3-0.6b", run=zero(3, *BF16), micro_batch_size=2),
    MemoryCell(name="llama-3.2-1b ZeRO-1 bf16", model="llama-3.2-1b", run=zero(1, *BF16), micro_batch_size=1),
]  # fmt: skip


def missing(need: str, device: str) -> str:
    """Why a cell with this need cannot run here; empty where it can."""
    if need == "fp16":
        from deepspeed.accelerator import get_accelerator

        if device == "cuda" or get_accelerator().is_fp16_supported():
            return ""
        return "DeepSpeed has no fp16 on this CPU"
    if need in ("", "bf16"):
        return ""
    program, _, where = need.partition(" on a ")
    if (where or program == "nvcc") and device == "cpu":
        return "left to the GPU"
    if program in ("nvcc", "c++"):
        return "" if shutil.which(program) else f"no {program} on this machine"
    return "" if find_spec(program) else f"{program} is not installed"


def base(corpus: Path, cache: Path) -> dict[str, Any]:
    """The recipe that rows change. Heads of 16: the smallest that every attention kernel of a GPU takes."""
    return {
        "model": {
            "name_or_path": "gpt2-tiny",
            "overrides": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320},
        },
        "data": {
            "source": str(corpus), "tokenizer": "bpe-300", "seq_len": 32, "workers": 1, "cache_dir": str(cache),
        },
        "batch": {"global_batch_size": 16, "micro_batch_size": 2},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "train": {"steps": 4 if on_cpu() else 20, "seed": 1, "grad_clip": 0.5},
        "parallel": {},
        "log": {"level": "warning"},
    }  # fmt: skip


def device_here() -> str:
    """What ranks will run on; CUDA is not initialized by asking."""
    from toolkit.launch.environment import local_device

    return "cpu" if on_cpu() else local_device().type


def concurrent_ranks(device: str) -> int:
    """Ranks at a time, of runs that are small and spend most of their time starting: few where memory is small."""
    if device == "cpu":
        return len(os.sched_getaffinity(0))
    from toolkit.launch.local_ranks import run_ranks

    (memory,) = run_ranks(_gpu_memory, 1, joined=False)
    return 4 if memory > LARGE_BYTES else 1


LARGE_BYTES = 64 * 2**30
"""What four of MEMORY_CELLS may take together."""


def _gpu_memory() -> int:
    return torch.cuda.mem_get_info()[1]
