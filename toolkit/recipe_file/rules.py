"""What fields must agree on: rules between fields of a recipe that each field alone cannot break."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from toolkit.errors import ToolkitError, nearest
from toolkit.recipe import Recipe
from toolkit.recipe_file.effects import schedule_fields, without_effect
from toolkit.recipe_file.finding import Finding
from toolkit.recipe_file.parallelism import cut_findings, placement
from toolkit.shape import ModelShape, families, find_config, hub_spelling, names, with_overrides

_PRECISIONS = {
    "deepspeed": ("fp32", "bf16", "fp16"),
    "reference": ("fp32",),
    "ddp": ("fp32", "bf16"),
    "fsdp": ("fp32", "bf16"),
}

_BYTES = "bpe-257"
"""The byte-level BPE without merges: 256 bytes and the end-of-text token."""


def problems(recipe: Recipe, world_size: int | None = None) -> list[str]:
    """Every contradiction between fields, one line each; with `world_size` also what does not fit that many ranks."""
    return [message for _, message in findings(recipe, world_size)]


def cut_problems(recipe: Recipe, config: Mapping[str, Any], shape: ModelShape | None) -> list[str]:
    """What keeps a model from being cut as the recipe says, one line each, once its config is known."""
    return [message for _, message in cut_findings(recipe, config, shape)]


def findings(recipe: Recipe, world_size: int | None) -> list[Finding]:
    """The same, each with the field that it is about."""
    model = _read_model(recipe)
    config = model.config and with_overrides(model.config, recipe.model.overrides)
    uncuttable = [*cut_findings(recipe, config, model.shape)]
    return [
        # How many ranks to launch for tp and pp is no advice where the model does not allow them.
        *placement(recipe, None if uncuttable else world_size),
        *uncuttable,
        *_precision(recipe),
        *without_effect(recipe),
        *_schedule(recipe),
        *_validation(recipe),
        *_rollback(recipe),
        *_symbols(recipe),
        *_model(recipe, model),
        *_shape(recipe, model.shape),
    ]


def _precision(recipe: Recipe) -> Iterator[Finding]:
    engine, precision = recipe.train.engine, recipe.precision
    choices = _PRECISIONS[engine]
    if precision not in choices:
        yield Finding(
            ("precision",),
            f"precision={precision} with train.engine={engine}: this engine allows {' or '.join(choices)}. "
            f"Set precision={choices[-1]}, or train.engine=deepspeed.",
        )


def _schedule(recipe: Recipe) -> Iterator[Finding]:
    section, steps = recipe.schedule, recipe.train.steps
    used = schedule_fields(section.name)
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


def _validation(recipe: Recipe) -> Iterator[Finding]:
    if recipe.train.eval_every and not recipe.data.eval_fraction:
        yield Finding(
            ("train", "eval_every"),
            f"train.eval_every={recipe.train.eval_every} with data.eval_fraction=0: no text is held out for the "
            "validation. Set data.eval_fraction=0.01, or train.eval_every=0.",
        )


def _rollback(recipe: Recipe) -> Iterator[Finding]:
    section = recipe.train
    if not recipe.checkpoint.every:
        for field, off in (("on_nonfinite", "stop or skip"), ("spike_sigmas", "0")):
            value = getattr(section, field)
            if value == "rollback" or (field == "spike_sigmas" and value):
                yield Finding(
                    ("train", field),
                    f"train.{field}={value} with checkpoint.every=0: there is nothing to roll back to. "
                    f"Set checkpoint.every, or train.{field} to {off}.",
                )


def _symbols(recipe: Recipe) -> Iterator[Finding]:
    """The entropy rate of a Markov chain is known for its letters, not for what a BPE would merge them into."""
    name = recipe.data.tokenizer
    if recipe.data.source == "markov" and re.fullmatch(r"bpe-\d+", name) and name != _BYTES:
        yield Finding(
            ("data", "tokenizer"),
            f"data.tokenizer={name} with data.source=markov: a token must be one letter, else the entropy rate of the "
            f"tokens is not known. Set data.tokenizer={_BYTES}: a token is a byte.",
        )


class _Model(NamedTuple):
    """What is known of the recipe's model without a network."""

    config: dict[str, Any] | None = None
    shape: ModelShape | None = None
    """None also for families that we cannot read."""
    trouble: Finding | None = None


def _read_model(recipe: Recipe) -> _Model:
    try:
        config = find_config(recipe.model.name_or_path)
    except ToolkitError as error:
        return _Model(trouble=Finding(("model", "name_or_path"), str(error)))
    if config is None or config.get("model_type") not in families():
        return _Model(config)
    try:
        return _Model(config, ModelShape.from_config(with_overrides(config, recipe.model.overrides)))
    except ToolkitError as error:
        return _Model(config, trouble=Finding(("model", "overrides"), str(error)))


def _model(recipe: Recipe, model: _Model) -> Iterator[Finding]:
    """A model that is not there, or has no weights, or weights for another tokenizer."""
    name = recipe.model.name_or_path
    if recipe.model.init == "pretrained" and recipe.data.tokenizer.startswith("bpe-"):
        yield Finding(
            ("data", "tokenizer"),
            f"data.tokenizer={recipe.data.tokenizer} with model.init=pretrained: the weights know the ids of another "
            f"tokenizer. Set data.tokenizer to that of the model, for instance {name}.",
        )
    if model.trouble is not None:
        yield model.trouble
    elif model.config is None and "/" not in name:
        yield Finding(
            ("model", "name_or_path"),
            f"model.name_or_path={name}: neither a known shape nor a directory, and hub names have the form "
            f"org/name.{nearest(name, names())}",
        )
    if model.config is not None and recipe.model.init == "pretrained" and name.lower() in names():
        hub = hub_spelling(name)
        yield Finding(
            ("model", "name_or_path"),
            f"model.init=pretrained with model.name_or_path={name}: a shape has no weights. Name a directory or a "
            f"hub name{f' such as {hub}' if hub else ''}, or set model.init=random.",
        )


def _shape(recipe: Recipe, shape: ModelShape | None) -> Iterator[Finding]:
    """The model's vocabulary and positions against the tokenizer and the samples."""
    if shape is None:
        return
    name, seq_len = recipe.model.name_or_path, recipe.data.seq_len
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
