"""The YAML of axolotl: its names and defaults of TrainingArguments, its text, its objective and its adapters.

Source of the defaults: utils/schemas/training.py and config.py, and core/builders/base.py and rl.py of axolotl.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.config.objective_section import UNPAIRED, ObjectiveName
from toolkit.convert.setups.argument_reader import ArgumentReader
from toolkit.convert.setups.model_and_data import check_text, take_adapters
from toolkit.convert.setups.trainer_setup import SetUp
from toolkit.files import printable

_NAMES = {
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "use_reentrant": "gradient_checkpointing_kwargs",
}
"""axolotl's names of TrainingArguments, where they are others."""
_AXES = {
    "tp_size": ("tensor_parallel_size",),
    "cp_size": ("context_parallel_size", "sequence_parallel_degree"),
    "dp_shard_size": ("dp_shard_size",),
    "dp_replicate_size": ("dp_replicate_size",),
}
"""axolotl's names of the sizes in accelerate's ParallelismConfig."""
_DEFAULTS = {
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "save_total_limit": 4,
}
"""axolotl's defaults, where they are not those of TrainingArguments."""
_CHAT_TYPES = ("chat_template", "sharegpt", "chat_template.default")
_TEXT_TYPES = (None, "completion", "pretrain")
_PAIR_TYPES = ("chat_template", "chatml", "llama3", "zephyr", "user_defined", "passthrough")
"""What the types of datasets for preference tuning begin with."""
_OBJECTIVES: dict[str, ObjectiveName] = {"dpo": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
"""Objectives by what axolotl's rl names them."""
_OTHER_LOSSES = ("rpo_alpha", "dpo_loss_type", "dpo_loss_weights", "dpo_use_weighting", "dpo_norm_loss")
_READ_AS_THEY_ARE = {
    "field_messages": ("messages", "conversations"),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "train_on_eos": ("turn",),
    "chat_template": ("tokenizer_default",),
}
"""Keys of a dataset of messages, with the values that need no field: rows are read so anyway."""


def axolotl_arguments(yaml: Mapping[str, Any], steps: int | None) -> dict[str, Any]:
    """The TrainingArguments that axolotl makes of its YAML. `steps`: those of the user, which count more."""
    arguments = {_NAMES.get(name, name): value for name, value in yaml.items()}
    for name, value in _DEFAULTS.items():
        if arguments.get(name) is None:
            arguments[name] = value
    if not arguments.get("fp16"):
        arguments.setdefault("bf16", "auto")
    if arguments.get("bf16") == "full":
        arguments["bf16"] = True
        arguments["pure_bf16"] = True  # LLaMA-Factory's name of it, which has a note
    _saving(arguments)
    axes = {
        axis: next((arguments.pop(name) for name in names if arguments.get(name) is not None), None)
        for axis, names in _AXES.items()
    }
    if sizes := {axis: size for axis, size in axes.items() if size is not None}:
        arguments["parallelism_config"] = sizes
    if arguments.get("fsdp_config") and not arguments.get("fsdp"):
        arguments["fsdp"] = True
    if arguments.get("gradient_checkpointing") == "offload":
        arguments["gradient_checkpointing"] = True
        arguments.setdefault("activation_offloading", True)
    _cosine_with_a_minimum(arguments)
    limit = arguments.get("max_steps")
    length = steps or (limit if isinstance(limit, int) and limit > 0 else None)
    if length is not None:
        if arguments.get("warmup_steps") is None:
            arguments["warmup_steps"] = _warmup(arguments.pop("warmup_ratio", None), length)
        if arguments.get("logging_steps") is None:
            arguments["logging_steps"] = max(1, min(10, length // 200))
    return arguments


def _saving(arguments: dict[str, Any]) -> None:
    """axolotl saves by save_steps, save_strategy or after each epoch; saves_per_epoch has a note of its own."""
    if arguments.get("save_steps"):
        arguments["save_strategy"] = "steps"
    elif arguments.get("save_strategy") is None:
        arguments["save_strategy"] = "no" if arguments.get("saves_per_epoch") else "epoch"


def _cosine_with_a_minimum(arguments: dict[str, Any]) -> None:
    """axolotl's cosine that ends at a share of the peak is the Trainer's cosine_with_min_lr."""
    ratio = arguments.get("cosine_min_lr_ratio")
    if ratio and arguments["lr_scheduler_type"] == "cosine":
        del arguments["cosine_min_lr_ratio"]
        arguments["lr_scheduler_type"] = "cosine_with_min_lr"
        arguments["lr_scheduler_kwargs"] = {"min_lr_rate": ratio}


def _warmup(ratio: Any, steps: int) -> Any:
    """Steps of warm-up where the YAML does not say them: 3%, at most 100, and 2 in the place of 1."""
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float)):
        return ratio  # which is refused where the number is read
    warmup = min(int(0.03 * steps), 100) if ratio is None else int(ratio * steps)
    return 2 if warmup == 1 else warmup


def take_axolotl(reader: ArgumentReader, setup: SetUp, names: frozenset[str]) -> None:
    """Add the text and the adapters of axolotl's YAML. `names`: fields of the user."""
    fields = setup.fields
    reader.take("fsdp_version")
    offloading = reader.take("activation_offloading")
    if offloading in (True, "legacy"):
        fields["parallel.offload_activations"] = True
    elif offloading:
        setup.notes.append(f"activation_offloading={printable(str(offloading))} has no counterpart: give true")
    if constant := reader.number("cosine_constant_lr_ratio", 0.0):
        advice = "Remove it, or choose lr_scheduler: warmup_stable_decay"
        raise reader.refused("cosine_constant_lr_ratio", constant, "no schedule of a recipe is the same", advice)
    fields["data.seq_len"] = reader.count("sequence_len", 512)
    packs = reader.flag("sample_packing")
    reader.take("pad_to_sequence_len", "eval_sample_packing")
    objective = reader.take("rl")
    if objective:
        _objective(reader, setup, objective)
    else:
        fields["data.packing"] = "packed" if packs else "padded"
    held_out = reader.number("val_set_size", 0.0)
    fields["data.eval_fraction"] = held_out if held_out < 1 else 0.0
    if held_out >= 1:
        setup.notes.append(f"val_set_size={held_out:g} has no counterpart: data.eval_fraction is a share of the text")
    trains_on_all = reader.flag("train_on_inputs")
    datasets = reader.take("datasets")
    rows = [row for row in datasets if isinstance(row, Mapping)] if isinstance(datasets, list) else []
    has_source = bool({"data.source", "data.sources"} & names)
    if len(rows) > 1 and not has_source:
        setup.missing.append(f"data.sources=[...], the shares of its {len(rows)} datasets, which axolotl concatenates")
    elif len({str(row.get("type")) for row in rows}) > 1:
        if "data.format" not in names:
            setup.missing.append("data.format=FORMAT, that of your text, as its datasets have several types")
    elif rows:
        dataset = ArgumentReader(reader.file, rows[0])
        _place(dataset, fields, has_source=has_source)
        if objective:
            _pairs(dataset, setup, objective, is_given="data.format" in names)
        else:
            _format(dataset, setup, trains_on_all=trains_on_all)
        setup.notes += [f"datasets: {line}" for line in dataset.leftovers()]
    if packs and fields.get("data.format", "text") == "text":
        fields["data.document_masking"] = True
    if reader.text("adapter"):
        take_adapters(reader, setup, "lora_r", all_linear=reader.flag("lora_target_linear"))
    if len(rows) < 2 or has_source:
        check_text(setup, names)


def _place(dataset: ArgumentReader, fields: dict[str, Any], *, has_source: bool) -> None:
    """Set where the text is, unless the user says so."""
    place = {
        "data.source": dataset.text("path"),
        "data.subset": dataset.text("name"),
        "data.split": dataset.text("split"),
    }
    if not has_source:
        fields.update({name: value for name, value in place.items() if value is not None})


def _format(dataset: ArgumentReader, setup: SetUp, *, trains_on_all: bool) -> None:
    """What a row holds, and which of its tokens are trained on."""
    fields = setup.fields
    kind = dataset.take("type")
    if kind in _CHAT_TYPES:
        fields["data.format"] = "chat"
        fields["data.train_on"] = _trained_turns(dataset, trains_on_all=trains_on_all)
        _messages(dataset)
    elif kind in _TEXT_TYPES:
        if column := dataset.text("field"):
            fields["data.text_field"] = column
    else:
        fields["data.format"] = "prompt_completion"
        setup.notes.append(
            f"datasets: type={printable(str(kind))} has no counterpart: make rows of prompt and completion, which "
            "data.format says, or of messages, with data.format=chat"
        )
        if trains_on_all:
            setup.notes.append(
                "train_on_inputs=true has no counterpart: of a prompt and a completion, the completion is"
            )


def _objective(reader: ArgumentReader, setup: SetUp, rl: Any) -> None:
    """Add the objective of `rl`, with its options, and the format of rows that it compares."""
    fields = setup.fields
    name = _OBJECTIVES.get(str(rl))
    if name is None:
        raise reader.refused("rl", rl, f"a recipe has {', '.join(_OBJECTIVES)}", "Choose one of them")
    reader.take_if("dpo_loss_type", lambda value: value in ("sigmoid", ["sigmoid"]))
    for option in _OTHER_LOSSES:
        if value := reader.take(option):
            raise reader.refused(option, value, f"the {name} of a recipe has no such term", "Remove it")
    fields["data.format"] = "unpaired" if name in UNPAIRED else "preference"
    fields["train.objective.name"] = name
    nested = reader.mapping("trl")
    alpha = reader.number("orpo_alpha", 0.1)
    beta = reader.number("rl_beta", alpha)
    fields["train.objective.beta"] = beta if nested.get("beta") is None else nested["beta"]
    if others := [key for key, value in nested.items() if key != "beta" and value]:
        setup.notes.append(f"{printable(', '.join(others))} of trl have no counterpart: nothing of it is in the recipe")
    if name == "dpo":
        fields["train.objective.label_smoothing"] = reader.number("dpo_label_smoothing", 0.0)
    elif name == "simpo":
        fields["train.objective.gamma"] = reader.number("simpo_gamma", 0.5)
        fields["train.objective.nll_weight"] = reader.number("cpo_alpha", 1.0)
    elif name == "kto":
        fields["train.objective.desirable_weight"] = reader.number("kto_desirable_weight", 1.0)
        fields["train.objective.undesirable_weight"] = reader.number("kto_undesirable_weight", 1.0)


def _pairs(dataset: ArgumentReader, setup: SetUp, rl: Any, *, is_given: bool) -> None:
    """Note how rows of an objective are read. Raises RecipeError for a type whose rows have nothing to compare."""
    columns = "prompt, completion and label" if rl == "kto" else "prompt, chosen and rejected"
    kind = dataset.take("type")
    if isinstance(kind, str) and not kind.startswith(_PAIR_TYPES) and not is_given:
        reason = f"rl={rl} compares completions, and its rows have none to compare"
        advice = f"Give rows of {columns}, and data.format={setup.fields['data.format']}"
        raise dataset.refused("datasets type", kind, reason, advice)
    for name in ("field_messages", "field_chosen", "field_rejected"):
        dataset.take(name)
    if kind is not None:
        setup.notes.append(
            f"datasets: type={printable(str(kind))} has no counterpart: make rows of {columns}, texts or lists of "
            "messages, which the tokenizer's chat template renders"
        )


def _trained_turns(dataset: ArgumentReader, *, trains_on_all: bool) -> str:
    roles = dataset.take("roles_to_train")
    if roles is not None and not isinstance(roles, list):
        raise dataset.refused("roles_to_train", roles, "a list of roles is needed")
    if trains_on_all or roles == []:
        return "all"
    others = [role for role in roles or () if role not in ("assistant", "gpt")]
    if others:
        allowed = "a recipe trains on the assistant's turns, or with roles_to_train: [] on all"
        raise dataset.refused("roles_to_train", ", ".join(map(str, roles or ())), allowed, "Name one of these")
    return "assistant"


def _messages(dataset: ArgumentReader) -> None:
    """Take what rows of messages are read by anyway. What is another way is left, and so becomes a note."""
    for name, values in _READ_AS_THEY_ARE.items():
        dataset.take_if(name, values.__contains__)
    dataset.take_if("message_property_mappings", _is_read)


def _is_read(mappings: Any) -> bool:
    """Whether each property is that of a message, or that of ShareGPT."""
    columns = {"role": ("role", "from"), "content": ("content", "value")}
    return isinstance(mappings, Mapping) and all(
        source == name or source in columns.get(name, ()) for name, source in mappings.items()
    )
