"""The model, the text and the adapters of a run, under the names of run_clm.py, TRL, axolotl and LLaMA-Factory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.convert.setups.argument_reader import ArgumentReader
from toolkit.convert.setups.trainer_setup import SetUp
from toolkit.files import read_json_object

_CHAT_TYPES = ("chat_template", "sharegpt", "chat_template.default")


def take_model(reader: ArgumentReader, setup: SetUp, model: str | None) -> None:
    """Add the model, its tokenizer and its weights."""
    named = reader.text("model_name_or_path", "base_model")
    tokenizer = reader.text("tokenizer_name", "tokenizer_config")
    name = model or named
    if name is None:
        setup.missing.append("--model DIR, the directory of the model, as the arguments do not name it")
        return
    setup.fields["model.name_or_path"] = name
    setup.fields["model.init"] = "pretrained"
    setup.fields["data.tokenizer"] = tokenizer or name
    try:
        config = read_json_object(Path(name) / "config.json", follow=True)
    except (OSError, ValueError):
        return  # a name of the hub, or what the check of the recipe refuses
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored in ("bfloat16", "float16") and setup.program == "the Trainer":
        setup.notes.append(
            f"the weights are stored in {stored}, and transformers 5 trains them so unless dtype says otherwise; a "
            "recipe trains fp32 weights"
        )


def take_text(reader: ArgumentReader, setup: SetUp, names: frozenset[str]) -> None:
    """Add the text and how it becomes samples, by the names of run_clm.py and TRL. `names`: fields of the user."""
    fields = setup.fields
    source = reader.text("train_file", "dataset_name")
    if subset := reader.text("dataset_config_name", "dataset_config"):
        fields["data.subset"] = subset
    if source is not None:
        fields["data.source"] = source
    if validation := reader.text("validation_file"):
        fields["data.validation"] = [{"path": validation}]
    if column := reader.text("dataset_text_field", "text_column"):
        fields["data.text_field"] = column
    length = reader.take("block_size", "max_length", "max_seq_length")
    if length is not None:
        fields["data.seq_len"] = length
    packs = reader.take("packing")
    if packs is False and "data.packing" not in fields:
        fields["data.packing"] = "padded"
    check_text(setup, names)


def check_text(setup: SetUp, names: frozenset[str]) -> None:
    """Note what is missing of the text."""
    if not {"data.source", "data.sources"} & (names | setup.fields.keys()):
        setup.missing.append("data.source=PATH, its text, as the arguments do not name it")
    if "data.seq_len" not in names | setup.fields.keys():
        setup.missing.append("data.seq_len=N, the tokens of a sample")


def take_axolotl(reader: ArgumentReader, setup: SetUp, names: frozenset[str]) -> None:
    """Add the text and the adapters of axolotl's YAML."""
    fields = setup.fields
    fields["data.seq_len"] = reader.count("sequence_len", 512)
    packs = reader.flag("sample_packing")
    reader.take("pad_to_sequence_len", "eval_sample_packing")
    fields["data.packing"] = "packed" if packs else "padded"
    held_out = reader.number("val_set_size", 0.0)
    fields["data.eval_fraction"] = held_out if held_out < 1 else 0.0
    if held_out >= 1:
        setup.notes.append(f"val_set_size={held_out:g} has no counterpart: data.eval_fraction is a share of the text")
    trains_on_all = reader.flag("train_on_inputs")
    datasets = reader.take("datasets")
    rows = [row for row in datasets if isinstance(row, Mapping)] if isinstance(datasets, list) else []
    if {"data.source", "data.sources"} & names:
        rows = []
    if len(rows) > 1:
        setup.missing.append(f"data.sources=[...], the shares of its {len(rows)} datasets, which axolotl concatenates")
    elif rows:
        _axolotl_text(rows[0], setup, trains_on_all=trains_on_all)
    if packs and fields.get("data.format", "text") == "text":
        fields["data.document_masking"] = True
    if reader.text("adapter"):
        _adapters(reader, setup, "lora_r", all_linear=reader.flag("lora_target_linear"))
    if len(rows) < 2:
        check_text(setup, names)


def _axolotl_text(row: Mapping[str, Any], setup: SetUp, *, trains_on_all: bool) -> None:
    fields = setup.fields
    fields["data.source"] = row.get("path")
    if isinstance(row.get("name"), str):
        fields["data.subset"] = row["name"]
    if isinstance(row.get("split"), str):
        fields["data.split"] = row["split"]
    kind = row.get("type")
    if kind in _CHAT_TYPES:
        fields["data.format"] = "chat"
        roles = row.get("roles_to_train")
        fields["data.train_on"] = "all" if trains_on_all or roles == [] else "assistant"
    elif kind in (None, "completion", "pretrain"):
        if isinstance(row.get("field"), str):
            fields["data.text_field"] = row["field"]
    else:
        setup.notes.append(
            f"datasets type {kind} has no counterpart: make rows of messages, or of prompt and completion"
        )


_STAGES = {"pt": "text", "sft": "chat", "dpo": "preference", "kto": "unpaired"}


def take_llama_factory(reader: ArgumentReader, setup: SetUp, names: frozenset[str]) -> None:
    """Add the text, the objective and the adapters of LLaMA-Factory's YAML."""
    fields = setup.fields
    stage = reader.text("stage") or "sft"
    if stage not in _STAGES:
        raise reader.refused("stage", stage, f"a recipe trains {', '.join(_STAGES)}", "Choose one of them")
    fields["data.format"] = _STAGES[stage]
    loss = reader.text("pref_loss") or "sigmoid"
    beta = reader.number("pref_beta", 0.1)
    if stage in ("dpo", "kto"):
        objectives = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
        if stage == "dpo" and loss not in objectives:
            raise reader.refused("pref_loss", loss, f"a recipe has {', '.join(objectives)}", "Choose one of them")
        fields["train.objective.name"] = objectives[loss] if stage == "dpo" else "kto"
        fields["train.objective.beta"] = beta
    fields["data.seq_len"] = reader.count("cutoff_len", 2048)
    packs = reader.take("packing")
    neat = reader.flag("neat_packing")
    if stage in ("pt", "sft"):
        fields["data.packing"] = "packed" if packs or neat or (packs is None and stage == "pt") else "padded"
    if reader.flag("train_on_prompt"):
        fields["data.train_on"] = "all"
    elif reader.flag("mask_history"):
        fields["data.train_on"] = "last_assistant"
    held_out = reader.number("val_size", 0.0)
    fields["data.eval_fraction"] = held_out if held_out < 1 else 0.0
    reader.take("dataset_dir")
    dataset = reader.text("dataset")
    reader.take("eval_dataset")
    if dataset is not None and not {"data.source", "data.sources"} & names:
        setup.missing.append(f"data.source=PATH, the file that dataset_info.json has for dataset={dataset}")
    else:
        check_text(setup, names)
    tuning = reader.text("finetuning_type") or "lora"
    if tuning == "lora":
        _adapters(reader, setup, "lora_rank", all_linear=False)
    elif tuning != "full":
        raise reader.refused("finetuning_type", tuning, "a recipe trains full or lora", "Choose one of them")


def _adapters(reader: ArgumentReader, setup: SetUp, rank_name: str, *, all_linear: bool) -> None:
    """Adapters of LoRA. LLaMA-Factory's defaults: rank 8, alpha twice that, all linear layers."""
    fields = setup.fields
    is_factory = rank_name == "lora_rank"
    rank = reader.count(rank_name, 8)
    fields["model.lora.r"] = rank
    fields["model.lora.alpha"] = reader.count("lora_alpha", 2 * rank if is_factory else 16)
    fields["model.lora.dropout"] = reader.number("lora_dropout", 0.0)
    targets = reader.take("lora_target_modules", "lora_target")
    chosen = [name.strip() for name in targets.split(",")] if isinstance(targets, str) else targets
    if all_linear or chosen in (["all"], ["all-linear"]) or (is_factory and chosen is None):
        chosen = ["all-linear"]
    if chosen:
        fields["model.lora.targets"] = chosen
    fields["model.lora.rslora"] = reader.flag("peft_use_rslora", "use_rslora")
    fields["model.lora.dora"] = reader.flag("peft_use_dora", "use_dora")
    if reader.flag("load_in_4bit") or reader.take("quantization_bit") == 4:
        fields["model.load_in_4bit"] = True
