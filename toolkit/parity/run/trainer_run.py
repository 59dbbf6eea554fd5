"""A parity run of Hugging Face's Trainer: its own loop, loss, clipping and optimizer, on the samples of a recipe.

It starts from the weights and reads the samples of every other strategy. What is recorded is read beside the Trainer's
methods and changes nothing of what they compute. Models that transformers shards are loaded with a DistributedConfig,
from which the Trainer makes accelerate's ParallelismConfig.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig, PartialState
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig
from typing_extensions import override

from toolkit.config.job import Job
from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.data.samples.fingerprint import format_fingerprint, hash_samples
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.corpora import Corpora, prepare_all
from toolkit.dsconfig.trainer import schedule_arguments
from toolkit.engines.optimizer import learning_rate
from toolkit.errors import RecipeError, Refusal
from toolkit.launch.process_group import process_group
from toolkit.launch.rank_environment import RankEnvironment, pick_device
from toolkit.model_init.build_model import build_model
from toolkit.parity import LossCurve, ParityRun, Tensors
from toolkit.parity.run import observe
from toolkit.parity.run.train_in_memory import keep

_OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}
"""Optimizers that the Trainer builds with the same update."""

Read = Callable[[torch.Tensor], torch.Tensor | None]


def trainer_problems(recipe: Recipe) -> list[str]:
    """Return why the Trainer cannot be compared on a recipe, a line each."""
    refusals = []
    if recipe.precision != "fp32":
        reason = "the Trainer is compared in fp32, where what differs is not rounding"
        refusals.append(Refusal.of("precision", recipe.precision, reason, ("precision", "fp32")))
    if recipe.optimizer.name not in _OPTIMIZERS or recipe.optimizer.momentum:
        reason = "the Trainer builds another optimizer"
        refusals.append(Refusal.of("optimizer.name", recipe.optimizer.name, reason, ("optimizer.name", "adamw or sgd")))
    if recipe.data.masks_documents or recipe.data.weight_field is not None:
        reason = "the Trainer's loss knows neither documents nor weights of rows"
        refusals.append(Refusal.of("data.format", recipe.data.format, reason, "compare on text, packed or padded"))
    if recipe.model.lora is not None or recipe.model.freeze or recipe.model.train_only:
        reason = "the Trainer is compared where all parameters train"
        refusals.append(Refusal.of("model.name_or_path", recipe.model.name_or_path, reason, "train all of it"))
    return [refusal.render() for refusal in refusals]


def train_with_transformers(recipe: Recipe, strategy: Strategy, folder: Path) -> ParityRun:
    """Train `recipe` with the Trainer in a layout of its own; called on every rank. `folder` is one for all ranks.

    Rank 0 has the tensors. Raises RecipeError for what `trainer_problems` names.
    """
    if problems := trainer_problems(recipe):
        raise RecipeError(problems)
    here = RankEnvironment.detect()
    device = pick_device(here)
    if dist.is_initialized():
        return _train(recipe, strategy, folder, device)
    with process_group(here, device):
        return _train(recipe, strategy, folder, device)


def make_trainer(
    recipe: Recipe,
    strategy: Strategy,
    folder: Path,
    device: torch.device,
    kind: type[Trainer] = Trainer,
    callbacks: Sequence[TrainerCallback] = (),
    **more: Any,
) -> Trainer:
    """Build the Trainer of a recipe in a layout of its own, with the weights and samples of every strategy.

    `more`: other TrainingArguments. A collective call; `folder` is one for all ranks.
    """
    on_cpu = device.type == "cpu"
    if on_cpu:
        # Without a GPU the Trainer would train alone without a word, unless it gets a configured state; and accelerate
        # refuses tensor-parallel ranks on a CPU by nothing but this check.
        PartialState(cpu=True, backend="gloo")
        ParallelismConfig._validate_accelerator = lambda *_: None  # this process trains nothing else
    corpus = prepare_all(recipe.data, progress=False)
    batch = Batch.resolve(**recipe.batch.model_dump(), dp=dist.get_world_size() // strategy.tp)
    model = _load(recipe, strategy, corpus, folder)
    model.config.use_cache = False
    settings = {
        "per_device_train_batch_size": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
        "max_steps": recipe.train.steps,
        "optim": _OPTIMIZERS[recipe.optimizer.name],
        "learning_rate": recipe.optimizer.lr,
        "weight_decay": recipe.optimizer.weight_decay,
        "adam_beta1": recipe.optimizer.betas[0],
        "adam_beta2": recipe.optimizer.betas[1],
        "adam_epsilon": recipe.optimizer.eps,
        "lr_scheduler_type": recipe.schedule.name,
        "lr_scheduler_kwargs": schedule_arguments(recipe),
        "warmup_steps": recipe.schedule.warmup_steps,
        "max_grad_norm": recipe.train.grad_clip,
        "train_sampling_strategy": "sequential",
        "seed": recipe.train.seed,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "use_cpu": on_cpu,
        "accelerator_config": {"use_configured_state": on_cpu},
    }
    arguments = TrainingArguments(str(folder / "output"), **(settings | more))
    samples = _samples(recipe, corpus)
    return kind(model=model, args=arguments, train_dataset=samples, callbacks=list(callbacks))


def _train(recipe: Recipe, strategy: Strategy, folder: Path, device: torch.device) -> ParityRun:
    dp = dist.get_world_size() // strategy.tp
    batch = Batch.resolve(**recipe.batch.model_dump(), dp=dp)
    facts = _Facts(recipe=recipe, batch=batch, tp=strategy.tp, folder=folder)
    trainer = make_trainer(recipe, strategy, folder, device, ObservedTrainer, [_Updates(facts)])
    assert isinstance(trainer, ObservedTrainer)
    assert isinstance(trainer.model, PreTrainedModel)
    model = trainer.model
    trainer.facts = facts
    facts.outputs = observe.LayerOutputs(Observed(model=model, device=device))  # type: ignore[arg-type]
    facts.keep("initial", model, lambda parameter: parameter.detach())
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    hashes = observe.gather_on_rank_0(whole_parameter_hashes(model))
    diverged, compared = observe.compare_replicas(hashes)
    facts.keep("parameters", model, lambda parameter: parameter.detach())
    return ParityRun(
        curve=LossCurve.from_steps(strategy.text, [(entry["loss"], entry["grad_norm"]) for entry in history]),
        parameters=facts.tensors["parameters"],
        initial=facts.tensors["initial"],
        first_gradients=facts.tensors.get("gradients", {}),
        first_updates=facts.tensors.get("updates", {}),
        update_gradients=facts.tensors.get("update-gradients", {}),
        update_step=facts.update_step + 1,
        outputs=facts.layer_outputs,
        batches=merged_fingerprints(observe.gather_on_rank_0(facts.sums), strategy.tp),
        learning_rates=tuple(entry["learning_rate"] for entry in history),
        micro_batch_size=batch.micro_batch_size,
        replicas=dp,
        diverged_at_start=facts.diverged_at_start,
        diverged=diverged,
        replicas_compared=compared,
    )


def _load(recipe: Recipe, strategy: Strategy, corpus: Corpora, folder: Path) -> PreTrainedModel:
    """The model with the weights of every strategy, sharded by transformers where the layout asks for it."""
    model = build_model(recipe, eos_id=corpus.eos_id)
    if not strategy.loads_sharded:
        return model
    place = folder / "start"
    if dist.get_rank() == 0:
        model.save_pretrained(place)
    dist.barrier()
    distributed = DistributedConfig(
        tp_size=strategy.tp,
        fsdp_size=dist.get_world_size() // strategy.tp,
        ep_size=strategy.ep,
    )
    attention = model.config._attn_implementation
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, attn_implementation=attention, distributed_config=distributed
    )
    return loaded


def _samples(recipe: Recipe, corpus: Corpora) -> list[dict[str, torch.Tensor]]:
    """All samples of a recipe's steps, in order. Labels are shifted already, and the Trainer is told so."""
    size = recipe.batch.global_batch_size
    job = Job(recipe=recipe, layout=Layout(), batch=Batch(global_batch_size=size, micro_batch_size=size, dp=1))
    loader = MicroBatchLoader.open(job, corpus, rank=0)
    samples = []
    with loader.prefetch() as ahead:
        for step in range(recipe.train.steps):
            (whole,) = loader.micro_batches(step, ahead)
            for ids, labels in zip(whole.input_ids, whole.labels, strict=True):
                samples.append({"input_ids": ids, "labels": labels, "shift_labels": labels})
    return samples


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What an observer asks of an engine."""

    model: PreTrainedModel
    device: torch.device
    partition: None = None


class _Facts:
    """What is recorded of a run, on this rank; whole tensors on rank 0."""

    outputs: observe.LayerOutputs

    def __init__(self, *, recipe: Recipe, batch: Batch, tp: int, folder: Path) -> None:
        rate = learning_rate(recipe)
        self.update_step = next((step for step in range(recipe.train.steps) if rate(step) > 0), 0)
        self.batch = batch
        self.data_rank = dist.get_rank() // tp
        self.folder = folder
        self.tensors: dict[str, Tensors] = {}
        self.layer_outputs: dict[str, float] = {}
        self.diverged_at_start: frozenset[str] = frozenset()
        self.sums: list[int] = []
        """This rank's sum of the hashes of its samples in each step."""
        self._micro_batches = 0

    def keep(self, kind: str, model: PreTrainedModel, read: Read, *, since: str = "") -> None:
        """Keep the full value of what `read` returns of each parameter. A collective call."""
        reference = self.tensors[since] if since else None
        self.tensors[kind] = keep(full_values(model, read), self.folder / kind, since=reference)

    def read_samples(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        """Add the samples of a micro-batch to the fingerprint of its step."""
        step, round_of_step = divmod(self._micro_batches, self.batch.accumulation)
        start = self.batch.block_start(accumulation_step=round_of_step, data_rank=self.data_rank)
        if round_of_step == 0:
            self.sums.append(0)
        self.sums[step] += hash_samples(ids.cpu(), labels.cpu(), range(start, start + len(ids)))
        self._micro_batches += 1


class ObservedTrainer(Trainer):  # type: ignore[misc]
    """The Trainer, whose gradients and samples are recorded before it uses them."""

    facts: _Facts

    @override
    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self.facts.read_samples(inputs["input_ids"], inputs["labels"])
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    @override
    def _clip_grad_norm(self, model: Any) -> Any:
        self._keep_gradients()
        return super()._clip_grad_norm(model)

    @override
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            self._keep_gradients()
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _keep_gradients(self) -> None:
        step = self.state.global_step
        if step == 0:
            self.facts.keep("gradients", self.model, lambda parameter: parameter.grad)
        elif step == self.facts.update_step:
            self.facts.keep("update-gradients", self.model, lambda parameter: parameter.grad)


class _Updates(TrainerCallback):  # type: ignore[misc]
    """Records which replicas differ at first, layer outputs after the first step, and the first update."""

    def __init__(self, facts: _Facts) -> None:
        self._facts = facts

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer has wrapped the model by now: DDP sends the first rank's weights to the others.
        hashes = observe.gather_on_rank_0(whole_parameter_hashes(kwargs["model"]))
        self._facts.diverged_at_start, _ = observe.compare_replicas(hashes)

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self._facts.layer_outputs = self._facts.outputs.read()
        if state.global_step == self._facts.update_step + 1:
            self._facts.keep("updates", kwargs["model"], lambda parameter: parameter.detach(), since="initial")


def full_values(model: PreTrainedModel, read: Read) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and full value of what `read` returns of each parameter; zeros for None. A collective call."""
    for name, parameter in model.named_parameters():
        value = read(parameter)
        value = torch.zeros_like(parameter) if value is None else value
        yield name.removeprefix("module."), value.full_tensor() if isinstance(value, DTensor) else value


def whole_parameter_hashes(model: PreTrainedModel) -> dict[Hashable, bytes]:
    """Hashes of the parameters that every rank holds whole."""
    hashes: dict[Hashable, bytes] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            content = parameter.detach().contiguous().cpu().view(torch.uint8).numpy()
            hashes[name] = hashlib.blake2b(content.tobytes(), digest_size=16).digest()
    return hashes


def merged_fingerprints(ranks: list[list[int]], tp: int) -> tuple[str, ...]:
    """The fingerprint of each step's global batch; `a!=b` if ranks that share a sample read others."""
    totals = [[sum(step) for step in zip(*ranks[first::tp], strict=True)] for first in range(tp)] if ranks else []
    return tuple("!=".join(dict.fromkeys(map(format_fingerprint, step))) for step in zip(*totals, strict=True))
