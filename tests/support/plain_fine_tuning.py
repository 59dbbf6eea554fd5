"""The oracle of fine-tuning: Hugging Face's model, peft's adapters and a loop written by hand, in one process.

Only the samples come from the toolkit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from toolkit.config.job import Job
from toolkit.config.recipe import ParallelSection, Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.token_cache import prepare
from toolkit.model_init.adapters import Adapters
from toolkit.parity import ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8},
    "phi3": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64},
    "gpt_bigcode": {"n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt2": {"n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What the loop computed. Tensors have the names of the files that Hugging Face and peft write."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    trained: dict[str, np.ndarray]


def save_base(folder: Path, family: str, *, seed: int = 7, **changes: Any) -> Path:
    """A tiny model with random weights, as transformers saves it. Every weight and bias is far from zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": LAYERS, "vocab_size": 321, **SIZES[family], **changes}
    config = AutoConfig.for_model(family, bos_token_id=0, eos_token_id=0, pad_token_id=None, **sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return folder


def train_plainly(recipe: Recipe, initial: Mapping[str, np.ndarray] | None = None) -> Plain:
    """Train it. `initial`: the adapters to begin with."""
    from transformers import AutoModelForCausalLM, get_scheduler

    model: Any = AutoModelForCausalLM.from_pretrained(recipe.model.name_or_path, attn_implementation="sdpa")
    model = _partly_trained(model, recipe) if recipe.model.lora is None else _with_adapters(model, recipe, initial)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    section, steps = recipe.optimizer, recipe.train.steps
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[section.name]
    optimizer = kind([group for group in groups if group["params"]], lr=section.lr)
    schedule = get_scheduler(recipe.schedule.name, optimizer, recipe.schedule.warmup_steps, steps)
    losses, norms, gradients = [], [], {}
    model.train()
    for batches, targets in _batches(recipe):
        total = 0.0
        for batch in batches:
            logits = model(**batch.inputs(), use_cache=False).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum")
            (loss / targets).backward()
            total += loss.item()
        gradients = gradients or {_in_file(name): _array(p.grad) for name, p in named.items()}
        losses.append(total / targets)
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), recipe.train.grad_clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    trained = {_in_file(name): _array(parameter) for name, parameter in named.items()}
    return Plain(losses=losses, norms=norms, gradients=gradients, trained=trained)


def _partly_trained(model: Any, recipe: Recipe) -> Any:
    for name, parameter in model.named_parameters():
        if recipe.model.freeze:
            parameter.requires_grad_(not any(fnmatch(name, pattern) for pattern in recipe.model.freeze))
        else:
            parameter.requires_grad_(any(fnmatch(name, pattern) for pattern in recipe.model.train_only or ("*",)))
    return model


def _with_adapters(model: Any, recipe: Recipe, initial: Mapping[str, np.ndarray] | None) -> Any:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    section = recipe.model.lora
    assert section is not None
    assert initial is not None
    config = LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,
        target_modules="all-linear" if section.targets == ("all-linear",) else list(section.targets) or None,
        use_rslora=section.rslora,
        use_dora=section.dora,
        fan_in_fan_out=model.config.model_type == "gpt2",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config)
    own = {name: torch.from_numpy(np.array(value)) for name, value in initial.items() if "lora_" in name}
    report = set_peft_model_state_dict(model, own)
    assert not report.unexpected_keys
    assert not [name for name in report.missing_keys if "lora_" in name]
    return model


def _batches(recipe: Recipe) -> Iterable[tuple[Iterable[Any], int]]:
    plain = recipe.changed({"train": {"engine": "reference"}}).model_copy(update={"parallel": ParallelSection()})
    corpus = prepare(recipe.data, progress=False)
    loader = MicroBatchLoader.open(Job.of(plain, 1), corpus, rank=0)
    with loader.prefetch(0) as batches:
        for step in range(recipe.train.steps):
            yield loader.micro_batches(step, batches), loader.target_tokens(step)


def _in_file(name: str) -> str:
    return name.replace(".default.weight", "" if "magnitude" in name else ".weight")


def _array(tensor: Any) -> np.ndarray:
    value: np.ndarray = tensor.detach().numpy().copy()
    return value


def differences(run: ParityRun, plain: Plain) -> dict[str, float]:
    """The largest relative difference of losses and norms, and of gradients and trained weights over their norms."""
    assert run.first_gradients.keys() == plain.gradients.keys()

    def relative(one: Iterable[float], other: Iterable[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))

    def of_tensors(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
        norm = np.sqrt(sum(float((value.astype(float) ** 2).sum()) for value in expected.values()))
        return float(max(np.abs(found[name] - value).max() / norm for name, value in expected.items()))

    return {
        "loss": relative(run.curve.losses, plain.losses),
        "norm": relative(run.curve.grad_norms, plain.norms),
        "gradient": of_tensors(run.first_gradients, plain.gradients),
        "weights": of_tensors(run.parameters, plain.trained),
    }


def train_from_nonzero(recipe: Recipe, **options: Any) -> ParityRun:
    """Train on these ranks from adapters whose B is not zero, so that A has a gradient from the first step on."""
    Adapters._first_b = lambda self, *arguments: 0.05 * self._first_a(*arguments)  # type: ignore[method-assign]
    return train_in_memory(recipe, **options)
