"""What a run says before its first step and after its last one, on rank 0."""

from collections.abc import Sequence

import torch

from toolkit import hardware
from toolkit.batch import Batch
from toolkit.errors import RunError
from toolkit.estimate.flops import mfu
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.shape import ModelShape
from toolkit.train.data.tokens import TokenCorpus
from toolkit.train.engines.base import Engine
from toolkit.train.metrics import StepMetrics
from toolkit.train.progress import ProgressLine
from toolkit.train.resume import Resumed
from toolkit.train.run_directory import RunDirectory
from toolkit.units import format_bytes, format_count, format_duration


def make_progress(
    recipe: Recipe, layout: Layout, device: torch.device, shape: ModelShape | None, *, first: bool
) -> ProgressLine:
    """The progress line of a run, with MFU where the GPU's peak and the model's FLOPs are known."""
    peak = _peak_flops(recipe, device)
    progress = ProgressLine(recipe.train.steps, every=recipe.log.every, enabled=first and recipe.log.level != "warning")
    if shape is not None and peak is not None:
        ranks, seq_len = layout.world_size, recipe.data.seq_len
        progress.mfu = lambda tokens_per_second: mfu(tokens_per_second / ranks, shape, seq_len, peak)
    return progress


def show_banner(
    progress: ProgressLine,
    recipe: Recipe,
    layout: Layout,
    batch: Batch,
    used: Engine,
    corpus: TokenCorpus,
    samples: int,
    run: RunDirectory,
    device: torch.device,
    resumed: Resumed | None = None,
) -> None:
    """What is about to run. `samples` are those of one epoch."""
    for notice in resumed.notices if resumed else ():
        progress.say(f"note: {notice}")
    per_step = format_count(batch.global_size * recipe.data.seq_len)
    epochs = recipe.train.steps * batch.global_size / samples
    padded = " with padding" if recipe.data.packing == "padded" else ""
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    engine = f"DeepSpeed ZeRO-{layout.zero_stage}" if recipe.train.engine == "deepspeed" else recipe.train.engine
    devices = {"optimizer": layout.offload_optimizer, "parameters": layout.offload_params}
    offloaded = "".join(f", {what} on {where}" for what, where in devices.items() if where != "none")
    split = f"{batch.micro_size} micro x {batch.accumulation} accumulation x {batch.dp} dp"
    trained, held_out = format_count(corpus.train_tokens), format_count(corpus.eval_tokens)
    size = format_count(used.parameter_count())
    stages = " + ".join(map(str, used.stage_layers))
    progress.table(
        [
            ("model", f"{recipe.model.name_or_path}, {size} parameters, {recipe.model.init} weights"),
            ("data", f"{recipe.data.source}, {trained} tokens, {held_out} held out"),
            ("ranks", f"{layout.world_size} on {place}, {recipe.strategy(layout)}"),
            ("engine", f"{engine}, {recipe.precision}{offloaded}"),
            *([("stages", f"{stages} layers")] if stages else []),
            ("batch", f"{batch.global_size} = {split}"),
            ("tokens", f"{per_step} a step{padded}, {recipe.train.steps} steps, {epochs:.2f} epochs"),
            ("run", str(run.path)),
            *([("resume", resumed.state.describe(recipe, layout, batch))] if resumed else []),
        ]
    )


def show_summary(
    progress: ProgressLine, recipe: Recipe, history: Sequence[StepMetrics], corpus: TokenCorpus, run: RunDirectory
) -> None:
    """What came out."""
    if not history:
        return
    last = history[-1]
    seconds = sum(metrics.seconds for metrics in history)
    rate = format_count(sum(metrics.tokens for metrics in history) / seconds)
    held_out = f", held-out {last.eval_loss:.4f}" if last.eval_loss is not None else ""
    peak = format_bytes(last.memory_bytes)
    floor = corpus.loss_floor(recipe.data.packing)
    progress.table(
        [
            ("loss", f"{history[0].loss:.4f} -> {last.loss:.4f}{held_out}"),
            ("entropy", f"{corpus.unigram_entropy:.4f}, the loss of a model that knows token frequencies only"),
            *([] if floor is None else [("floor", f"{floor:.4f}, the entropy rate: the best loss on unseen text")]),
            ("speed", f"{rate} tokens/s, {format_duration(seconds)} of training, peak memory {peak} on rank 0"),
            ("model", f"{run.path / 'model'}, which AutoModelForCausalLM.from_pretrained loads"),
            ("curve", f"{run.path / 'loss.png'}"),
        ]
    )


def _peak_flops(recipe: Recipe, device: torch.device) -> float | None:
    """Peak FLOP/s of this GPU in the recipe's precision, where both are known."""
    gpu = hardware.find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return None
    # PyTorch multiplies fp32 in TF32 only where that was asked for.
    tf32 = recipe.precision == "fp32" and torch.backends.cuda.matmul.allow_tf32
    try:
        return gpu.peak_flops("tf32" if tf32 else recipe.precision)
    except RunError:
        return None
