"""Printer: the callback that prints the banner, the progress line and the rollbacks of a run, on rank 0."""

import torch
from typing_extensions import override

from toolkit import hardware
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.describe import describe_data
from toolkit.estimate.flops import mfu
from toolkit.step_metrics import StepMetrics
from toolkit.training.callback import Callback, Rollback
from toolkit.training.loop import TrainingRun
from toolkit.training.progress import ProgressLine
from toolkit.training.run_directory import RunDirectory
from toolkit.units import format_bytes, format_count, format_duration


class Printer(Callback):
    """Prints the banner, the progress line and the rollbacks of a run, on rank 0.

    `resume` is where the run was asked to resume from, as given on the command line; None where it was not.
    """

    def __init__(self, resume: str | None) -> None:
        self._resume = resume

    @override
    def on_run_begin(self, run: TrainingRun) -> None:
        run.progress.table([*_banner(run), *_origin(run, self._resume)])

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        run.progress.step(metrics)

    @override
    def on_rollback(self, run: TrainingRun, rollback: Rollback) -> None:
        skipped = f"the global batches of {rollback.skipped_batches} steps are skipped"
        then = skipped if rollback.skipped_batches else "the steps since are taken again"
        name = rollback.checkpoint.name
        run.progress.say(f"step {rollback.failed_step}: {rollback.reason}. Rolled back to {name}; {then}")


def make_progress(job: Job, device: torch.device, *, first: bool) -> ProgressLine:
    """The progress line of a run, with MFU where the GPU's peak and the model's FLOPs are known."""
    recipe = job.recipe
    shape = job.shape
    peak = _peak_flops(recipe, device)
    progress = ProgressLine(recipe.train.steps, every=recipe.log.every, enabled=first and recipe.log.level != "warning")
    if shape is not None and peak is not None:
        ranks = job.layout.world_size
        seq_len = recipe.data.seq_len
        progress.mfu = lambda tokens_per_second: mfu(tokens_per_second / ranks, shape, seq_len, peak)
    return progress


def _banner(run: TrainingRun) -> list[tuple[str, str]]:
    recipe = run.recipe
    layout = run.job.layout
    batch = run.job.batch
    corpus = run.corpus
    device = run.engine.device
    per_step = format_count(batch.global_batch_size * recipe.data.seq_len)
    padded = " with padding" if recipe.data.packing == "padded" or corpus.leaves_tokens_out else ""
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    engine = f"DeepSpeed ZeRO-{layout.zero_stage}" if recipe.train.engine == "deepspeed" else recipe.train.engine
    devices = {"optimizer": layout.offload_optimizer, "parameters": layout.offload_params}
    offloaded = "".join(
        f", {states} on {device_name}" for states, device_name in devices.items() if device_name != "none"
    )
    split = f"{batch.micro_batch_size} micro x {batch.accumulation} accumulation x {batch.dp} dp"
    size = format_count(run.engine.parameter_count())
    stages = " + ".join(map(str, run.engine.stage_layers))
    rows = [
        ("model", f"{recipe.model.name_or_path}, {size} parameters, {recipe.model.init} weights"),
        *describe_data(recipe, corpus, run.loader.train),
        ("ranks", f"{layout.world_size} on {place}, {run.job.strategy}"),
        ("layout", "".join(f"{name}: {text}" for name, text in recipe.layouts.items())),
        ("plan", run.job.plan),
        ("engine", f"{engine}, {recipe.precision}{offloaded}"),
        ("stages", f"{stages} layers" if stages else ""),
        ("batch", f"{batch.global_batch_size} = {split}"),
        ("tokens", f"{per_step} a step{padded}, {recipe.train.steps} steps{_epochs(run)}"),
        ("run", _places(run.directory) if run.directory else ""),
    ]
    return [(name, text) for name, text in rows if text]


def _places(directory: RunDirectory) -> str:
    """Say in the banner where the files of a run are."""
    if directory.checkpoints == directory.path:
        return str(directory.path)
    return f"{directory.path} on {directory.hosts[0]}, checkpoints in {directory.checkpoints}"


def _epochs(run: TrainingRun) -> str:
    """How often the run reads its text, for the banner; empty for a mixture, whose sources differ."""
    if run.recipe.data.sources is not None:
        return ""
    return f", {run.recipe.train.steps * run.job.batch.global_batch_size / len(run.loader.train):.2f} epochs"


def _origin(run: TrainingRun, asked: str | None) -> list[tuple[str, str]]:
    """The banner's line about `--resume`: the checkpoint, what differs from it, and damaged ones passed over."""
    if asked is None or run.directory is None:
        return []
    if run.resumed is None:
        return [("resume", f"no checkpoint in {run.directory.checkpoints}: training starts at step 0")]
    differences = run.resumed.state.describe(run.recipe, run.job.layout, run.job.batch)
    return [("resume", "; ".join([f"{run.resumed.saved.path}, {differences}", *run.resumed.notices]))]


def show_summary(run: TrainingRun) -> None:
    """Print what a run ended with: losses, speed, memory, and where the model is. Nothing for a run in memory."""
    if not run.history or run.directory is None:
        return
    history = run.history
    path = run.directory.path
    last = history[-1]
    seconds = sum(metrics.seconds for metrics in history)
    rate = format_count(sum(metrics.tokens for metrics in history) / seconds)
    held_out = f", held-out {last.eval_loss:.4f}" if last.eval_loss is not None else ""
    peak = format_bytes(last.memory_bytes or 0)
    floor = run.corpus.loss_floor(run.recipe.data)
    entropy = run.unigram_entropy
    rows = [
        ("loss", f"{history[0].loss:.4f} -> {last.loss:.4f}{held_out}"),
        ("sources", _by_name(last.source_loss)),
        ("held out", _by_name(last.eval_losses)),
        ("entropy", "" if entropy is None else f"{entropy:.4f}, the loss of a model that knows token frequencies only"),
        ("floor", "" if floor is None else f"{floor:.4f}, the entropy rate: the best loss on unseen text"),
        ("speed", f"{rate} tokens/s, {format_duration(seconds)} of training, peak memory {peak} on rank 0"),
        ("model", f"{path / 'model'}, which AutoModelForCausalLM.from_pretrained loads"),
        ("curve", f"{path / 'loss.png'}"),
    ]
    run.progress.table([(name, text) for name, text in rows if text])


def _by_name(losses: dict[str, float] | None) -> str:
    return ", ".join(f"{name} {loss:.4f}" for name, loss in (losses or {}).items())


def _peak_flops(recipe: Recipe, device: torch.device) -> float | None:
    """Peak FLOP/s of this GPU in the recipe's precision, where both are known."""
    gpu = hardware.find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return None
    # PyTorch multiplies fp32 in TF32 only where that was asked for.
    tf32 = recipe.precision == "fp32" and torch.backends.cuda.matmul.allow_tf32
    return gpu.peak_flops("tf32" if tf32 else recipe.precision)
