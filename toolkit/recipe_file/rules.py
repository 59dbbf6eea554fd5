"""What fields must agree on: rules between fields of a recipe that each field alone cannot break."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from toolkit.batch import Batch
from toolkit.errors import ToolkitError, nearest
from toolkit.layout import Layout
from toolkit.recipe import OptimizerSection, Recipe, ScheduleSection
from toolkit.recipe_file.strict_yaml import Path, dotted
from toolkit.shape import ModelShape, families, find_config, hub_spelling, names, with_overrides


class Finding(NamedTuple):
    """A contradiction, and the field where one would look for it."""

    path: Path
    message: str


_PRECISIONS = {
    "deepspeed": ("fp32", "bf16", "fp16"),
    "reference": ("fp32",),
    "ddp": ("fp32", "bf16"),
    "fsdp": ("fp32", "bf16"),
}
_OPTIMIZER_FIELDS = {
    "adamw": ("betas", "eps"),
    "adam": ("betas", "eps"),
    "sgd": ("momentum",),
    "lion": ("betas",),
}
_SCHEDULE_FIELDS = {
    "constant": (),
    "cosine_with_min_lr": ("warmup_steps", "min_lr_ratio"),
    "polynomial": ("warmup_steps", "min_lr_ratio"),
    "warmup_stable_decay": ("warmup_steps", "decay_steps", "min_lr_ratio"),
}


def problems(recipe: Recipe, world_size: int | None = None) -> list[str]:
    """Every contradiction between fields, one line each; with `world_size` also what does not fit that many ranks."""
    return [message for _, message in findings(recipe, world_size)]


def findings(recipe: Recipe, world_size: int | None) -> list[Finding]:
    """The same, each with the field that it is about."""
    unavailable = list(_unavailable(recipe))
    where = unavailable or [*_engine_layout(recipe, world_size)] or [*_layout_and_batch(recipe, world_size)]
    return [
        *where,
        *_precision(recipe),
        *_optimizer(recipe),
        *_schedule(recipe),
        *_data(recipe),
        *_model(recipe),
    ]


def _unavailable(recipe: Recipe) -> Iterator[Finding]:
    """What this version's engines do not run yet. Delete a line here when one of them does."""
    section = recipe.parallel
    for field, value, off in (
        ("tp", section.tp, 1),
        ("pp", section.pp, 1),
        ("ulysses", section.ulysses, 1),
        ("sequence_parallel", section.sequence_parallel, False),
    ):
        if value != off:
            given, wanted = str(value).lower(), str(off).lower()
            yield Finding(
                ("parallel", field),
                f"parallel.{field}={given} is not available in this version; data parallelism (dp) with ZeRO stages "
                f"0 to 3 is. Set parallel.{field}={wanted}.",
            )


def _engine_layout(recipe: Recipe, world_size: int | None) -> Iterator[Finding]:
    """Settings of DeepSpeed that another engine would silently ignore. The ZeRO stage has no meaning there."""
    engine, section = recipe.train.engine, recipe.parallel
    if engine == "deepspeed":
        return
    for field in ("offload_optimizer", "offload_params"):
        value = getattr(section, field)
        if value != "none":
            yield Finding(
                ("parallel", field),
                f"parallel.{field}={value} with train.engine={engine}: only the engine deepspeed offloads. "
                f"Set parallel.{field}=none, or train.engine=deepspeed.",
            )
    if engine != "reference":
        return
    if recipe.train.compile:
        yield Finding(
            ("train", "compile"),
            "train.compile=true with train.engine=reference: the reference stays plain PyTorch. "
            "Set train.compile=false.",
        )
    for field in ("dp", "tp", "pp", "ulysses"):
        if (getattr(section, field) or 1) > 1:
            yield Finding(
                ("parallel", field),
                f"parallel.{field}={getattr(section, field)} with train.engine=reference: the reference is one plain "
                f"PyTorch process. Set parallel.{field}=1.",
            )
    if world_size is not None and world_size > 1:
        yield Finding(
            ("train", "engine"),
            f"{world_size} ranks with train.engine=reference: the reference is one plain PyTorch process. "
            "Launch 1 rank, for instance with `python`.",
        )


def _layout_and_batch(recipe: Recipe, world_size: int | None) -> Iterator[Finding]:
    """The rules of Layout and Batch; without a world size, as far as they hold for every one."""
    fields = recipe.parallel.model_dump()
    try:
        if world_size is None:
            layout = Layout(**{**fields, "dp": recipe.parallel.dp or 1})
        else:
            layout = Layout.resolve(world_size, **fields)
    except ToolkitError as error:
        # Layout's messages open with the field that is wrong; those about the world size do not.
        name = str(error).partition("=")[0]
        yield Finding(("parallel", name) if name in fields else ("parallel",), str(error))
        return
    try:
        Batch.resolve(global_size=recipe.batch.global_size, micro_size=recipe.batch.micro_size, dp=layout.dp)
    except ToolkitError as error:
        yield Finding(("batch", "global_size"), str(error))


def _precision(recipe: Recipe) -> Iterator[Finding]:
    engine, precision = recipe.train.engine, recipe.precision
    choices = _PRECISIONS[engine]
    if precision not in choices:
        yield Finding(
            ("precision",),
            f"precision={precision} with train.engine={engine}: this engine allows {' or '.join(choices)}. "
            f"Set precision={choices[-1]}, or train.engine=deepspeed.",
        )


def _optimizer(recipe: Recipe) -> Iterator[Finding]:
    """A field that the chosen optimizer ignores must have its default: else one believes that it acts."""
    section = recipe.optimizer
    used = _OPTIMIZER_FIELDS[section.name]
    for field in ("betas", "eps", "momentum"):
        if field not in used and getattr(section, field) != OptimizerSection.model_fields[field].default:
            users = [name for name, names in _OPTIMIZER_FIELDS.items() if field in names]
            yield _no_effect(("optimizer", field), section.name, users)


def _schedule(recipe: Recipe) -> Iterator[Finding]:
    section, steps = recipe.schedule, recipe.train.steps
    used = _SCHEDULE_FIELDS.get(section.name, ("warmup_steps",))
    for field in ("warmup_steps", "decay_steps", "min_lr_ratio"):
        if field not in used and getattr(section, field) != ScheduleSection.model_fields[field].default:
            users = [name for name, names in _SCHEDULE_FIELDS.items() if field in names]
            if field == "warmup_steps":
                users = ["constant_with_warmup"]
            yield _no_effect(("schedule", field), section.name, users)
    if "warmup_steps" not in used:
        return
    decay = 0
    if "decay_steps" in used:
        decay = max(1, steps // 10) if section.decay_steps is None else section.decay_steps
    if section.warmup_steps + decay > steps:
        parts = f"warmup_steps={section.warmup_steps}" + f" + decay_steps={decay}" * bool(decay)
        yield Finding(
            ("schedule", "warmup_steps" if section.decay_steps is None else "decay_steps"),
            f"schedule.{parts} with train.steps={steps}: the schedule is longer than the run. "
            f"Lower schedule.warmup_steps, or set train.steps={section.warmup_steps + decay} or more.",
        )


def _data(recipe: Recipe) -> Iterator[Finding]:
    section = recipe.data
    if section.source == "stdlib":
        for field in ("subset", "split", "text_field"):
            if getattr(section, field) != type(section).model_fields[field].default:
                yield Finding(
                    ("data", field),
                    f"data.{field} has no effect with data.source=stdlib. Remove it, or name a dataset in data.source.",
                )
    if recipe.train.eval_every and not section.eval_fraction:
        yield Finding(
            ("train", "eval_every"),
            f"train.eval_every={recipe.train.eval_every} with data.eval_fraction=0: no text is held out for the "
            "validation. Set data.eval_fraction=0.01, or train.eval_every=0.",
        )


def _model(recipe: Recipe) -> Iterator[Finding]:
    """What the model's config says, where it is known without a network. Families we cannot read are not checked."""
    name, seq_len = recipe.model.name_or_path, recipe.data.seq_len
    if recipe.model.init == "pretrained" and recipe.data.tokenizer.startswith("bpe-"):
        yield Finding(
            ("data", "tokenizer"),
            f"data.tokenizer={recipe.data.tokenizer} with model.init=pretrained: the weights know the ids of another "
            f"tokenizer. Set data.tokenizer to that of the model, for instance {name}.",
        )
    where: Path = ("model", "name_or_path")
    try:
        config = find_config(name)
        if config is None and "/" not in name:
            yield Finding(
                where,
                f"model.name_or_path={name}: neither a known shape nor a directory, and hub names have the form "
                f"org/name.{nearest(name, names())}",
            )
        if config is not None and recipe.model.init == "pretrained" and name.lower() in names():
            hub = hub_spelling(name)
            yield Finding(
                where,
                f"model.init=pretrained with model.name_or_path={name}: a shape has no weights. Name a directory or a "
                f"hub name{f' such as {hub}' if hub else ''}, or set model.init=random.",
            )
        if config is None or config.get("model_type") not in families():
            return
        where = ("model", "overrides")
        shape = ModelShape.from_config(with_overrides(config, recipe.model.overrides))
    except ToolkitError as error:
        yield Finding(where, str(error))
        return
    entries = re.fullmatch(r"bpe-(\d{1,9})", recipe.data.tokenizer)
    if entries is not None and int(entries[1]) > shape.vocab:
        yield Finding(
            ("data", "tokenizer"),
            f"data.tokenizer={recipe.data.tokenizer} with model.name_or_path={name}: the model has a vocabulary of "
            f"{shape.vocab}. Set data.tokenizer=bpe-{shape.vocab} or less, or model.overrides.vocab_size={entries[1]}.",
        )
    if shape.positions is not None and seq_len > shape.positions:
        # A table of positions ends; rotary and ALiBi positions do not, and there the config's number is the user's.
        stretch = "" if shape.learned_positions else f", or model.overrides.max_position_embeddings to {seq_len}"
        yield Finding(
            ("data", "seq_len"),
            f"data.seq_len={seq_len} with model.name_or_path={name}: the model has {shape.positions} positions. "
            f"Set data.seq_len to {shape.positions} or less{stretch}.",
        )


def _no_effect(path: Path, choice: str, users: list[str]) -> Finding:
    return Finding(
        path,
        f"{dotted(path)} has no effect with {choice}. Remove it, or set {path[0]}.name={' or '.join(users)}.",
    )
