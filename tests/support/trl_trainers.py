"""The first step of TRL's own trainers: its loss, gradients and metrics of one batch that has all rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from small_preferences import make_completions, make_pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.config.objective_section import UNPAIRED
from toolkit.config.recipe import Recipe
from toolkit.parallel.loss import IGNORE

ROWS = 8
TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML without a newline after a turn: TRL trains on it, and the toolkit on what ends the turn."""


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """What a trainer computes of its first batch."""

    loss: float
    gradients: dict[str, np.ndarray]
    metrics: dict[str, float]


def rows_of(objective: str, kind: str) -> list[dict[str, Any]]:
    """Return rows of unequal lengths, all `texts` or all `chats`; some of the chats have several turns."""
    is_unpaired = objective in UNPAIRED
    if kind == "texts":
        rows = make_completions() if is_unpaired else make_pairs()
        column = "completion" if is_unpaired else "chosen"
        return [row for row in rows if "prompt" in row and isinstance(row[column], str)][:ROWS]
    chats = [row for row in make_pairs() if isinstance(row.get("prompt"), list)][:ROWS]
    assert len({len(row["prompt"]) for row in chats}) > 1
    if not is_unpaired:
        return chats
    labels = [number % 3 == 0 for number in range(ROWS)]
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label}
        for row, label in zip(chats, labels, strict=True)
    ]


def first_step(recipe: Recipe, rows: list[dict[str, Any]], folder: Path) -> FirstStep:
    """Compute it with the trainer of the recipe's objective."""
    trainer = make_trainer(recipe, rows, folder)
    trainer.model.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, inputs)
    if recipe.train.objective.name == "orpo":
        loss = loss + _loss_without_prompts(trainer.model, inputs)
    loss.backward()
    stored = trainer._metrics if hasattr(trainer, "_metrics") else trainer._stored_metrics
    metrics = {name: values[0] for name, values in stored["train"].items()}
    if "rewards/margins" not in metrics:  # of KTO, TRL computes it where it logs
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return FirstStep(
        loss=float(loss),
        gradients={name: parameter.grad.numpy() for name, parameter in trainer.model.named_parameters()},
        metrics=metrics,
    )


def _loss_without_prompts(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What must be added to TRL's token loss of ORPO, that of prompts and completions, to get that of completions."""
    ids = inputs["chosen_input_ids"]
    mask = inputs["chosen_attention_mask"]
    logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1].flatten(0, 1)
    every = ids.masked_fill(mask == 0, IGNORE)[:, 1:].flatten()
    of_completions = inputs["chosen_labels"][:, 1:].flatten()
    difference: torch.Tensor = F.cross_entropy(logits, of_completions) - F.cross_entropy(logits, every)
    return difference


def make_trainer(recipe: Recipe, rows: list[dict[str, Any]], folder: Path) -> Any:
    """TRL's trainer of the same models and objective, whose batches have all `rows`."""
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    section = recipe.train.objective
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "beta": section.beta,
        "per_device_train_batch_size": len(rows),
        "max_length": None,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
    }
    reference: dict[str, Any] = {}
    if section.needs_reference:
        reference["ref_model"] = AutoModelForCausalLM.from_pretrained(section.reference)
    else:
        arguments |= {"max_length": 4096, "max_completion_length": 4096}
    match section.name:
        case "kto":
            trainer = KTOTrainer
            config = KTOConfig(
                desirable_weight=section.desirable_weight, undesirable_weight=section.undesirable_weight, **arguments
            )
        case "orpo":
            trainer = ORPOTrainer
            config = ORPOConfig(**arguments)
        case "cpo" | "simpo":
            trainer = CPOTrainer
            config = CPOConfig(
                loss_type="simpo" if section.name == "simpo" else "sigmoid",
                cpo_alpha=section.chosen_nll_weight,
                simpo_gamma=section.gamma,
                label_smoothing=section.label_smoothing,
                **arguments,
            )
        case name:
            trainer = DPOTrainer
            losses = {name if name != "dpo" else "sigmoid": 1.0}
            if name == "dpo" and section.label_smoothing:
                # TRL smooths labels in its robust loss alone: ((1 - e) s - e r) / (1 - 2e), of -log sigmoid of the
                # margin, s, and of its opposite, r. Conservative DPO, (1 - e) s + e r, is a sum of it and s.
                losses = {"sigmoid": 2 * (1 - section.label_smoothing), "robust": 2 * section.label_smoothing - 1}
            config = DPOConfig(
                loss_type=list(losses),
                loss_weights=list(losses.values()),
                label_smoothing=section.label_smoothing,
                **arguments,
            )
    tokenizer = AutoTokenizer.from_pretrained(recipe.data.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.bos_token = None  # which ORPO and CPO put in front of a prompt, and DPO and KTO do not
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(recipe.model.name_or_path),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **reference,
    )
