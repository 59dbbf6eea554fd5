"""One side of a comparison on its ranks: the toolkit, the Hugging Face Trainer, or a loop written by hand."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from measure.our_run import Stamps
from measure.trainer_run import Tokens, trainer_run
from transformers import PreTrainedModel

from gpu.setups import FIELDS, OURS, TRAINER
from toolkit import Callback, Job, TrainOptions, train
from toolkit.config.recipe import Recipe
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines import compiled_layers, factory
from toolkit.engines.optimizer import learning_rate, parameter_groups
from toolkit.launch.process_group import process_group
from toolkit.launch.rank_environment import RankEnvironment, pick_device
from toolkit.model_init.build_model import build_model
from toolkit.model_init.liger import take_liger


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a rank measured."""

    seconds: Sequence[float]
    """Of each counted step."""
    losses: Sequence[float]
    peak_bytes: int
    """Of PyTorch's allocations from the first step on, the building of the engine included; 0 on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a rank says of the GPUs."""

    device: str
    memory_bytes: int
    count: int
    cuda: str
    nccl: str
    driver: str


def machine() -> Machine:
    """On a rank, which may initialize CUDA."""
    device = pick_device(RankEnvironment.detect())
    if device.type == "cpu":
        return Machine(device="cpu", memory_bytes=8 * 2**30, count=0, cuda="none", nccl="none", driver="none")
    torch.zeros(8, 8, device=device).matmul(torch.zeros(8, 8, device=device))
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text(encoding="utf-8").splitlines()[0].split() if path.exists() else []
    has_nccl = torch.distributed.is_nccl_available()
    nccl: Any = torch.cuda.nccl.version() if has_nccl else "none"  # type: ignore[no-untyped-call]
    return Machine(
        device=torch.cuda.get_device_name(device),
        memory_bytes=torch.cuda.mem_get_info(device)[1],
        count=torch.cuda.device_count(),
        cuda=str(torch.version.cuda or torch.version.hip),
        nccl=".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl),
        driver=next((word for word in words if word[0].isdigit()), "unknown"),
    )


def built(recipe: Recipe) -> PreTrainedModel:
    """The model, made once for all sides, with random numbers that repeat: a core draws a billion in ten seconds."""
    block = torch.empty(1 << 22).normal_()
    scaled = cache(lambda std: block * std)

    def normal_(tensor: torch.Tensor, mean: float = 0, std: float = 1, **options: Any) -> torch.Tensor:
        flat = tensor.view(-1)
        for start in range(0, 0 if tensor.is_meta else len(flat), len(block)):
            part = flat[start : start + len(block)]
            part.copy_(scaled(std)[: len(part)])
        return tensor

    eos_id = prepare(recipe.data, progress=False).eos_id
    with mock.patch.object(torch.Tensor, "normal_", normal_):
        return build_model(recipe, dtype=torch.bfloat16, eos_id=eos_id)


def run_side(
    side: str,
    recipe: Recipe,
    model: PreTrainedModel | None,
    tokens: Tokens | None,
    folder: Path,
    warmup: int,
    backend: str,
) -> Run:
    """On a rank: train, and say how long each step took. `backend`: of torch.compile. The toolkit needs no tokens."""
    here = RankEnvironment.detect()
    with output_to(folder / f"rank-{here.rank}.log"):
        device = pick_device(here)
        if side in OURS:
            stamps = Stamps()
            with mock.patch.dict(compiled_layers._OPTIONS, backend=backend):
                our_side(recipe.changed(FIELDS[side]), model, [stamps])
        else:
            assert tokens is not None
            assert model is not None
            if side == TRAINER:
                with process_group(here, device):
                    stamps = trainer_run(recipe, tokens, folder, device, model)
            else:
                stamps = by_hand(recipe, tokens, model, device, backend)
        on_gpu = device.type == "cuda"
        return Run(
            seconds=stamps.step_seconds(warmup),
            losses=stamps.losses,
            peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        )


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """What libraries print, C++ ones too, goes to a file: an error's message has its last word."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    kept = [os.dup(stream) for stream in (1, 2)]
    try:
        for stream in (1, 2):
            os.dup2(log, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, before in zip((1, 2), kept, strict=True):
            os.dup2(before, stream)


def our_side(recipe: Recipe, model: PreTrainedModel | None, callbacks: Sequence[Callback]) -> None:
    """Train with the loop of recipes/train.py, without a run directory. `model`: built already, where there is one."""
    if model is not None and recipe.model.kernels == "liger":
        take_liger(model)
    with nullcontext() if model is None else mock.patch.object(factory, "build_model", return_value=model):
        train(Job.of(recipe, RankEnvironment.detect().world_size), callbacks, TrainOptions(), in_memory=True)


def by_hand(recipe: Recipe, tokens: Tokens, model: PreTrainedModel, device: torch.device, backend: str) -> Stamps:
    """What one would write: fp32 weights, autocast to bf16, fused AdamW, torch.compile, one loss.item() a step."""
    model = model.float().to(device).train()
    compiled: Any = torch.compile(model, backend=backend)
    section, size = recipe.optimizer, recipe.batch.micro_batch_size or 1
    groups = parameter_groups(model.named_parameters(), section)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=fused)
    rate = learning_rate(recipe)
    stamps, whole = Stamps(), recipe.batch.global_batch_size
    for number in range(recipe.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
        total = torch.zeros((), device=device)
        rows = tokens.rows[number * whole : (number + 1) * whole].to(device)
        for ids in rows.view(-1, size, rows.shape[1]):
            with torch.autocast(device.type, torch.bfloat16):
                logits = compiled(input_ids=ids, use_cache=False).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) * (size / whole)
            torch.autograd.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        stamps.add(total.item())
    return stamps
