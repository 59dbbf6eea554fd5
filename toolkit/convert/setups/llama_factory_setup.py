"""The YAML of LLaMA-Factory: its text, its objective and its adapters.

Source of the arguments and their defaults, which are else the Trainer's: hparams/ of LLaMA-Factory.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.config.objective_section import OBJECTIVE_FIELDS, ObjectiveName
from toolkit.convert.setups.argument_reader import ArgumentReader
from toolkit.convert.setups.model_and_data import check_text, take_adapters
from toolkit.convert.setups.trainer_setup import SetUp

_STAGES = {"pt": "text", "sft": "chat", "dpo": "preference", "kto": "unpaired"}


_LOSSES: dict[str, ObjectiveName] = {
    "sigmoid": "dpo",
    "hinge": "hinge",
    "ipo": "ipo",
    "orpo": "orpo",
    "simpo": "simpo",
}
"""Objectives by what LLaMA-Factory's pref_loss names them."""
_OTHER_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")


def llama_factory_arguments(yaml: Mapping[str, Any]) -> dict[str, Any]:
    """The TrainingArguments that LLaMA-Factory makes of its YAML."""
    arguments = dict(yaml)
    if arguments.get("pure_bf16") is True:
        arguments["bf16"] = True
    return arguments


def take_llama_factory(reader: ArgumentReader, setup: SetUp, names: frozenset[str]) -> None:
    """Add the text, the objective and the adapters of LLaMA-Factory's YAML."""
    fields = setup.fields
    for name in _OTHER_OPTIMIZERS:
        if reader.flag(name):
            advice = "Choose one with optim: adamw_torch, adamw_bnb_8bit, sgd, lion_32bit or muon"
            raise reader.refused(name, True, "this optimizer is not one of a recipe", advice)
    stage = reader.text("stage") or "sft"
    if stage not in _STAGES:
        raise reader.refused("stage", stage, f"a recipe trains {', '.join(_STAGES)}", "Choose one of them")
    fields["data.format"] = _STAGES[stage]
    _objective(reader, fields, stage)
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
    if held_out >= 1:
        setup.notes.append(f"val_size={held_out:g} has no counterpart: data.eval_fraction is a share of the text")
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


def _objective(reader: ArgumentReader, fields: dict[str, Any], stage: str) -> None:
    """Add the objective of pairs or of labeled completions, with the options that it has in LLaMA-Factory."""
    loss = reader.text("pref_loss") or "sigmoid"
    beta = reader.number("pref_beta", 0.1)
    if stage not in ("dpo", "kto"):
        return
    if stage == "dpo" and loss not in _LOSSES:
        raise reader.refused("pref_loss", loss, f"a recipe has {', '.join(_LOSSES)}", "Choose one of them")
    objective = _LOSSES[loss] if stage == "dpo" else "kto"
    fields["train.objective.name"] = objective
    fields["train.objective.beta"] = beta
    smoothing = reader.number("dpo_label_smoothing", 0.0)
    if smoothing and objective != "dpo":
        reason = "LLaMA-Factory has it for stage dpo with pref_loss sigmoid alone"
        raise reader.refused("dpo_label_smoothing", smoothing, reason, "Remove it, or choose that loss")
    token_loss = reader.number("pref_ftx", 0.0)
    if token_loss and "nll_weight" not in OBJECTIVE_FIELDS[objective]:
        reason = f"a recipe has no token loss beside {objective} (train.objective.nll_weight is of simpo and cpo)"
        raise reader.refused("pref_ftx", token_loss, reason, "Remove it, or choose pref_loss simpo")
    options = {
        "label_smoothing": smoothing,
        "nll_weight": token_loss,
        "gamma": reader.number("simpo_gamma", 0.5),
        "desirable_weight": reader.number("kto_chosen_weight", 1.0),
        "undesirable_weight": reader.number("kto_rejected_weight", 1.0),
    }
    fields.update({f"train.objective.{name}": options[name] for name in OBJECTIVE_FIELDS[objective] if name in options})
