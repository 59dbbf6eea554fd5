"""Rules for recipes: what fields must agree on beyond the bounds of each, and what the model allows."""

import errno
import glob
import os
import re
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from toolkit.config.data_section import CONVERSATIONS, PREFERENCE_FORMATS, DataSection
from toolkit.config.distill_rules import distill_conflicts
from toolkit.config.megatron_prefix import megatron_prefix
from toolkit.config.mixture_rules import idle_data_fields, mixture_conflicts, of_all_texts, of_each_text
from toolkit.config.objective_rules import objective_conflicts
from toolkit.config.parallel_rules import model_conflicts, setting_conflicts
from toolkit.config.recipe import Recipe
from toolkit.config.router_rules import router_conflicts
from toolkit.config.trained_parameters import trained_parameter_conflicts
from toolkit.errors import Refusal, Setting, ToolkitError
from toolkit.models.chunked_head import unchunked
from toolkit.models.override_fields import unknown_overrides
from toolkit.models.shape import (
    ModelShape,
    families,
    find_config,
    find_name,
    hub_spelling,
    nearest_names,
    with_overrides,
)
from toolkit.models.support import attention_kinds
from toolkit.remote_files import is_url

_MODEL = "model.name_or_path"
_TOKENIZER = "data.tokenizer"
_LOW = ("fp32", "bf16")
_PRECISIONS = {"deepspeed": (*_LOW, "fp16"), "reference": ("fp32",), "ddp": _LOW, "fsdp": _LOW}
_BYTES = "bpe-257"
"""The byte-level BPE without merges: 256 bytes and the end-of-text token."""
_OPTIMIZER_FIELDS = {"adamw": ("betas", "eps"), "adam": ("betas", "eps"), "sgd": ("momentum",), "lion": ("betas",)}
_OPTIMIZER_FIELDS["muon"] = ("betas", "eps", "momentum", "adamw_lr", "adjust_lr")
_OPTIMIZER_FIELDS["adafactor"] = ()
_OPTIMIZER_FIELDS["adamw8bit"] = ("betas", "eps")
_SCHEDULE_FIELDS = {
    "constant": (),
    "cosine_with_min_lr": ("warmup_steps", "min_lr_ratio"),
    "polynomial": ("warmup_steps", "min_lr_ratio"),
    "warmup_stable_decay": ("warmup_steps", "decay_steps", "min_lr_ratio"),
}
JSON_SUFFIXES = (".jsonl", ".json-lines", ".jsonlines", ".ndjson", ".json")
"""Files of JSON records with named fields; compressed ones have a further .gz or .zst."""
PARQUET_SUFFIXES = (".parquet", ".pq", ".arrow")
"""Files of records in columns. A file with none of these suffixes is text."""
_MOST_OVERRIDES = 100
"""The most unknown fields of model.overrides that are listed."""
_DIRECTORIES = ("run_dir", "checkpoint.url", "parallel.nvme_path")
_MADE = ("run_dir", "data.cache_dir", "parallel.nvme_path")
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")
_SWITCHES = {
    "train.eval_samples": "train.eval_every",
    "train.spike_window": "train.spike_sigmas",
    "checkpoint.keep": "checkpoint.every",
    "checkpoint.keep_every": "checkpoint.every",
    "checkpoint.url": "checkpoint.every",
    "checkpoint.asynchronous": "checkpoint.every",
}
"""Fields that do nothing while the other field is 0."""
_RECORDS_NEEDED: dict[str, str] = {
    "subset": "name a dataset in data.source",
    "split": "name a dataset in data.source",
    "stream_rows": "name a dataset in data.source",
    "text_field": "name JSONL, Parquet or a dataset in data.source",
}


def recipe_problems(recipe: Recipe, world_size: int | None = None) -> list[str]:
    """Every conflict between fields, one line each; with `world_size` also what does not fit that many ranks."""
    return [str(refusal) for refusal in recipe_conflicts(recipe, world_size)]


def parallelism_conflicts(recipe: Recipe, config: Mapping[str, Any], shape: ModelShape | None) -> list[Refusal]:
    """Return what keeps a model from being parallelized as the recipe says, once its config is known."""
    return [*model_conflicts(recipe, config, shape), *router_conflicts(recipe, config)]


def recipe_conflicts(recipe: Recipe, world_size: int | None = None) -> list[Refusal]:
    """Every conflict between fields; with `world_size` also what does not fit that many ranks."""
    if impossible := [*_impossible_names(recipe)]:
        return impossible
    model = _read_model(recipe)
    config = model.config and with_overrides(model.config, recipe.model.overrides)
    of_model = [*model_conflicts(recipe, config, model.shape)]
    return [
        # How many ranks to launch for tp and pp does not help where the model does not allow them.
        *setting_conflicts(recipe, None if of_model else world_size),
        *of_model,
        *_precision(recipe),
        *_without_effect(recipe),
        *_schedule(recipe),
        *_profile(recipe),
        *_places(recipe),
        *_validation_and_rollback(recipe),
        *_repeated(recipe),
        *mixture_conflicts(recipe),
        *of_each_text(recipe, _fine_tuning),
        *of_all_texts(recipe, _document_ends),
        *trained_parameter_conflicts(recipe),
        *router_conflicts(recipe, config),
        *_tokenizer(recipe),
        *of_each_text(recipe, _markov),
        *_model(recipe, model),
        *objective_conflicts(recipe, config),
        *_weights(recipe),
        *distill_conflicts(recipe),
        *_loss(recipe, (model.config or {}).get("model_type")),
        *islice(unknown_overrides(model.config or {}, recipe.model.overrides), _MOST_OVERRIDES),
        *_shape(recipe, model.shape),
    ]


def _places(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse a model or a run_dir that is a URL, and a checkpoint.url that is none."""
    name = recipe.model.name_or_path
    if is_url(name):
        yield Refusal.of(
            _MODEL, name, "models are read from directories", f"run dstk export {name} -o DIR, and name that"
        )
    if recipe.run_dir is not None and is_url(recipe.run_dir):
        reason = "a run appends to its files, which takes a file system"
        yield Refusal.of("run_dir", recipe.run_dir, reason, ("checkpoint.url", recipe.run_dir), "name a directory")
    url = recipe.checkpoint.url
    if url is not None and not is_url(url):
        yield Refusal.of("checkpoint.url", url, "it is no URL, such as s3://bucket/run", "give one", ("run_dir", url))


def _impossible_names(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse names that no file can have, before anything looks for a file."""
    fields = {
        field: recipe.value_of(field) for field in (_MODEL, _TOKENIZER, "data.source", "data.cache_dir", *_DIRECTORIES)
    }
    for kind, texts in (("sources", recipe.data.sources), ("validation", recipe.data.validation)):
        fields |= {f"data.{kind}[{index}].path": text.path for index, text in enumerate(texts or ())}
        fields |= {f"data.{kind}[{index}].name": text.name for index, text in enumerate(texts or ())}
    for field, value in fields.items():
        name = value or ""
        path = os.path.expanduser(name)
        reason = ""
        try:
            os.lstat(path)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else ""
        if not name.isprintable():
            reason = "a name is one line of printable text"
        elif path.startswith("~"):
            reason = "there is no such user"
        if reason:
            yield Refusal.of(field, name, reason, "write another name")
        elif field in _MADE and _VARIABLE.search(name):
            reason = "variables of the environment are not replaced here, and a directory of this name would be made"
            yield Refusal.of(field, name, reason, "let the shell replace it, or write the path")


def _precision(recipe: Recipe) -> Iterator[Refusal]:
    choices = _PRECISIONS[recipe.train.engine]
    if recipe.precision not in choices:
        reason = f"this engine allows {' or '.join(choices)}"
        remedy = (("precision", choices[-1]), ("train.engine", "deepspeed"))
        yield recipe.conflict("precision", "train.engine", reason=reason, remedy=remedy)


def _schedule(recipe: Recipe) -> Iterator[Refusal]:
    section = recipe.schedule
    steps = recipe.train.steps
    used = _SCHEDULE_FIELDS.get(section.name, ("warmup_steps",))
    decay = 0
    if "decay_steps" in used:
        decay = max(1, steps // 10) if section.decay_steps is None else section.decay_steps
    least = section.warmup_steps + decay
    if "warmup_steps" in used and least > steps:
        settings = [("schedule.warmup_steps", section.warmup_steps)]
        if decay:
            settings.append(("schedule.decay_steps", decay))
        settings.append(("train.steps", steps))
        yield Refusal(
            field="schedule.warmup_steps" if section.decay_steps is None else "schedule.decay_steps",
            settings=tuple(settings),
            reason="the schedule is longer than the run",
            remedy=("lower schedule.warmup_steps", ("train.steps", f"{least} or more")),
        )


def _profile(recipe: Recipe) -> Iterator[Refusal]:
    section = recipe.train.profile
    steps = recipe.train.steps
    if section is not None and (last := section.start + section.steps - 1) > steps:
        settings = (
            ("train.profile.start", section.start),
            ("train.profile.steps", section.steps),
            ("train.steps", steps),
        )
        remedy = ("lower train.profile.start", ("train.steps", f"{last} or more"))
        reason = f"the run ends before step {last}"
        yield Refusal(field="train.profile.start", settings=settings, reason=reason, remedy=remedy)


def _validation_and_rollback(recipe: Recipe) -> Iterator[Refusal]:
    if recipe.train.eval_every and not recipe.data.eval_fraction and not recipe.data.validation:
        fields = ("train.eval_every", "data.eval_fraction")
        reason = "no text is held out for the validation"
        yield recipe.conflict(*fields, reason=reason, remedy=((fields[1], 0.01), (fields[0], 0)))
    if recipe.checkpoint.every:
        return
    for field, refused, off in (
        ("train.on_nonfinite", recipe.train.on_nonfinite == "rollback", "stop or skip"),
        ("train.spike_sigmas", recipe.train.spike_sigmas > 0, 0),
    ):
        if refused:
            reason = "there is no checkpoint to roll back to"
            remedy = (("checkpoint.every", "1 or more"), (field, off))
            yield recipe.conflict(field, "checkpoint.every", reason=reason, remedy=remedy)


def _repeated(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse to repeat micro-batches where an engine cannot compute one without a step, or a loss is one of many."""
    if not recipe.train.repeat_check:
        return
    reason = "replicas do not compute the same micro-batch in this version"
    remedy: Setting = ("train.repeat_check", 0)
    for axis in ("pp", "cp", "ulysses"):
        if getattr(recipe.parallel, axis) > 1:
            yield recipe.conflict(
                f"parallel.{axis}", remedy[0], reason=reason, remedy=(remedy, (f"parallel.{axis}", 1))
            )
    if recipe.parallel.zero_stage == 3:
        reason_of_stage = "DeepSpeed does not release the weights that it gathers in a backward pass of no step"
        yield recipe.conflict(
            "parallel.zero_stage", remedy[0], reason=reason_of_stage, remedy=(remedy, ("parallel.zero_stage", 2))
        )
    if recipe.train.engine == "fsdp":
        yield recipe.conflict("train.engine", remedy[0], reason=reason, remedy=(remedy, ("train.engine", "deepspeed")))
    if recipe.data.format in PREFERENCE_FORMATS:
        yield recipe.conflict("data.format", remedy[0], reason=reason, remedy=(remedy,))
    if recipe.train.distill is not None:
        yield recipe.conflict("train.distill.teacher", remedy[0], reason=reason, remedy=(remedy,))


def _fine_tuning(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse sources and tokenizers that cannot hold the rows of chats, prompts or ids."""
    is_megatron = megatron_prefix(recipe.data.source) is not None
    if is_megatron and recipe.data.tokenizer.startswith("bpe-"):
        made: Setting = (_TOKENIZER, "the directory or hub name of the tokenizer that made them")
        reason = "the ids of a dataset of Megatron-LM are those of another tokenizer"
        yield recipe.conflict(_TOKENIZER, "data.source", reason=reason, remedy=(made,))
    if recipe.data.format == "text" or (is_megatron and recipe.data.format == "pretokenized"):
        return
    if "text_field" in ignored_by_source(recipe.data.source):
        holds = "ids" if is_megatron else "texts"
        reason = f"it holds {holds}, and this format needs rows with fields"
        remedy = (("data.source", "JSONL, Parquet or a dataset"), ("data.format", "text"))
        yield recipe.conflict("data.source", "data.format", reason=reason, remedy=remedy)
    if re.fullmatch(r"bpe-\d+", recipe.data.tokenizer) and recipe.data.format in ("chat", "pretokenized"):
        reason = "a BPE trained here has no chat template, and no tokens that end a turn"
        if recipe.data.format == "pretokenized":
            reason = "the ids are those of another tokenizer"
        remedy = ((_TOKENIZER, "the directory or hub name of the model's tokenizer"), ("data.format", "text"))
        yield recipe.conflict(_TOKENIZER, "data.format", reason=reason, remedy=remedy)


def _weights(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse weights of rows where there are no rows, or a mixture of several texts."""
    data = recipe.data
    if data.weight_field is None:
        return
    field = "data.weight_field"
    if data.sources is not None:
        settings: tuple[Setting, ...] = ((field, data.weight_field), ("data.sources", "[…]"))
        yield Refusal.between(settings, "rows of a mixture have no weights", ("data.source", "one text"))
    elif data.format == "pretokenized":
        reason = "rows of ids have no weights"
        yield recipe.conflict(field, "data.format", reason=reason, remedy=((field, None),))
    elif "text_field" in ignored_by_source(data.source):
        reason = "it has no rows with fields"
        remedy: tuple[Setting | str, ...] = (("data.source", "JSONL, Parquet or a dataset"), (field, None))
        yield recipe.conflict(field, "data.source", reason=reason, remedy=remedy)


def _document_ends(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse tokens before and after a text where there is no text, or where its entropy rate is to be known."""
    data = recipe.data
    for field, default in (("bos", "auto"), ("separator", "eos")):
        if getattr(data, field) == default:
            continue
        names = (f"data.{field}", "data.source")
        if data.format in ("chat", "pretokenized"):
            theirs = "the chat template writes its own" if data.format == "chat" else "ids are taken as they are"
            yield recipe.conflict(names[0], "data.format", reason=theirs, remedy=("remove it",))
        elif megatron_prefix(data.source) is not None:
            yield recipe.conflict(*names, reason="its ids are taken as they are", remedy=("remove it",))
        elif data.source == "markov" and (field, data.bos) != ("bos", "never"):
            reason = "its entropy rate is that of letters with one end-of-text token after each document"
            yield recipe.conflict(*names, reason=reason, remedy=("remove it",))


def _markov(recipe: Recipe) -> Iterator[Refusal]:
    name = recipe.data.tokenizer
    if recipe.data.source == "markov" and re.fullmatch(r"bpe-\d+", name) and name != _BYTES:
        # The entropy rate of a Markov chain is known for its letters, not for what a BPE would merge them into.
        reason = "a token must be one letter, or the entropy rate of the tokens is not known"
        yield recipe.conflict(_TOKENIZER, "data.source", reason=reason, remedy=((_TOKENIZER, _BYTES),))


def _tokenizer(recipe: Recipe) -> Iterator[Refusal]:
    name = recipe.data.tokenizer
    model_name = recipe.model.name_or_path
    if recipe.model.init == "pretrained" and name.startswith("bpe-"):
        reason = "the weights were trained with the ids of another tokenizer"
        remedy = ((_TOKENIZER, f"that of the model, for instance {model_name}"),)
        yield recipe.conflict(_TOKENIZER, "model.init", reason=reason, remedy=remedy)


class _Model(NamedTuple):
    """Facts of the recipe's model that are known without a network."""

    config: dict[str, Any] | None = None
    shape: ModelShape | None = None
    """Shape of the model; None also for families that are not read."""
    trouble: Refusal | None = None


def _read_model(recipe: Recipe) -> _Model:
    try:
        config = find_config(recipe.model.name_or_path)
    except ToolkitError as error:
        return _Model(trouble=error.as_refusal(_MODEL))
    if config is None or config.get("model_type") not in families():
        return _Model(config)
    try:
        return _Model(config, ModelShape.from_config(with_overrides(config, recipe.model.overrides)))
    except ToolkitError as error:
        return _Model(config, trouble=error.as_refusal("model.overrides"))


def _model(recipe: Recipe, model: _Model) -> Iterator[Refusal]:
    """Refuse a model that does not exist, or has no weights."""
    name = recipe.model.name_or_path
    if model.trouble is not None:
        yield model.trouble
    elif model.config is None and "/" not in name:
        reason = "neither a known shape nor a directory, and hub names have the form org/name"
        hint = nearest_names(name).strip()
        yield recipe.conflict(_MODEL, reason=reason, remedy=(hint,) if hint else ())
    family = (model.config or {}).get("model_type")
    kernels = [{"flash": "flash_attention_2"}.get(kind, kind) for kind in attention_kinds(family)]
    if recipe.model.attention not in (None, "blocks", *kernels):
        field = "model.attn_implementation"
        reason = f"transformers has {' and '.join(kernels)} only for {family}"
        yield recipe.conflict(field, _MODEL, reason=reason, remedy=((field, " or ".join(kernels)),))
    entry = find_name(name)
    if entry is not None and "/" not in name and recipe.model.init == "pretrained":
        hub = hub_spelling(entry)
        remedy = (f"name a directory or a hub name{f' such as {hub}' if hub else ''}", ("model.init", "random"))
        yield recipe.conflict("model.init", _MODEL, reason="a shape has no weights", remedy=remedy, field=_MODEL)


def _loss(recipe: Recipe, family: object) -> Iterator[Refusal]:
    """Refuse a loss in chunks where it is not exact; a model that is not known yet is checked when it is built."""
    obstacle = unchunked(recipe.train.engine, recipe.precision, family) if recipe.model.loss == "chunked" else None
    if obstacle is not None and (family is not None or obstacle[0] != _MODEL):
        yield recipe.conflict("model.loss", obstacle[0], reason=obstacle[1], remedy=(("model.loss", "auto"),))


def _shape(recipe: Recipe, shape: ModelShape | None) -> Iterator[Refusal]:
    """Check the model's vocabulary and positions against the tokenizer and the samples."""
    if shape is None:
        return
    entries = re.fullmatch(r"bpe-([0-9]{1,9})", recipe.data.tokenizer)
    if entries is not None and int(entries[1]) > shape.vocab:
        smaller: Setting = (_TOKENIZER, f"bpe-{shape.vocab} or less")
        reason = f"the model has a vocabulary of {shape.vocab}"
        remedy = (smaller, ("model.overrides.vocab_size", entries[1]))
        yield recipe.conflict(_TOKENIZER, _MODEL, reason=reason, remedy=remedy)
    if shape.positions is not None and recipe.data.seq_len > shape.positions:
        # A table of positions ends; rotary and ALiBi positions do not, and there the config's number is the user's.
        remedies: list[Setting] = [("data.seq_len", f"{shape.positions} or less")]
        if not shape.learned_positions:
            remedies.append(("model.overrides.max_position_embeddings", recipe.data.seq_len))
        reason = f"the model has {shape.positions} positions"
        yield recipe.conflict("data.seq_len", _MODEL, reason=reason, remedy=tuple(remedies))


def _without_effect(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse every field that is set and does nothing."""

    def unused(field: str, *because: str, remedy: Setting | str) -> Iterator[Refusal]:
        section, _, name = field.partition(".")
        default = type(getattr(recipe, section)).model_fields[name].default
        if recipe.value_of(field) != default:
            reason = f"{name} has no effect"
            yield recipe.conflict(field, *because, reason=reason, remedy=("remove it", remedy))

    for section, table in (("optimizer", _OPTIMIZER_FIELDS), ("schedule", _SCHEDULE_FIELDS)):
        choice = recipe.value_of(f"{section}.name")
        for field in dict.fromkeys(chain(*table.values())):
            if field not in table.get(choice, ("warmup_steps",)):
                users = [name for name, used in table.items() if field in used]
                users = ["constant_with_warmup"] if field == "warmup_steps" else users
                chosen = f"{section}.name"
                yield from unused(f"{section}.{field}", chosen, remedy=(chosen, " or ".join(users)))
    yield from idle_data_fields(recipe, _idle)
    for field, switch in _SWITCHES.items():
        if not recipe.value_of(switch):
            yield from unused(field, switch, remedy=(switch, "1 or more"))
    train = recipe.train
    if train.on_nonfinite == "stop" and not (train.spike_sigmas or train.replica_check or train.repeat_check):
        because = ("train.on_nonfinite", "train.spike_sigmas")
        yield from unused("train.max_incidents", *because, remedy=("train.on_nonfinite", "skip or rollback"))


def _idle(data: DataSection) -> Iterator[tuple[str, Setting, Setting | str]]:
    """The fields of `data` that do nothing for a text, each with why, and a remedy."""
    source = ("data.source", data.source)
    ignored = ignored_by_source(data.source)
    for field in ignored:
        yield field, source, _RECORDS_NEEDED[field]
    if data.packing == "padded":
        yield "document_masking", ("data.packing", data.packing), ("data.packing", "packed")
    if data.format == "text":
        others = "chat, prompt_completion, pretokenized, preference or unpaired"
        yield "overlong", ("data.format", data.format), ("data.format", others)
    if data.format != "chat":
        yield "train_on", ("data.format", data.format), ("data.format", "chat")
    if data.format not in CONVERSATIONS:
        yield "dropped_text", ("data.format", data.format), ("data.format", "chat, preference or unpaired")
    if data.format != "text" and "text_field" not in ignored:
        yield "text_field", ("data.format", data.format), ("data.format", "text")


def ignored_by_source(source: str) -> tuple[str, ...]:
    """The fields of `data` that have no meaning for a source, as far as the file system tells."""
    path = os.path.expanduser(source)
    if source in ("stdlib", "markov") or megatron_prefix(source) is not None:
        return ("subset", "split", "stream_rows", "text_field")
    if os.path.isdir(path):
        has_splits = os.path.isfile(os.path.join(path, "dataset_dict.json"))
        return ("subset", "stream_rows") if has_splits else ("subset", "split", "stream_rows")
    is_file = os.path.exists(path)
    if not is_file and not glob.has_magic(source):
        return ()
    suffix = os.path.splitext(source.lower().removesuffix(".gz").removesuffix(".zst"))[1]
    has_fields = suffix in (*JSON_SUFFIXES, *PARQUET_SUFFIXES)
    is_text = not has_fields and (is_file or (suffix != "" and not glob.has_magic(suffix)))
    return ("subset", "split", "stream_rows", "text_field") if is_text else ("subset", "split", "stream_rows")
