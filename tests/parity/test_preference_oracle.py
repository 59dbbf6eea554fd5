"""One process trains what Hugging Face's model trains with TRL's losses, autograd and a loop written by hand.

The loop reads each sequence by itself, without packing, masks or chunks, and runs the reference model in every step.
Only which pairs are in a step comes from the toolkit.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_fine_tuning import save_base
from small_chats import write_tokenizer
from small_preferences import preference_data, write_rows
from trl_losses import trl_loss
from trl_trainers import TEMPLATE, first_step, rows_of

from toolkit.config.job import Job
from toolkit.config.objective_section import NEED_REFERENCE
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines.objectives.formulas import SequenceSums
from toolkit.parallel.loss import IGNORE
from toolkit.parity import ParityRun
from toolkit.parity.run.train_in_memory import ParityRecorder, train_in_memory
from toolkit.step_metrics import StepMetrics
from toolkit.training.callback import Callback
from toolkit.training.loop import TrainingRun
from toolkit.training.train import train

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


TRAINERS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo smoothed": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {},
    "hinge": {},
    "robust": {"label_smoothing": 0.2},
    "kto": {"desirable_weight": 1.3},
    "orpo": {},
    "simpo": {},
    "simpo smoothed": {"beta": 2.5, "gamma": 1.0, "label_smoothing": 0.1, "nll_weight": 0.5},
    "cpo": {},
    "cpo smoothed": {"beta": 0.2, "label_smoothing": 0.3, "nll_weight": 0.2},
}
"""All objectives but `bco`, of which TRL has no trainer any more."""


def train_and_measure(recipe: Recipe) -> tuple[ParityRun, dict[str, float]]:
    """Return the run, and what its objective measured in the first step."""
    recorder = ParityRecorder()
    measured: list[dict[str, float]] = []

    class Measured(Callback):
        def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
            measured.append(metrics.objective or {})

    train(Job.of(recipe, 1), [recorder, Measured()], in_memory=True)
    return recorder.result, measured[0]


@pytest.mark.parametrize("kind", ["texts", "chats"])
@pytest.mark.parametrize("case", TRAINERS)
def test_the_first_gradients_are_those_of_the_trainer_of_trl(
    tmp_path: Path, make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], case: str, kind: str
) -> None:
    objective = case.partition(" ")[0]
    section = {"name": objective, **TRAINERS[case]}
    if objective in NEED_REFERENCE:
        section["reference"] = str(save_base(tmp_path / "other", "llama", seed=8))
    recipe = make(tmp_path, make_recipe, objective, train__objective=section, train__steps=1)
    if kind == "chats":
        write_tokenizer(tmp_path / "tokenizer", TEMPLATE, eos="<|im_end|>")
    rows = rows_of(objective, kind)
    write_rows(Path(recipe.data.source), rows)
    batch = {"global_batch_size": len(rows), "micro_batch_size": 2}
    recipe = recipe.changed({"batch": batch, "data": {"packing": "padded"}})
    run, measured = ranks(train_and_measure, 1, recipe)[0]
    expected = first_step(recipe, rows, tmp_path / "trl")

    assert run.curve.losses[0] == pytest.approx(expected.loss, rel=LARGEST_DIFFERENCE)
    assert set(run.first_gradients) == set(expected.gradients)
    norm = math.sqrt(sum(float((value.astype(float) ** 2).sum()) for value in expected.gradients.values()))
    for name, value in run.first_gradients.items():
        assert np.abs(np.asarray(value) - expected.gradients[name]).max() < LARGEST_DIFFERENCE * norm, name
    assert {"rewards/margins", "logps/chosen", "logps/rejected"} <= set(measured)
    for name, value in measured.items():
        # Rewards and KL are differences of log-probabilities, and round as these do.
        scale = abs(measured["logps/chosen"]) * (recipe.train.objective.beta if name.startswith("rewards/") else 1.0)
        assert abs(value - expected.metrics[name]) < LARGEST_DIFFERENCE * scale, name
