"""The model, the text and the adapters of a run, under the names of run_clm.py and TRL."""

from pathlib import Path

from toolkit.convert.setups.argument_reader import ArgumentReader
from toolkit.convert.setups.trainer_setup import SetUp
from toolkit.files import read_json_object


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


def take_adapters(reader: ArgumentReader, setup: SetUp, rank_name: str, *, all_linear: bool) -> None:
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
    bits = reader.take("quantization_bit")
    if reader.flag("load_in_4bit") or bits == 4:
        fields["model.load_in_4bit"] = True
    elif bits is not None:
        reason = "the frozen weights of a recipe's adapters have 16 bits, or 4"
        raise reader.refused("quantization_bit", bits, reason, "Choose 4, or remove it")
