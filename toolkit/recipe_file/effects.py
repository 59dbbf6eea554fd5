"""Fields without effect: what another field makes meaningless must have its default, else one believes that it acts."""

import glob
import os
from collections.abc import Iterator

from toolkit.recipe import DataSection, OptimizerSection, Recipe, ScheduleSection, Section
from toolkit.recipe_file.finding import Finding
from toolkit.recipe_file.strict_yaml import dotted

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
RECORD_SUFFIXES = (".jsonl", ".json-lines", ".jsonlines", ".ndjson", ".json", ".parquet", ".pq")
"""Files of records with named fields; what else is a file is text. Compressed ones have a further .gz or .zst."""


def without_effect(recipe: Recipe) -> Iterator[Finding]:
    """Every field that is set and does nothing."""
    yield from _optimizer(recipe.optimizer)
    yield from _schedule(recipe.schedule)
    yield from _data(recipe.data)
    for name, section, field, switch in (
        ("train", recipe.train, "eval_samples", "eval_every"),
        ("train", recipe.train, "spike_window", "spike_sigmas"),
        ("checkpoint", recipe.checkpoint, "keep", "every"),
        ("checkpoint", recipe.checkpoint, "keep_every", "every"),
        ("checkpoint", recipe.checkpoint, "asynchronous", "every"),
    ):
        if not getattr(section, switch) and _is_set(section, field):
            yield _no_effect(name, field, f"{name}.{switch}=0", f"set {name}.{switch}=1 or more")
    train = recipe.train
    if train.on_nonfinite == "stop" and not train.spike_sigmas and _is_set(train, "max_incidents"):
        choice = "train.on_nonfinite=stop and train.spike_sigmas=0"
        yield _no_effect("train", "max_incidents", choice, "set train.on_nonfinite=skip or rollback")


def schedule_fields(name: str) -> tuple[str, ...]:
    """The fields that a schedule reads."""
    return _SCHEDULE_FIELDS.get(name, ("warmup_steps",))


def _optimizer(section: OptimizerSection) -> Iterator[Finding]:
    for field in ("betas", "eps", "momentum"):
        if field not in _OPTIMIZER_FIELDS[section.name] and _is_set(section, field):
            users = [name for name, fields in _OPTIMIZER_FIELDS.items() if field in fields]
            yield _no_effect("optimizer", field, section.name, f"set optimizer.name={' or '.join(users)}")


def _schedule(section: ScheduleSection) -> Iterator[Finding]:
    for field in ("warmup_steps", "decay_steps", "min_lr_ratio"):
        if field not in schedule_fields(section.name) and _is_set(section, field):
            users = [name for name, fields in _SCHEDULE_FIELDS.items() if field in fields]
            if field == "warmup_steps":
                users = ["constant_with_warmup"]
            yield _no_effect("schedule", field, section.name, f"set schedule.name={' or '.join(users)}")


def _data(section: DataSection) -> Iterator[Finding]:
    records = "name a dataset in data.source"
    remedies = {"subset": records, "split": records, "text_field": "name JSONL, Parquet or a dataset in data.source"}
    for field in _ignored_by_source(section.source):
        if _is_set(section, field):
            yield _no_effect("data", field, f"data.source={section.source}", remedies[field])


def _ignored_by_source(source: str) -> tuple[str, ...]:
    """The fields of `data` that have no meaning for a source, as far as a look at the file system tells."""
    path = os.path.expanduser(source)
    if source in ("stdlib", "markov"):
        return ("subset", "split", "text_field")
    if os.path.isdir(path):
        has_splits = os.path.isfile(os.path.join(path, "dataset_dict.json"))
        return ("subset",) if has_splits else ("subset", "split")
    is_file = os.path.exists(path)
    if not is_file and not glob.has_magic(source):
        return ()
    suffix = os.path.splitext(source.lower().removesuffix(".gz").removesuffix(".zst"))[1]
    is_text = suffix not in RECORD_SUFFIXES and (is_file or (suffix != "" and not glob.has_magic(suffix)))
    return ("subset", "split", "text_field") if is_text else ("subset", "split")


def _is_set(section: Section, field: str) -> bool:
    return bool(getattr(section, field) != type(section).model_fields[field].default)


def _no_effect(section: str, field: str, choice: str, remedy: str) -> Finding:
    path = (section, field)
    return Finding(path, f"{dotted(path)} has no effect with {choice}. Remove it, or {remedy}.")
