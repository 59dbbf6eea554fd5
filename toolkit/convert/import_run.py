"""Importing a run: a whole training state of another program becomes one of ours, which a recipe can resume from."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.model_directory import WrittenDirectory, check_unused, new_directory
from toolkit.checkpoint.names import checkpoint_error
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.save import CheckpointContents, save
from toolkit.checkpoint.tensor_source import ShardedTensorSource
from toolkit.checkpoint.trainer_state import TrainerState
from toolkit.config.job import Job
from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import Recipe
from toolkit.convert.distributed_states import check_optimizer
from toolkit.convert.import_weights import (
    Imported,
    check_fits,
    check_outside,
    find_step,
    model_on_meta,
    open_step,
    tensor_group,
)
from toolkit.convert.setups.arguments_file import read_arguments
from toolkit.convert.trainer_states import is_trainer_state, open_trainer_state
from toolkit.convert.training_state import MASTER, TrainingState
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.corpora import Corpora, prepare_all
from toolkit.engines.optimizer import learning_rate
from toolkit.engines.optimizer_states import state_kinds
from toolkit.errors import RecipeError
from toolkit.files import printable
from toolkit.launch.environment import describe_environment
from toolkit.training.preflight import check_model, check_vocabulary

_ARGUMENTS = "training_args.bin"
"""The Trainer's arguments, beside its checkpoints."""


def import_run(source: Path, destination: Path, recipe: Recipe) -> Imported:
    """Write `source` with its optimizer states as a run directory, from which `recipe` can resume.

    Raises CheckpointError where it is no training state that is known, or not of the recipe's model and optimizer.
    """
    check_unused(destination)
    check_outside(destination, source)
    step = find_step(source)
    is_trainer = step is None and is_trainer_state(source)
    if step is None and not is_trainer:
        message = "no training state of another program, hence nothing to resume with. Omit --recipe for weights alone."
        raise checkpoint_error(source, message)
    config = check_model(recipe, torch.device("cpu"))
    model = model_on_meta(config)
    if step is None:
        checkpoint = open_trainer_state(source, model)
    else:
        checkpoint = open_step(step, config)
    check_fits(checkpoint, config)
    kinds = state_kinds(recipe.optimizer.name, recipe.optimizer.momentum)
    _check_states(checkpoint, kinds, recipe)
    corpus = prepare_all(recipe.data, progress=False)
    check_vocabulary(recipe, config, corpus)
    state = _state(checkpoint, kinds, recipe, corpus)
    state.check(recipe, corpus.contents, path=printable(source))

    def write_model_files(folder: Path) -> None:
        config.dtype = torch.float32
        config.architectures = [type(model).__name__]  # without it, vLLM does not know which class to load
        config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        corpus.tokenizer().save_pretrained(folder)

    groups = [tensor_group(checkpoint, kind) for kind in (MASTER, *kinds)]
    nbytes = sum(spec.nbytes for group in groups for spec in group.specs)
    with new_directory(destination, nbytes=nbytes) as folder:
        saved = save(
            folder,
            checkpoint.step,
            CheckpointContents(
                tensors=ShardedTensorSource(groups=groups),
                trainer_state=state.to_dict(),
                write_model_files=write_model_files,
            ),
            ranks=Ranks.single(),
        )
        files = sum(path.suffix == ".safetensors" for path in saved.path.rglob("*"))
    tensors = sum(len(group.specs) for group in groups)
    return Imported(
        title=checkpoint.title,
        written=WrittenDirectory(path=destination, files=files, tensors=tensors, nbytes=nbytes),
        notices=(*_notices(checkpoint, recipe), *_seed_notices(checkpoint, source, recipe)),
    )


def _check_states(checkpoint: TrainingState, kinds: tuple[str, ...], recipe: Recipe) -> None:
    missing = [kind for kind in kinds if kind not in checkpoint.kinds]
    if missing:
        check_optimizer(checkpoint.tag)
    if missing or checkpoint.frozen:
        missing_part = f"no {missing[0]}" if missing else f"no states of {checkpoint.frozen[0]}, which was frozen"
        raise checkpoint_error(
            checkpoint.tag,
            f"it has {missing_part}, and optimizer.name={recipe.optimizer.name} needs them. "
            "Name the optimizer that it was trained with, or omit --recipe to import the weights.",
        )


def _state(checkpoint: TrainingState, kinds: tuple[str, ...], recipe: Recipe, corpus: Corpora) -> TrainerState:
    """The state as if the recipe had trained so far: its samples and learning rate continue after this step."""
    size = recipe.batch.global_batch_size
    batch = Batch(global_batch_size=size, micro_batch_size=size, dp=1)
    loader = MicroBatchLoader.open(Job(recipe=recipe, layout=Layout(), batch=batch), corpus, rank=0)
    return TrainerState(
        step=checkpoint.step,
        samples=checkpoint.step * size,
        tokens=sum(loader.target_tokens(step) for step in range(min(checkpoint.step, recipe.train.steps))),
        updates=checkpoint.updates,
        learning_rate=learning_rate(recipe)(max(0, checkpoint.step - 1)),
        loss_scale={}
        if checkpoint.loss_scale is None or recipe.precision != "fp16"
        else {"cur_scale": checkpoint.loss_scale},
        layout=str(Layout(dp=checkpoint.ranks, zero_stage=checkpoint.stage)),
        micro_batch_size=_setting(checkpoint, "train_micro_batch_size_per_gpu") or recipe.batch.micro_batch_size or 1,
        accumulation=_setting(checkpoint, "gradient_accumulation_steps") or 1,
        precision=recipe.precision,
        engine="deepspeed",
        seed=recipe.train.seed,
        states=list(kinds),
        contents=corpus.contents,
        versions=describe_environment(torch.device("cpu"))
        | {**({"deepspeed": checkpoint.version} if checkpoint.program == "DeepSpeed" else {})},
        recipe=recipe.model_dump(mode="json"),
    )


def _notices(checkpoint: TrainingState, recipe: Recipe) -> Iterator[str]:
    yield (
        f"the data of the recipe continues at step {checkpoint.step}, as if its first {checkpoint.step} steps had been "
        f"trained on; which samples {checkpoint.program} used is not known"
    )
    micro = _setting(checkpoint, "train_micro_batch_size_per_gpu") or 0
    accumulation = _setting(checkpoint, "gradient_accumulation_steps") or 1
    before = _setting(checkpoint, "train_batch_size") or micro * accumulation * checkpoint.ranks
    if before and before != recipe.batch.global_batch_size:
        yield f"its global batch was {before} samples, that of the recipe is {recipe.batch.global_batch_size}"
    yield from _differing_settings(checkpoint, recipe)
    yield from checkpoint.notices


def _seed_notices(checkpoint: TrainingState, source: Path, recipe: Recipe) -> Iterator[str]:
    """Say whether a checkpoint's run had another seed than the recipe, by its state or its `training_args.bin`."""
    seed = checkpoint.seed
    for folder in dict.fromkeys((checkpoint.tag, source, checkpoint.tag.parent)):
        file = folder / _ARGUMENTS
        if seed is not None or not file.is_file():
            continue
        try:
            seed = read_arguments(file).get("seed")
        except RecipeError as error:
            yield f"its seed is not known: {error}"
            return
    if type(seed) is int and seed != recipe.train.seed:
        yield (
            f"its seed was {seed}, by the recipe train.seed is {recipe.train.seed}, which draws samples and dropout "
            "from here on; states of random generators are not read"
        )


def _differing_settings(checkpoint: TrainingState, recipe: Recipe) -> Iterator[str]:
    """Settings of its optimizer that the recipe sets otherwise, of those that it stores."""
    section = recipe.optimizer
    now = {"lr": learning_rate(recipe)(checkpoint.step), "betas": section.betas, "eps": section.eps}
    now["weight_decay"] = section.weight_decay
    for name, value in now.items():
        before = _numbers(checkpoint.optimizer.get(name))
        current = _numbers(value)
        if before is None or current is None:
            continue
        if not all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(before, current, strict=True)):
            setting = "the learning rate of its next step" if name == "lr" else f"its {name}"
            yield f"{setting} was {_spell(before)}, by the recipe it is {_spell(current)}"


def _numbers(value: Any) -> tuple[float, ...] | None:
    values = value if isinstance(value, tuple | list) else (value,)
    is_known = all(isinstance(number, int | float | torch.Tensor) for number in values)
    return tuple(float(number) for number in values) if is_known else None


def _spell(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _setting(checkpoint: TrainingState, name: str) -> int | None:
    value = checkpoint.config.get(name)
    return value if type(value) is int and value > 0 else None
