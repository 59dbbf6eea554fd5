"""Importing a run: a checkpoint of DeepSpeed with its optimizer becomes one of ours, for a recipe to go on from."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

from toolkit.batch import Batch
from toolkit.checkpoint.exchange.deepspeed import DeepSpeedCheckpoint, find_tag, open_deepspeed
from toolkit.checkpoint.exchange.new_directory import Written, check_unused, new_directory
from toolkit.checkpoint.exchange.partitions import MASTER
from toolkit.checkpoint.names import shown
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.save import save
from toolkit.errors import CheckpointError
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.train.data.tokens import TokenCorpus, prepare
from toolkit.train.engines.states import state_kinds
from toolkit.train.environment import describe_environment
from toolkit.train.feed import Feed
from toolkit.train.imported_weights import Imported, check_fits, tensor_group
from toolkit.train.optimizer import learning_rate
from toolkit.train.preflight import check_model, check_vocabulary
from toolkit.train.trainer_state import TrainerState


def import_run(source: Path, destination: Path, recipe: Recipe) -> Imported:
    """Write `source` with its optimizer states as a run directory, whose checkpoint `recipe` can go on from.

    Raises CheckpointError where it is no checkpoint of DeepSpeed, or not of the recipe's model and optimizer.
    """
    check_unused(destination)
    tag = find_tag(source)
    if tag is None:
        raise CheckpointError(
            f"{shown(str(source))}: no checkpoint of DeepSpeed, hence no optimizer to go on with. Leave --recipe out "
            "to import the weights."
        )
    found = open_deepspeed(tag)
    config = check_model(recipe, torch.device("cpu"))
    check_fits(found, config)
    kinds = state_kinds(recipe.optimizer.name, recipe.optimizer.momentum)
    _check_states(found, kinds, recipe)
    corpus = prepare(recipe.data, progress=False)
    check_vocabulary(recipe, config, corpus)
    state = _state(found, kinds, recipe, corpus)
    state.check(recipe, corpus.contents, path=shown(str(source)))
    groups = [tensor_group(found, kind) for kind in (MASTER, *kinds)]
    nbytes = sum(spec.nbytes for group in groups for spec in group.specs)
    with new_directory(destination, nbytes=nbytes) as folder:
        saved = save(
            folder,
            found.step,
            groups=groups,
            trainer_state=state.to_dict(),
            beside=lambda inner: _write_beside(inner, config, corpus),
            ranks=Ranks.alone(),
        )
        files = sum(path.suffix == ".safetensors" for path in saved.path.rglob("*"))
    tensors = sum(len(group.specs) for group in groups)
    return Imported(
        title=f"DeepSpeed {found.title}",
        written=Written(path=destination, files=files, tensors=tensors, nbytes=nbytes),
        notices=tuple(_notices(found, recipe)),
    )


def _check_states(found: DeepSpeedCheckpoint, kinds: tuple[str, ...], recipe: Recipe) -> None:
    missing = [kind for kind in kinds if kind not in found.kinds]
    if missing or found.frozen:
        what = f"no {missing[0]}" if missing else f"no states of {found.frozen[0]}, which was frozen"
        raise CheckpointError(
            f"{shown(str(found.tag))}: it has {what}, and optimizer.name={recipe.optimizer.name} needs them. Name the "
            "optimizer that it was trained with, or leave --recipe out to import the weights."
        )


def _write_beside(folder: Path, config: PretrainedConfig, corpus: TokenCorpus) -> None:
    config.dtype = torch.float32
    config.save_pretrained(folder)
    corpus.tokenizer().save_pretrained(folder)


def _state(found: DeepSpeedCheckpoint, kinds: tuple[str, ...], recipe: Recipe, corpus: TokenCorpus) -> TrainerState:
    """As if the recipe had trained so far: its samples and its learning rate after this step are what comes next."""
    size = recipe.batch.global_size
    feed = Feed.open(recipe, Layout(), Batch(global_size=size, micro_size=size, dp=1), corpus, rank=0)
    return TrainerState(
        step=found.step,
        samples=found.step * size,
        tokens=sum(feed.target_tokens(step) for step in range(min(found.step, recipe.train.steps))),
        updates=found.updates,
        learning_rate=learning_rate(recipe)(max(0, found.step - 1)),
        loss_scale={} if found.loss_scale is None or recipe.precision != "fp16" else {"cur_scale": found.loss_scale},
        layout=str(Layout(dp=found.ranks, zero_stage=found.stage)),
        micro_size=_setting(found, "train_micro_batch_size_per_gpu") or recipe.batch.micro_size,
        accumulation=_setting(found, "gradient_accumulation_steps") or 1,
        precision=recipe.precision,
        engine="deepspeed",
        seed=recipe.train.seed,
        states=list(kinds),
        contents=corpus.contents,
        versions=describe_environment(torch.device("cpu")) | {"deepspeed": found.version},
        recipe=recipe.model_dump(mode="json"),
    )


def _notices(found: DeepSpeedCheckpoint, recipe: Recipe) -> Iterator[str]:
    yield (
        f"the data of the recipe is taken up at step {found.step}, as if its first {found.step} steps had been trained "
        "on; which samples DeepSpeed saw is not known"
    )
    micro, accumulation = (
        _setting(found, "train_micro_batch_size_per_gpu"),
        _setting(found, "gradient_accumulation_steps"),
    )
    before = _setting(found, "train_batch_size") or (micro or 0) * (accumulation or 1) * found.ranks
    if before and before != recipe.batch.global_size:
        yield f"its global batch was {before} samples, that of the recipe is {recipe.batch.global_size}"


def _setting(found: DeepSpeedCheckpoint, name: str) -> int | None:
    value = found.config.get(name)
    return value if type(value) is int and value > 0 else None
