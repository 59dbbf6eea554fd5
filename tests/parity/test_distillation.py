"""A student learns from its teacher in every layout what it learns in one process."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_fine_tuning import save_base
from small_chats import write_tokenizer
from small_preferences import LAYOUTS as SMALL_LAYOUTS
from small_preferences import small_llama, words, write_rows
from transformers import AutoModelForCausalLM

from toolkit.config import recipe_problems
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.token_cache import prepare
from toolkit.parallel.loss import IGNORE
from toolkit.parity import ParityResult
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]
Make = Callable[..., Recipe]
LARGEST_DIFFERENCE = 1e-6
VOCABULARY = 321
LAYOUTS = SMALL_LAYOUTS | {
    "pp2-zbh1": {"pp": 2, "zero_stage": 1, "schedule": "zb-h1"},
    "cp2-z3": {"cp": 2, "zero_stage": 3},
    "cp2-tp2-sp": {"cp": 2, "tp": 2, "zero_stage": 1, "sequence_parallel": True},
    "cp2-pp2": {"cp": 2, "pp": 2, "zero_stage": 1},
}
DAILY = ("cp2-z3", "tp2-sp")


@pytest.fixture
def distilled(make_recipe: Make, tmp_path: Path) -> Make:
    """A small recipe with a teacher of another size. Each has a cache of its own."""
    made = iter(range(100))

    def make(**changes: Any) -> Recipe:
        import random

        rng = random.Random(9)
        rows = [{"text": words(rng)} for _ in range(80)]
        distill = {
            "teacher": str(save_base(tmp_path / "teacher", "llama", seed=9, hidden_size=48, num_hidden_layers=2)),
            "top_k": 16,
            "temperature": 2.0,
            "weight": 0.7,
        }
        fields = {
            "model": {"name_or_path": str(save_base(tmp_path / "base", "llama")), "init": "pretrained"},
            "data": {
                "source": str(write_rows(tmp_path / "rows.jsonl", rows)),
                "tokenizer": str(write_tokenizer(tmp_path / "tokenizer")),
                "seq_len": 32,
                "workers": 1,
                "cache_dir": str(tmp_path / f"cache{next(made)}"),
                "eval_fraction": 0.0,
            },
            "train__steps": 6,
            "train__distill": {**distill, **changes.pop("distill", {})},
            "batch": {"global_batch_size": 8, "micro_batch_size": 2},
            "optimizer": {"name": "adamw", "lr": 3e-4},
            "schedule": {"name": "constant"},
        }
        return make_recipe(**{**fields, **changes})

    return make


def check_equal(distilled: Make, ranks: Ranks, section: dict[str, Any], **changes: Any) -> ParityResult:
    size = math.prod(section.get(axis, 1) for axis in ("dp", "cp", "tp", "pp", "ulysses"))
    baseline = ranks(train_in_memory, 1, distilled(**{**changes, "train__engine": "reference"}))[0]
    run = ranks(train_in_memory, size, distilled(parallel=section, **changes))[0]
    result = ParityResult.of(run, baseline)
    assert result.passed, str(result)
    assert result.curves.max_loss_difference < LARGEST_DIFFERENCE
    return result


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_one_process_learns_what_full_logits_of_both_models_give(distilled: Make, ranks: Ranks, kind: str) -> None:
    recipe = distilled(train__engine="reference", train__steps=1, distill={"top_k": VOCABULARY, "divergence": kind})
    run = ranks(train_in_memory, 1, recipe)[0]
    student = AutoModelForCausalLM.from_pretrained(recipe.model.name_or_path)
    teacher = AutoModelForCausalLM.from_pretrained(recipe.train.distill.teacher)  # type: ignore[union-attr]
    loader = MicroBatchLoader.open(Job.of(recipe, 1), prepare(recipe.data, progress=False), rank=0)
    loss = torch.zeros(())
    targets = 0
    for batch in loader.first_batch():
        logits = student(**batch.inputs()).logits[0]
        with torch.no_grad():
            wanted = (teacher(**batch.inputs()).logits[0] / 2.0).log_softmax(-1)
        own = (logits / 2.0).log_softmax(-1)
        first, second = (own, wanted) if kind == "forward" else (wanted, own)
        divergence = torch.nn.functional.kl_div(first, second, reduction="none", log_target=True).sum(-1)
        counts = batch.labels[0] != IGNORE
        loss = loss + 0.3 * torch.nn.functional.cross_entropy(logits, batch.labels[0], reduction="sum")
        loss = loss + 0.7 * 4.0 * divergence[counts].sum()
        targets += int(counts.sum())
    (loss / targets).backward()
    assert run.curve.losses[0] == pytest.approx(float(loss) / targets, rel=LARGEST_DIFFERENCE)
    for name, parameter in student.named_parameters():
        difference = torch.linalg.norm(torch.from_numpy(run.first_gradients[name]) - parameter.grad)
        assert difference < LARGEST_DIFFERENCE * torch.linalg.norm(parameter.grad), name


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in DAILY else pytest.mark.whole) for name in LAYOUTS]
)
def test_a_layout_trains_what_one_process_trains(distilled: Make, ranks: Ranks, layout: str) -> None:
    check_equal(distilled, ranks, LAYOUTS[layout])


@pytest.mark.whole
@pytest.mark.parametrize("trained", ["all", "adapters"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_thirty_steps_train_what_one_process_trains(
    distilled: Make, ranks: Ranks, tmp_path: Path, layout: str, trained: str
) -> None:
    changes: dict[str, Any] = {"train__steps": 30}
    if trained == "adapters":
        model = {"name_or_path": str(save_base(tmp_path / "base", "llama")), "init": "pretrained"}
        changes["model"] = {**model, "lora": {"r": 4, "targets": ["all-linear"]}}
    check_equal(distilled, ranks, LAYOUTS[layout], **changes)


@pytest.mark.whole
@pytest.mark.parametrize("layout", ["z3", "tp2-sp", "pp2", "u2", "cp2-z3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"distill": {"divergence": "reverse", "temperature": 1.0}},
        {"distill": {"top_k": VOCABULARY}},
        {"data__packing": "padded"},
        {"data__document_masking": True},
        {"optimizer": {"name": "muon", "lr": 3e-4}},
    ],
    ids=str,
)
def test_all_of_its_settings_train_what_they_do_in_one_process(
    distilled: Make, ranks: Ranks, layout: str, changes: dict[str, Any]
) -> None:
    check_equal(distilled, ranks, LAYOUTS[layout], **changes)


@pytest.mark.whole
@pytest.mark.parametrize("layout", ["z3", "tp2-sp", "pp2", "u2"])
def test_full_logits_and_adapters_learn_the_same(distilled: Make, ranks: Ranks, tmp_path: Path, layout: str) -> None:
    model = {"name_or_path": str(save_base(tmp_path / "base", "llama")), "init": "pretrained"}
    check_equal(distilled, ranks, LAYOUTS[layout], model={**model, "loss": "plain"})
    check_equal(distilled, ranks, LAYOUTS[layout], model={**model, "lora": {"r": 4, "targets": ["all-linear"]}})


@pytest.mark.whole
@pytest.mark.parametrize("trained", ["all", "adapters"])
def test_experts_of_several_ranks_learn_the_same(distilled: Make, ranks: Ranks, trained: str) -> None:
    llama = small_llama(2, initializer_range=0.1)["overrides"]
    experts = {"name_or_path": "mixtral-8x7b", "overrides": {**llama, "num_local_experts": 4, "num_experts_per_tok": 2}}
    if trained == "adapters":
        experts["lora"] = {"r": 4, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    check_equal(distilled, ranks, {"dp": 2, "ep": 2, "zero_stage": 1}, model=experts, train__steps=30)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data__format": "preference", "data__tokenizer": "org/name"}, "not which of two is better"),
        ({"data__sources": [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]}, "a mixture has no teacher"),
        ({"train__distill": {"teacher": "s3://bucket/model"}}, "models are read from directories"),
        ({"train__distill": {"teacher": "missing"}}, "there is no such directory"),
    ],
    ids=str,
)
def test_what_a_teacher_does_not_go_together_with_is_refused(
    make_recipe: Make, changes: dict[str, Any], problem: str
) -> None:
    problems = recipe_problems(make_recipe(**{"train__distill": {"teacher": "org/teacher"}, **changes}))
    assert any(problem in line for line in problems), problems
