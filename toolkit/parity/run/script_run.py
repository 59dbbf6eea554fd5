"""A parity run of a user's own script: the file is run as a launcher would run it, and the Trainer in it is recorded.

Methods of transformers' Trainer and TrainingArguments are wrapped before the script imports them. The script's model,
data, loss, optimizer and schedule stay as they are. Off are checkpoints, validation and trackers, which take time, and
dropout, which draws other masks in each layout. When the Trainer has taken its steps, the script ends.
"""

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from accelerate import ParallelismConfig
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from typing_extensions import override

from toolkit.config.recipe import Precision
from toolkit.data.samples.fingerprint import hash_samples
from toolkit.errors import RunError
from toolkit.files import printable
from toolkit.launch.environment import local_device
from toolkit.parallel.loss import IGNORE
from toolkit.parallel.model_structure import UnsupportedPipelineError
from toolkit.parity import LossCurve, ParityRun, Tensors
from toolkit.parity.run import observe
from toolkit.parity.run.rounding import round_differently
from toolkit.parity.run.train_in_memory import keep
from toolkit.parity.run.trainer_run import Observed, full_values, merged_fingerprints, whole_parameter_hashes

_MOST_SAMPLES = 64
"""Samples of a global batch whose losses are computed one by one."""
_SHARDED_AT_LOAD = ("distributed_config", "tp_plan", "tp_size", "device_mesh")
"""Arguments of from_pretrained that shard a model over ranks."""


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """One run of a script on a number of ranks."""

    name: str
    script: Path
    arguments: tuple[str, ...]
    ranks: int
    steps: int
    """The most updates that are taken."""
    global_batch_size: int | None = None
    """Samples of an update, which one process reaches by accumulation; None: those that the script asks for."""
    rounding_seed: int | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it is the plain run of one process, without whatever shards."""
        return self.global_batch_size is not None


@dataclass(frozen=True, kw_only=True)
class ScriptOutcome:
    """What a script trained. Rank 0 has the tensors."""

    run: ParityRun
    global_batch_size: int
    precision: Precision


class _TrainingEnded(BaseException):
    """Ends a script after its training; no `except Exception` of the script stops it."""


def train_script(run: ScriptRun, folder: Path) -> ScriptOutcome:
    """Run the script on this rank and return what its Trainer trained; called on every rank.

    The process must end afterwards: it has another Trainer. `folder` is one for all ranks. Raises RunError where the
    script fails, or trains nothing.
    """
    recorder = _Recorder(run, folder)
    recorder.wrap_transformers()
    transformers.set_seed(0)
    sys.argv = [str(run.script), *run.arguments]
    sys.path.insert(0, str(run.script.resolve().parent))
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            runpy.run_path(str(run.script), run_name="__main__")
    except _TrainingEnded:
        assert recorder.outcome is not None
        return recorder.outcome
    except RunError:
        raise
    except SystemExit as request:
        if request.code:
            raise _failed(run, f"ended with {printable(str(request.code))} before it trained") from None
    except Exception as error:
        raise _failed(run, _raised(run.script, error)) from None
    advice = "it has to make a transformers.Trainer and call its train()"
    raise RunError(f"{printable(str(run.script))} ended without training: {advice}.")


def _failed(run: ScriptRun, text: str) -> RunError:
    where = "one process" if run.is_alone else f"{run.ranks} ranks"
    return RunError(f"{printable(str(run.script))} on {where} {text}. Make it run by itself first.")


def _raised(script: Path, error: Exception) -> str:
    """What a script raised, with the last line of the script that led there."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(script)]
    number = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    message = " ".join(str(error).split())
    place = "" if number is None else f" in line {number}"
    return f"raised {type(error).__name__}{place}: {printable(message).rstrip('.')}"


class _Recorder(TrainerCallback):  # type: ignore[misc]
    """Wraps the Trainer, and records the first training of this process."""

    outcome: ScriptOutcome | None = None
    trainer: Trainer

    def __init__(self, run: ScriptRun, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._tensors: dict[str, Tensors] = {}
        self._curve: list[tuple[float, float]] = []
        self._rates: list[float] = []
        self._sums: list[int] = []
        self._rows: list[int] = []
        """Samples of this rank's first micro-batches."""
        self._micro_losses: tuple[tuple[float, int], ...] = ()
        self._outputs: observe.LayerOutputs | None = None
        self._layer_outputs: dict[str, float] = {}
        self._diverged_at_start: frozenset[str] = frozenset()
        self._update_step: int | None = None
        self._step = 0

    def wrap_transformers(self) -> None:
        """Let each Trainer of this process be recorded. What shards is taken out of a run that is alone."""
        is_on_cpu = local_device().type == "cpu"
        if is_on_cpu:
            # accelerate refuses tensor-parallel ranks on a CPU by nothing but this check.
            ParallelismConfig._validate_accelerator = lambda *_: None
        TrainingArguments.__post_init__ = self._quiet_arguments(TrainingArguments.__post_init__, is_on_cpu=is_on_cpu)
        Trainer.train = self._recorded_training(Trainer.train)
        Trainer.get_batch_samples = self._recorded_samples(Trainer.get_batch_samples)
        Trainer._clip_grad_norm = self._recorded_gradients(Trainer._clip_grad_norm)
        Trainer._get_grad_norm = self._recorded_gradients(Trainer._get_grad_norm)
        if self._run.is_alone:
            ParallelismConfig.build_device_mesh = lambda *_: _NoMesh()
            PreTrainedModel.from_pretrained = classmethod(_whole(PreTrainedModel.from_pretrained.__func__))

    def _quiet_arguments(self, function: Callable[..., Any], *, is_on_cpu: bool) -> Callable[..., Any]:
        run = self._run
        output = str(self._folder / "output")

        @wraps(function)
        def post_init(arguments: Any) -> None:
            settings: dict[str, Any] = {
                "output_dir": output,
                "logging_strategy": "steps",
                "logging_steps": 1,
                "logging_nan_inf_filter": False,
                "save_strategy": "no",
                "eval_strategy": "no",
                "load_best_model_at_end": False,
                "push_to_hub": False,
                "report_to": [],
                "disable_tqdm": True,
            }
            if is_on_cpu:
                settings |= {"use_cpu": True, "ddp_backend": "gloo"}
            if run.is_alone:
                settings |= {"fsdp": None, "fsdp_config": None, "parallelism_config": None}
            for name, value in settings.items():
                setattr(arguments, name, value)
            function(arguments)

        return post_init

    def _recorded_training(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def train(trainer: Trainer, *arguments: Any, **options: Any) -> NoReturn:
            self._check(trainer)
            self.trainer = trainer
            if self._run.global_batch_size is not None:
                trainer.args.gradient_accumulation_steps = self._accumulation(trainer, self._run.global_batch_size)
            for unused in (PrinterCallback, EarlyStoppingCallback):
                trainer.remove_callback(unused)
            trainer.add_callback(self)
            function(trainer, *arguments, **options)
            self.outcome = self._finished()
            raise _TrainingEnded

        return train

    def _recorded_samples(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def get_batch_samples(trainer: Trainer, *arguments: Any, **options: Any) -> Any:
            batches, items = function(trainer, *arguments, **options)
            if trainer is self.trainer:
                self._read_samples(batches)
            return batches, items

        return get_batch_samples

    def _recorded_gradients(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def norm(trainer: Trainer, *arguments: Any, **options: Any) -> Any:
            if trainer is self.trainer and len(self._rates) == self._step:
                self._keep_gradients()
            return function(trainer, *arguments, **options)

        return norm

    def _check(self, trainer: Trainer) -> None:
        """Raise RunError for a training that is not recorded."""
        script = printable(str(self._run.script))
        if trainer.is_deepspeed_enabled:
            advice = "Make a recipe of it with dstk recipe --from-trainer, and compare that"
            raise RunError(f"{script}: gradients under DeepSpeed are not those of its parameters. {advice}.")
        if trainer.get_cp_size() * trainer.get_sp_size() > 1:
            raise RunError(f"{script}: ranks that share a sequence are not compared. Set cp_size=1 and sp_size=1.")
        if any(isinstance(module, FullyShardedDataParallel) for module in trainer.model.modules()) or (
            trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
        ):
            raise RunError(f"{script}: FSDP1 keeps gradients without names. Set fsdp_version to 2.")
        if trainer.args.fp16 or next(trainer.model.parameters()).dtype is torch.float16:
            raise RunError(f"{script}: fp16 scales its loss by what overflowed before. Compare in fp32 or bf16.")

    def _accumulation(self, trainer: Trainer, global_batch_size: int) -> int:
        """Micro-batches with which one process takes the samples of all ranks."""
        size: int = trainer.args.per_device_train_batch_size
        if global_batch_size % size:
            script = printable(str(self._run.script))
            raise RunError(
                f"{script}: {self._run.ranks} ranks take {global_batch_size} samples in an update, of which one "
                f"process cannot take {size} at a time. Set per_device_train_batch_size to a divisor."
            )
        return global_batch_size // size

    @property
    def _model(self) -> PreTrainedModel:
        model: PreTrainedModel = self.trainer.model
        return model

    @property
    def _tp(self) -> int:
        return int(self.trainer.get_tp_size())

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer has wrapped the model by now: DDP sends the first rank's weights to the others.
        _turn_off_dropout(self._model)
        self._keep("initial", lambda parameter: parameter.detach())
        hashes = observe.gather_on_rank_0(whole_parameter_hashes(self._model))
        self._diverged_at_start, _ = observe.compare_replicas(hashes)

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._step == 0 and self._outputs is not None:
            self._layer_outputs = self._outputs.read()
        if self._step == self._update_step:
            self._keep("updates", lambda parameter: parameter.detach(), since="initial")
        self._step += 1
        if self._step == self._run.steps:
            control.should_training_stop = True

    @override
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs and len(self._curve) < self._step:
            self._curve.append((float(logs["loss"]), float(logs["grad_norm"])))

    def _read_samples(self, batches: list[Any]) -> None:
        """Add the samples of an update to its fingerprint; before the first, look at them."""
        is_first = not self._sums
        self._sums.append(0)
        inputs = [_tensors_of(batch) for batch in batches]
        if is_first:
            self._rows = [len(next(iter(batch.values()), ())) for batch in inputs]
            self._start_looking(inputs)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        replicas = world_size // self._tp
        data_rank = (dist.get_rank() if dist.is_initialized() else 0) // self._tp
        for accumulation_step, batch in enumerate(inputs):
            for place, (ids, labels) in enumerate(_sequences(batch)):
                position = (accumulation_step * replicas + data_rank) * self._rows[0] + place
                self._sums[-1] += hash_samples(ids[None], labels[None], [position])

    def _start_looking(self, inputs: list[dict[str, torch.Tensor]]) -> None:
        model = self._model
        if not isinstance(model, PreTrainedModel):
            return
        if self._run.is_alone and self._run.rounding_seed is None and sum(self._rows) <= _MOST_SAMPLES:
            self._micro_losses = _sample_losses(model, inputs, self.trainer.args.device)
        if self._run.rounding_seed is not None:
            round_differently(model, precision=_precision(self.trainer), seed=self._run.rounding_seed)
        with contextlib.suppress(UnsupportedPipelineError):  # a family without a list of layers
            self._outputs = observe.LayerOutputs(Observed(model=model, device=self.trainer.args.device))  # type: ignore[arg-type]

    def _keep_gradients(self) -> None:
        rate = observe.learning_rate_of(self.trainer)
        self._rates.append(rate)
        is_first_update = self._update_step is None and rate != 0
        if is_first_update:
            self._update_step = self._step
        if self._step == 0:
            self._keep("gradients", lambda parameter: parameter.grad)
        elif is_first_update:
            self._keep("update-gradients", lambda parameter: parameter.grad)

    def _keep(self, kind: str, read: Callable[[torch.Tensor], torch.Tensor | None], *, since: str = "") -> None:
        """Keep the full value of what `read` returns of each parameter. A collective call."""
        reference = self._tensors[since] if since else None
        self._tensors[kind] = keep(full_values(self._model, read), self._folder / kind, since=reference)

    def _finished(self) -> ScriptOutcome:
        model = self._model
        if not self._curve:
            script = printable(str(self._run.script))
            raise RunError(f"{script}: its train() took no step. Set num_train_epochs or max_steps to at least 1.")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._keep("parameters", lambda parameter: parameter.detach())
        hashes = observe.gather_on_rank_0(whole_parameter_hashes(model))
        diverged, compared = observe.compare_replicas(hashes)
        rows = observe.gather_on_rank_0(sum(self._rows))
        run = ParityRun(
            curve=LossCurve.from_steps(self._run.name, self._curve),
            parameters=self._tensors["parameters"],
            initial=self._tensors["initial"],
            first_gradients=self._tensors.get("gradients", {}),
            first_updates=self._tensors.get("updates", {}),
            update_gradients=self._tensors.get("update-gradients", {}),
            update_step=(self._update_step or 0) + 1,
            outputs=self._layer_outputs,
            batches=merged_fingerprints(observe.gather_on_rank_0(self._sums), self._tp),
            learning_rates=tuple(self._rates),
            micro_losses=self._micro_losses,
            micro_batch_size=self._rows[0] if self._rows else 1,
            replicas=world_size // self._tp,
            diverged_at_start=self._diverged_at_start,
            diverged=diverged,
            replicas_compared=compared,
        )
        total = sum(rows[:: self._tp])
        return ScriptOutcome(run=run, global_batch_size=total, precision=_precision(self.trainer))


class _NoMesh:
    """The device mesh of a ParallelismConfig in a run that is alone: nothing is sharded over it."""

    def __getitem__(self, dims: str | tuple[str, ...]) -> "_NoMesh":
        return self


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `from_pretrained` without what shards the model."""

    @wraps(function)
    def from_pretrained(cls: Any, *arguments: Any, **options: Any) -> Any:
        plain = {name: value for name, value in options.items() if name not in _SHARDED_AT_LOAD}
        return function(cls, *arguments, **plain)

    return from_pretrained


def _precision(trainer: Trainer) -> Precision:
    is_bf16 = trainer.args.bf16 or next(trainer.model.parameters()).dtype is torch.bfloat16
    return "bf16" if is_bf16 else "fp32"


def _turn_off_dropout(model: torch.nn.Module) -> None:
    """Set every probability of dropout, and the noise of routers, to 0: layouts draw other masks."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch that have a row a sample; nothing of one that has no names."""
    if not isinstance(batch, Mapping):
        return {}
    return {name: value for name, value in batch.items() if torch.is_tensor(value) and value.ndim > 0}


def _sequences(batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of each sample, without padding, whose length depends on the micro-batch."""
    if "input_ids" not in batch or batch["input_ids"].ndim != 2:
        return []
    ids = batch["input_ids"].cpu()
    labels = batch.get("labels", batch["input_ids"]).cpu()
    labels = labels if labels.shape == ids.shape else ids
    mask = batch.get("attention_mask")
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.shape != ids.shape else mask.cpu().bool()
    return [(ids[row][seen[row]], labels[row][seen[row]]) for row in range(len(ids))]


def _sample_losses(
    model: PreTrainedModel, inputs: list[dict[str, torch.Tensor]], device: torch.device
) -> tuple[tuple[float, int], ...]:
    """Sum of token losses and number of targets of each sample; nothing where they are not those of a causal model."""
    losses = []
    model.eval()
    for batch in inputs:
        labels = batch.get("labels")
        rows = len(next(iter(batch.values()), ()))
        if labels is None or labels.shape != batch.get("input_ids", torch.empty(0)).shape:
            return ()
        if model.config.is_encoder_decoder or any(len(value) != rows for value in batch.values()):
            return ()
        for row in range(rows):
            sample = {name: value[row : row + 1].to(device) for name, value in batch.items() if "labels" not in name}
            with torch.no_grad():
                logits = model(**sample, use_cache=False).logits[0].float()
            targets = batch["shift_labels"][row] if "shift_labels" in batch else labels[row, 1:]
            targets = targets.to(device)
            loss = F.cross_entropy(logits[: len(targets)], targets, ignore_index=IGNORE, reduction="sum")
            losses.append((float(loss), int((targets != IGNORE).sum())))
    return tuple(losses)
