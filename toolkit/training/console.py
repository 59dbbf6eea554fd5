"""What a run prints before its first step, while it trains and after its last step, on rank 0."""

import torch
from typing_extensions import override

from toolkit import hardware
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.estimate.flops import mfu
from toolkit.training.callback import Callback
from toolkit.training.loop import TrainingRun
from toolkit.training.metrics import StepMetrics
from toolkit.training.progress import ProgressLine
from toolkit.units import format_bytes, format_count, format_duration


class Console(Callback):
    """The banner and the progress line of a run, on rank 0. `resume`: where it was asked to resume from."""

    def __init__(self, resume: str | None) -> None:
        self._resume = resume

    @override
    def on_run_begin(self, run: TrainingRun) -> None:
        run.console.table([*_banner(run), *_origin(run, self._resume)])

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        run.console.step(metrics)


def make_progress(job: Job, device: torch.device, *, first: bool) -> ProgressLine:
    """The progress line of a run, with MFU where the GPU's peak and the model's FLOPs are known."""
    recipe, shape = job.recipe, job.shape
    peak = _peak_flops(recipe, device)
    progress = ProgressLine(recipe.train.steps, every=recipe.log.every, enabled=first and recipe.log.level != "warning")
    if shape is not None and peak is not None:
        ranks, seq_len = job.layout.world_size, recipe.data.seq_len
        progress.mfu = lambda tokens_per_second: mfu(tokens_per_second / ranks, shape, seq_len, peak)
    return progress


def _banner(run: TrainingRun) -> list[tuple[str, str]]:
    recipe, layout, batch, corpus = run.recipe, run.job.layout, run.job.batch, run.corpus
    device = run.engine.device
    per_step = format_count(batch.global_batch_size * recipe.data.seq_len)
    epochs = recipe.train.steps * batch.global_batch_size / len(run.loader.train)
    padded = " with padding" if recipe.data.packing == "padded" or corpus.trained_tokens is not None else ""
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    engine = f"DeepSpeed ZeRO-{layout.zero_stage}" if recipe.train.engine == "deepspeed" else recipe.train.engine
    devices = {"optimizer": layout.offload_optimizer, "parameters": layout.offload_params}
    offloaded = "".join(f", {what} on {where}" for what, where in devices.items() if where != "none")
    split = f"{batch.micro_batch_size} micro x {batch.accumulation} accumulation x {batch.dp} dp"
    size = format_count(run.engine.parameter_count())
    tokens = f"{format_count(corpus.train_tokens)} tokens, {format_count(corpus.eval_tokens)} held out"
    stages = " + ".join(map(str, run.engine.stage_layers))
    rows = [
        ("model", f"{recipe.model.name_or_path}, {size} parameters, {recipe.model.init} weights"),
        ("data", f"{recipe.data.source}, {tokens}"),
        ("documents", corpus.ends),
        ("samples", run.loader.train.summary()),
        ("ranks", f"{layout.world_size} on {place}, {run.job.strategy}"),
        ("layout", "".join(f"{name}: {text}" for name, text in recipe.layouts.items())),
        ("engine", f"{engine}, {recipe.precision}{offloaded}"),
        ("stages", f"{stages} layers" if stages else ""),
        ("batch", f"{batch.global_batch_size} = {split}"),
        ("tokens", f"{per_step} a step{padded}, {recipe.train.steps} steps, {epochs:.2f} epochs"),
        ("run", str(run.directory.path) if run.directory else ""),
    ]
    return [(name, text) for name, text in rows if text]


def _origin(run: TrainingRun, asked: str | None) -> list[tuple[str, str]]:
    """What `--resume` found, on one line: the checkpoint, what is different, and damaged ones that were passed over."""
    if asked is None or run.directory is None:
        return []
    if run.resumed is None:
        return [("resume", f"no checkpoint in {run.directory.path}: training starts at step 0")]
    found = run.resumed.state.describe(run.recipe, run.job.layout, run.job.batch)
    return [("resume", "; ".join([f"{run.resumed.saved.path}, {found}", *run.resumed.notices]))]


def show_summary(run: TrainingRun) -> None:
    """What came out."""
    if not run.history or run.directory is None:
        return
    history, path = run.history, run.directory.path
    last = history[-1]
    seconds = sum(metrics.seconds for metrics in history)
    rate = format_count(sum(metrics.tokens for metrics in history) / seconds)
    held_out = f", held-out {last.eval_loss:.4f}" if last.eval_loss is not None else ""
    peak = format_bytes(last.memory_bytes)
    floor = run.corpus.loss_floor(run.recipe.data)
    rows = [
        ("loss", f"{history[0].loss:.4f} -> {last.loss:.4f}{held_out}"),
        ("entropy", f"{run.corpus.unigram_entropy:.4f}, the loss of a model that knows token frequencies only"),
        ("floor", "" if floor is None else f"{floor:.4f}, the entropy rate: the best loss on unseen text"),
        ("speed", f"{rate} tokens/s, {format_duration(seconds)} of training, peak memory {peak} on rank 0"),
        ("model", f"{path / 'model'}, which AutoModelForCausalLM.from_pretrained loads"),
        ("curve", f"{path / 'loss.png'}"),
    ]
    run.console.table([(name, text) for name, text in rows if text])


def _peak_flops(recipe: Recipe, device: torch.device) -> float | None:
    """Peak FLOP/s of this GPU in the recipe's precision, where both are known."""
    gpu = hardware.find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return None
    # PyTorch multiplies fp32 in TF32 only where that was asked for.
    tf32 = recipe.precision == "fp32" and torch.backends.cuda.matmul.allow_tf32
    return gpu.peak_flops("tf32" if tf32 else recipe.precision)
