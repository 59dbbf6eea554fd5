"""The YAML of LLaMA-Factory: its text, its objective and its adapters."""

from toolkit.convert.setups.argument_reader import ArgumentReader
from toolkit.convert.setups.model_and_data import check_text, take_adapters
from toolkit.convert.setups.trainer_setup import SetUp

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
        take_adapters(reader, setup, "lora_rank", all_linear=False)
    elif tuning != "full":
        raise reader.refused("finetuning_type", tuning, "a recipe trains full or lora", "Choose one of them")
