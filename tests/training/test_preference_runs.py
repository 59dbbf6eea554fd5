"""Runs with a preference objective: what they print and write, their cached reference, and how they resume."""

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from interrupted_runs import SETTINGS, timeless
from small_preferences import make_pairs, preference_data, small_llama, write_rows

from toolkit.config.job import Job
from toolkit.config.recipe import ModelSection, Recipe
from toolkit.engines.base import Engine
from toolkit.engines.factory import create_engine
from toolkit.engines.full_forward import FullForwardEngine
from toolkit.errors import ModelError, RunError
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.training import reference_model

Train = Callable[..., str]
LARGEST_DIFFERENCE = 1e-6
REFERENCE = "reference log-probabilities"
MODEL = small_llama(2)


@pytest.fixture
def changes(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The changes of a small recipe with an objective."""

    def make(name: str = "dpo", **more: Any) -> dict[str, Any]:
        fields = {
            "model": MODEL,
            "data": preference_data(tmp_path, name),
            "world_size": 2,
            "batch": {"global_batch_size": 8, "micro_batch_size": 2},
            "optimizer": {"name": "adamw", "lr": 3e-4},
            "schedule": {"name": "constant_with_warmup"},
            "train__objective": {"name": name},
        }
        return fields | more

    return make


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_shows_pairs_and_margins_and_writes_rewards(
    train: Train, tmp_path: Path, changes: Callable[..., dict[str, Any]]
) -> None:
    shown = train("run_dir=run", **changes(parallel={"zero_stage": 2}, train__steps=12))
    assert "120 pairs: " in shown
    assert "longer than 256 tokens truncated" in shown
    assert f"{REFERENCE}: 100%" in shown
    assert "margin " in shown
    assert "accuracy " in shown
    assert "logps chosen -" in shown
    assert "token frequencies" not in shown
    first, *_, last = steps(tmp_path / "run")
    assert set(first["objective"]) == {
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "logps/rejected",
    }
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["objective"]["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert last["loss"] < first["loss"]
    assert last["objective"]["rewards/margins"] > 0.01
    rewards = last["objective"]
    margin = rewards["rewards/chosen"] - rewards["rewards/rejected"]
    assert rewards["rewards/margins"] == pytest.approx(margin, rel=1e-9)


def test_a_second_run_reads_the_reference_in_another_layout(
    train: Train, tmp_path: Path, changes: Callable[..., dict[str, Any]]
) -> None:
    train("run_dir=first", **changes(parallel={"zero_stage": 3}))
    shown = train("run_dir=second", **changes(parallel={"tp": 2}))
    assert REFERENCE not in shown
    losses = [step["loss"] for step in steps(tmp_path / "first")]
    assert [step["loss"] for step in steps(tmp_path / "second")] == pytest.approx(losses, rel=LARGEST_DIFFERENCE)


def _train(recipe: Recipe, cut_off_after: int | None = None) -> tuple[tuple[float, ...], int]:
    """Train with a reference pass that is written after each micro-batch; return the losses, and how many it took."""
    reference_model._BATCHES_A_COMMIT = 1
    compute = FullForwardEngine.sequence_sums
    passes = 0

    def counted(self: FullForwardEngine, micro_batches: Any) -> Any:
        nonlocal passes
        if passes == cut_off_after:
            raise InterruptedError
        passes += 1
        return compute(self, micro_batches)

    FullForwardEngine.sequence_sums = counted  # type: ignore[method-assign]
    try:
        return train_in_memory(recipe).curve.losses, passes
    except InterruptedError:
        return (), passes


def test_a_reference_pass_that_was_cut_off_goes_on_where_it_was(
    make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], changes: Callable[..., dict[str, Any]]
) -> None:
    fields = changes(train__engine="reference", train__steps=3)
    del fields["world_size"]
    recipe = make_recipe(**fields)
    assert ranks(_train, 1, recipe, 3)[0] == ((), 3)
    losses, passes = ranks(_train, 1, recipe)[0]
    other = recipe.changed({"data": {"cache_dir": f"{recipe.data.cache_dir}-2"}})
    whole, all_passes = ranks(_train, 1, other)[0]
    assert losses == whole
    assert passes == all_passes - 3 > 0


def test_nothing_is_cached_after_a_part_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reference.bin"
    parts = np.arange(-12.0, -4.0).reshape(4, 1, 2)
    reference_model._append(path, 0, parts[0])

    def refused(self: Path, *_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as full:
        full.setattr(Path, "open", refused)
        reference_model._append(path, 1, parts[1])
    reference_model._append(path, 2, parts[2])
    assert reference_model._read(path).tolist() == [[-12.0, -11.0]]
    for number in (1, 2, 3):
        reference_model._append(path, number, parts[number])
    assert reference_model._read(path).tolist() == parts[:, 0].tolist()


def test_another_model_or_text_has_a_reference_of_its_own(
    train: Train, tmp_path: Path, changes: Callable[..., dict[str, Any]]
) -> None:
    train("run_dir=first", **changes())
    assert REFERENCE in train("run_dir=second", **changes(train__seed=2))
    fields = changes()
    write_rows(Path(fields["data"]["source"]), make_pairs()[:-1])
    assert REFERENCE in train("run_dir=third", **fields)
    assert len(list((tmp_path / "cache").glob("reference-*.bin"))) == 3


def _digest(recipe: Recipe) -> str:
    corpus = SimpleNamespace(contents="(1, 2)")
    samples = SimpleNamespace(identity=(96, "truncate", False, True))
    text = SimpleNamespace(corpus=corpus, split="train")
    return reference_model._digest(Job.of(recipe, 1), text, samples)  # type: ignore[arg-type]


def test_every_field_of_a_model_that_its_forward_pass_reads_has_a_reference_of_its_own(
    make_recipe: Callable[..., Recipe],
) -> None:
    only_trained = {"lora", "freeze", "train_only", "router_aux_loss", "router_z_loss", "router_bias_update"}
    assert {*reference_model._MODEL_FIELDS} == set(ModelSection.model_fields) - only_trained
    changes: list[dict[str, Any]] = [
        {},
        {"expert_capacity_factor": 1.0},
        {"expert_capacity_factor": 1.25},
        {"attn_implementation": "eager"},
        {"loss": "plain"},
        {"kernels": "liger"},
    ]
    digests = {_digest(make_recipe(model={"name_or_path": "mixtral-8x7b", **change})) for change in changes}
    assert len(digests) == len(changes)


def test_where_tokens_compete_for_experts_the_size_of_a_micro_batch_counts(make_recipe: Callable[..., Recipe]) -> None:
    def digest(micro: int, **model: Any) -> str:
        batch = {"global_batch_size": 8, "micro_batch_size": micro}
        return _digest(make_recipe(model={"name_or_path": "mixtral-8x7b", **model}, batch=batch))

    assert digest(1) == digest(2)
    assert digest(1, expert_capacity_factor=1.0) != digest(2, expert_capacity_factor=1.0)


def _refusal(recipe: Recipe) -> str:
    try:
        train_in_memory(recipe)
    except ModelError as error:
        return str(error)
    return ""


def test_a_reference_without_weights_is_refused_by_its_own_field(
    tmp_path: Path,
    make_recipe: Callable[..., Recipe],
    ranks: Callable[..., list[Any]],
    changes: Callable[..., dict[str, Any]],
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    objective = {"name": "dpo", "reference": str(tmp_path / "other")}
    fields = changes(train__engine="reference", train__steps=1, train__objective=objective)
    del fields["world_size"]
    (refusal,) = ranks(_refusal, 1, make_recipe(**fields))
    assert refusal.startswith(f"train.objective.reference={tmp_path}/other: no safetensors weights could be read. ")
    assert "model." not in refusal


ADAPTERS = {**MODEL, "lora": {"r": 4, "targets": ["all-linear"]}}
MUON = {"name": "muon", "lr": 3e-5}
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True, "zero_stage": 1}


@pytest.mark.parametrize(
    ("name", "before", "after", "more"),
    [
        ("dpo", {"zero_stage": 2}, {"pp": 2}, {}),
        ("bco", {"zero_stage": 2}, {"pp": 2}, {}),
        *(
            pytest.param(*row, marks=pytest.mark.whole)
            for row in (
                ("kto", SEQUENCE_PARALLEL, {"zero_stage": 3}, {}),
                ("orpo", {"ulysses": 2, "zero_stage": 1}, {"tp": 2, "zero_stage": 1}, {}),
                ("simpo", {"pp": 2, "zero_stage": 1}, {"cp": 2, "zero_stage": 1}, {}),
                ("ipo", {"cp": 2, "zero_stage": 3}, {"pp": 2, "schedule": "zb-h1", "zero_stage": 1}, {}),
                ("dpo", {"zero_stage": 3}, SEQUENCE_PARALLEL, {"optimizer": MUON}),
                ("dpo", {"tp": 2, "zero_stage": 1}, {"zero_stage": 3}, {"model": ADAPTERS}),
                ("kto", {"pp": 2, "zero_stage": 1}, {"ulysses": 2, "zero_stage": 1}, {"model": ADAPTERS}),
            )
        ),
    ],
)
def test_a_run_resumes_in_another_layout_with_the_same_curve(
    train: Train,
    tmp_path: Path,
    changes: Callable[..., dict[str, Any]],
    name: str,
    before: dict[str, Any],
    after: dict[str, Any],
    more: dict[str, Any],
) -> None:
    train("run_dir=run", *SETTINGS, **changes(name, parallel=before, **more))
    shown = train("run_dir=on", *SETTINGS, "--resume", "run/step-00000005", **changes(name, parallel=after, **more))
    assert REFERENCE not in shown
    resumed, whole = timeless(tmp_path / "on"), timeless(tmp_path / "run")[5:]
    assert [step["batch"] for step in resumed] == [step["batch"] for step in whole]
    assert [step["loss"] for step in resumed] == pytest.approx([step["loss"] for step in whole], rel=LARGEST_DIFFERENCE)
    measured = "delta" if name == "bco" else "rewards/margins"
    values = [step["objective"][measured] for step in whole]
    assert [step["objective"][measured] for step in resumed] == pytest.approx(values, rel=1e-4)


def test_lora_is_compared_with_the_model_without_adapters(
    train: Train, tmp_path: Path, changes: Callable[..., dict[str, Any]]
) -> None:
    train("run_dir=run", *SETTINGS, **changes(model=ADAPTERS, optimizer={"name": "adamw", "lr": 3e-3}))
    shown = train("run_dir=on", *SETTINGS, "--resume", "run/step-00000005", **changes(model=ADAPTERS))
    assert REFERENCE not in shown
    first, *_, last = steps(tmp_path / "run")
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert last["objective"]["rewards/margins"] > 0.0


def test_the_validation_loss_is_that_of_the_objective(
    train: Train, tmp_path: Path, changes: Callable[..., dict[str, Any]]
) -> None:
    validation = [{"path": str(write_rows(tmp_path / "held_out.jsonl", make_pairs()[:30])), "name": "held"}]
    fields = changes(train__eval_every=2, train__eval_samples=7)
    fields["data"]["validation"] = validation
    train("run_dir=dp", **fields, parallel={"zero_stage": 1})
    train("run_dir=pp", **fields, parallel={"pp": 2})
    losses = [step["eval_loss"] for step in steps(tmp_path / "dp") if "eval_loss" in step]
    assert len(losses) == 2
    assert all(0.3 < loss < math.log(2) for loss in losses)
    others = [step["eval_loss"] for step in steps(tmp_path / "pp") if "eval_loss" in step]
    assert others == pytest.approx(losses, rel=LARGEST_DIFFERENCE)


def _train_without_objective(recipe: Recipe) -> str:
    """The refusal of an engine that a user has made, and that knows of no objective."""

    def make_engine(*arguments: Any, **options: Any) -> Engine:
        engine = create_engine(*arguments, **options)
        engine.objective = None
        return engine

    with pytest.raises(RunError) as refused:
        train_in_memory(recipe, engine_factory=make_engine)
    return str(refused.value)


def test_an_engine_without_objectives_does_not_train_on_pairs_as_on_text(
    make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], changes: Callable[..., dict[str, Any]]
) -> None:
    fields = changes(train__engine="reference", train__steps=1)
    del fields["world_size"]
    refusal = ranks(_train_without_objective, 1, make_recipe(**fields))[0]
    assert refusal.startswith("train.objective.name=dpo: ReferenceEngine computes no objective. ")
