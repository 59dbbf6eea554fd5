"""One process trains what Hugging Face's model trains with TRL's losses, autograd and a loop written by hand.

The loop reads each sequence by itself, without packing, masks or chunks, and runs the reference model in every step.
Only which pairs are in a step comes from the toolkit.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_fine_tuning import save_base
from small_preferences import make_completions, make_pairs, preference_data, write_rows
from trl_losses import trl_loss

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines.objectives.formulas import SequenceSums
from toolkit.parallel.loss import IGNORE
from toolkit.parity.run.train_in_memory import train_in_memory

LARGEST_DIFFERENCE = 1e-6
STEPS = 4
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"label_smoothing": 0.1},
    "robust": {"label_smoothing": 0.2},
    "hinge": {},
    "ipo": {},
    "orpo": {},
    "simpo": {"beta": 2.0, "nll_weight": 0.5},
    "cpo": {},
    "kto": {"desirable_weight": 1.3},
    "bco": {},
}


def make(folder: Path, make_recipe: Callable[..., Recipe], objective: str, **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "model": {"name_or_path": str(save_base(folder / "base", "llama")), "init": "pretrained"},
        "data": preference_data(folder, objective),
        "train__steps": STEPS,
        "train__engine": "reference",
        "train__objective": {"name": objective, **OBJECTIVES[objective]},
        "batch": {"global_batch_size": 4, "micro_batch_size": 2},
        "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
        "schedule": {"name": "constant"},
    }
    return make_recipe(**{**fields, **changes})


def sums_of(model: Any, batches: list[MicroBatch]) -> torch.Tensor:
    """The log-probabilities of both sequences of every piece, [n, 2]; each sequence goes through the model alone."""
    sums = []
    for batch in batches:
        assert batch.sequences is not None
        for number in range(2 * len(batch.sequences.pieces)):
            place = batch.sequences.numbers == number
            ids = batch.input_ids[place]
            labels = batch.labels[place]
            if not len(ids):
                sums.append(torch.zeros(()))
                continue
            logarithms = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float().log_softmax(dim=-1)
            counts = labels != IGNORE
            sums.append(logarithms[counts].gather(1, labels[counts].unsqueeze(1)).sum())
    return torch.stack(sums).view(-1, 2).double()


def train_plainly(recipe: Recipe) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Train it; return losses, gradient norms and weights."""
    from transformers import AutoModelForCausalLM

    section = recipe.train.objective
    model: Any = AutoModelForCausalLM.from_pretrained(recipe.model.name_or_path, attn_implementation="sdpa")
    reference = copy.deepcopy(model).eval()
    if section.reference != "initial":
        reference = AutoModelForCausalLM.from_pretrained(section.reference).eval()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": recipe.optimizer.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.optimizer.lr)
    loader = MicroBatchLoader.open(Job.of(recipe, 1), prepare(recipe.data, progress=False), rank=0)
    losses, norms = [], []
    rewards_so_far: list[float] = []
    with loader.prefetch(0) as ahead:
        for step in range(recipe.train.steps):
            batches = list(loader.micro_batches(step, ahead))
            parts = [batch.sequences for batch in batches if batch.sequences is not None]
            with torch.no_grad():
                ratios = sums_of(reference, batches)
            policy = sums_of(model, batches)
            tokens = torch.cat([part.tokens for part in parts]).double()
            shift = 0.0
            if section.name == "kto":
                shift = max(0.0, float((policy - ratios)[:, 1].mean()))
            if section.name == "bco":
                rewards_so_far += (section.beta * (policy - ratios)[:, 0]).tolist()
                shift = sum(rewards_so_far) / len(rewards_so_far)
            sums = SequenceSums(
                policy=policy,
                reference=ratios if section.needs_reference else torch.zeros_like(ratios),
                tokens=tokens.clamp(min=1.0),
                is_desirable=torch.cat([part.is_desirable for part in parts]),
                chosen_token_share=len(tokens) / float(tokens[:, 0].sum()),
                shift=shift,
            )
            loss = trl_loss(section, sums).mean()
            loss.backward()
            losses.append(float(loss))
            norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), recipe.train.grad_clip or math.inf)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, {name: parameter.detach().numpy() for name, parameter in named.items()}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_process_trains_what_a_loop_written_by_hand_does(
    tmp_path: Path, make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], objective: str
) -> None:
    recipe = make(tmp_path, make_recipe, objective)
    run = ranks(train_in_memory, 1, recipe)[0]
    losses, norms, weights = train_plainly(recipe)
    assert len(set(losses)) == STEPS
    assert run.curve.losses == pytest.approx(losses, rel=LARGEST_DIFFERENCE)
    assert run.curve.grad_norms == pytest.approx(norms, rel=LARGEST_DIFFERENCE)
    for name, value in run.parameters.items():
        difference = np.linalg.norm(np.asarray(value) - weights[name]) / np.linalg.norm(weights[name])
        assert difference < LARGEST_DIFFERENCE, name


def test_the_reference_of_a_checkpoint_is_that_model(
    tmp_path: Path, make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]]
) -> None:
    section = {"name": "dpo", "reference": str(save_base(tmp_path / "other", "llama", seed=8))}
    recipe = make(tmp_path, make_recipe, "dpo", train__objective=section)
    losses, norms, _ = train_plainly(recipe)
    run = ranks(train_in_memory, 1, recipe)[0]
    assert abs(losses[0] - math.log(2)) > 1e-3
    assert run.curve.losses == pytest.approx(losses, rel=LARGEST_DIFFERENCE)
    assert run.curve.grad_norms == pytest.approx(norms, rel=LARGEST_DIFFERENCE)


def test_samples_with_several_pairs_train_what_samples_of_one_do(
    tmp_path: Path, make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]]
) -> None:
    recipe = make(tmp_path, make_recipe, "dpo", data__packing="padded")
    losses, norms, _ = train_plainly(recipe)
    run = ranks(train_in_memory, 1, recipe)[0]
    assert run.curve.losses == pytest.approx(losses, rel=LARGEST_DIFFERENCE)
    assert run.curve.grad_norms == pytest.approx(norms, rel=LARGEST_DIFFERENCE)


@pytest.mark.parametrize("objective", ["dpo", "ipo", "hinge", "robust", "kto", "orpo", "simpo", "cpo"])
def test_the_first_gradients_are_those_of_the_trainer_of_trl(
    tmp_path: Path, make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], objective: str
) -> None:
    section = {"name": objective, "label_smoothing": 0.2} if objective == "robust" else {"name": objective}
    recipe = make(tmp_path, make_recipe, objective, train__objective=section, train__steps=1)
    if objective == "kto":
        rows = [row for row in make_completions() if isinstance(row["completion"], str)][:8]
    else:
        rows = [row for row in make_pairs() if "prompt" in row and isinstance(row["chosen"], str)][:8]
    write_rows(Path(recipe.data.source), rows)
    batch = {"global_batch_size": 8, "micro_batch_size": 2}
    recipe = recipe.changed({"batch": batch, "data": {"packing": "padded"}})
    run = ranks(train_in_memory, 1, recipe)[0]

    trainer = trl_trainer(recipe, rows, tmp_path / "trl")
    inputs = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, inputs)
    if objective == "orpo":
        loss = loss + loss_without_prompts(trainer.model, inputs)
    loss.backward()
    assert run.curve.losses[0] == pytest.approx(float(loss), rel=LARGEST_DIFFERENCE)
    expected = {name: parameter.grad.numpy() for name, parameter in trainer.model.named_parameters()}
    norm = math.sqrt(sum(float((value.astype(float) ** 2).sum()) for value in expected.values()))
    assert set(run.first_gradients) == set(expected)
    for name, value in run.first_gradients.items():
        assert np.abs(np.asarray(value) - expected[name]).max() < LARGEST_DIFFERENCE * norm, name


def loss_without_prompts(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What must be added to TRL's token loss of ORPO, that of prompts and completions, to get that of completions."""
    ids = inputs["chosen_input_ids"]
    mask = inputs["chosen_attention_mask"]
    logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1].flatten(0, 1)
    every = ids.masked_fill(mask == 0, IGNORE)[:, 1:].flatten()
    of_completions = inputs["chosen_labels"][:, 1:].flatten()
    difference: torch.Tensor = F.cross_entropy(logits, of_completions) - F.cross_entropy(logits, every)
    return difference


def trl_trainer(recipe: Recipe, rows: list[dict[str, Any]], folder: Path) -> Any:
    """TRL's trainer of the same model and objective, whose batches have all `rows`."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
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
    load_base = partial(AutoModelForCausalLM.from_pretrained, recipe.model.name_or_path)
    models: dict[str, Any] = {"ref_model": load_base()}
    if section.name == "kto":
        make_trainer = KTOTrainer
        config = KTOConfig(desirable_weight=section.desirable_weight, **arguments)
    elif not section.needs_reference:
        models = {}
        arguments |= {"max_length": 4096, "max_completion_length": 4096}
        make_trainer = ORPOTrainer if section.name == "orpo" else CPOTrainer
        config = ORPOConfig(**arguments)
        if section.name == "cpo":
            config = CPOConfig(cpo_alpha=section.chosen_nll_weight, **arguments)
        if section.name == "simpo":
            config = CPOConfig(loss_type="simpo", cpo_alpha=0.0, simpo_gamma=section.gamma, **arguments)
    else:
        make_trainer = DPOTrainer
        loss_type = "sigmoid" if section.name == "dpo" else section.name
        config = DPOConfig(loss_type=[loss_type], label_smoothing=section.label_smoothing, **arguments)
    tokenizer = AutoTokenizer.from_pretrained(recipe.data.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.bos_token = None  # which ORPO and CPO put in front of a prompt, and DPO and KTO do not
    return make_trainer(
        model=load_base(),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **models,
    )
