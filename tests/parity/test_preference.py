"""Preference objectives train what one plain process trains, whatever the layout."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_fine_tuning import save_base
from small_preferences import LAYOUTS as SMALL_LAYOUTS
from small_preferences import preference_data, small_llama

from toolkit.config.recipe import Recipe
from toolkit.parity import ParityResult, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]
LARGEST_DIFFERENCE = 1e-6
"""Of a loss, over the loss of one process."""
STEPS = 8
# Otherwise answers are about as probable as each other, and their difference is mostly rounding.
MODEL = small_llama(4, initializer_range=0.1)
LAYOUTS = SMALL_LAYOUTS | {
    "cp2": {"cp": 2, "zero_stage": 1},
    "cp2-tp2-sp": {"cp": 2, "tp": 2, "zero_stage": 3, "sequence_parallel": True},
    "cp2-pp2": {"cp": 2, "pp": 2, "zero_stage": 1},
    "pp2-zbv": {"pp": 2, "zero_stage": 1, "schedule": "zb-v"},
    "tp2-pp2-zbh1": {"tp": 2, "pp": 2, "zero_stage": 1, "schedule": "zb-h1"},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"label_smoothing": 0.1},
    "kto": {"desirable_weight": 1.3},
    "orpo": {},
    "simpo": {"beta": 2.0},
    "ipo": {},
    "hinge": {},
    "robust": {"label_smoothing": 0.2},
    "cpo": {},
    "bco": {},
    "sft": {},
}
DAILY = (("dpo", "z3"), ("kto", "pp2"), ("orpo", "u2"), ("simpo", "tp2-sp"), ("dpo", "cp2-pp2"))
"""Cells of every day; the others are of the whole matrix."""
CELLS = [
    pytest.param(objective, layout, marks=() if (objective, layout) in DAILY else pytest.mark.whole)
    for objective in ("dpo", "kto", "orpo", "simpo")
    for layout in LAYOUTS
]


@pytest.fixture
def preferences(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """A small recipe of an objective. Each has a cache of its own: another layout may not read its reference."""
    made = iter(range(100))

    def make(objective: str, **changes: Any) -> Recipe:
        fields = {
            "model": MODEL,
            "data": preference_data(tmp_path, objective, tmp_path / f"cache{next(made)}"),
            "train__steps": STEPS,
            "train__objective": {"name": objective, **OBJECTIVES[objective]},
            "batch": {"global_batch_size": 8, "micro_batch_size": 2},
            # At 1e-3 AdamW amplifies rounding beyond the bound (matrix.py).
            "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
            "schedule": {"name": "constant"},
        }
        return make_recipe(**{**fields, **changes})

    return make


@pytest.fixture(scope="module")
def baselines() -> dict[str, ParityRun]:
    """What one process trained, by objective and changes: the cells of all layouts are held to it."""
    return {}


def check_equal(
    preferences: Callable[..., Recipe],
    ranks: Ranks,
    objective: str,
    section: dict[str, Any],
    *,
    baselines: dict[str, ParityRun] | None = None,
    **changes: Any,
) -> ParityResult:
    size = math.prod(section.get(axis, 1) for axis in ("dp", "tp", "pp", "ulysses", "cp"))
    plain = {**changes, "train__engine": "reference"}
    known = {} if baselines is None else baselines
    key = f"{objective} {changes}"
    if key not in known:
        known[key] = ranks(train_in_memory, 1, preferences(objective, **plain))[0]
    baseline = known[key]
    run = ranks(train_in_memory, size, preferences(objective, parallel=section, **changes))[0]
    assert not run.attention_fault
    result = ParityResult.of(run, baseline)
    assert result.passed, str(result)
    assert result.curves.max_loss_difference < LARGEST_DIFFERENCE
    assert baseline.curve.losses[0] != baseline.curve.losses[-1]
    return result


@pytest.mark.parametrize(("objective", "layout"), CELLS)
def test_an_objective_trains_what_one_process_trains(
    preferences: Callable[..., Recipe], ranks: Ranks, baselines: dict[str, ParityRun], objective: str, layout: str
) -> None:
    check_equal(preferences, ranks, objective, LAYOUTS[layout], baselines=baselines)


@pytest.mark.parametrize(
    "objective",
    ["dpo", *(pytest.param(name, marks=pytest.mark.whole) for name in OBJECTIVES if name != "dpo")],
)
def test_full_logits_give_the_same_as_chunks_of_them(
    preferences: Callable[..., Recipe], ranks: Ranks, objective: str
) -> None:
    section = LAYOUTS["tp2"]
    check_equal(preferences, ranks, objective, section, model={**MODEL, "loss": "plain"})


ADAPTERS = {**MODEL, "lora": {"r": 4, "targets": ["all-linear"]}}
EXPERTS = {
    "name_or_path": "mixtral-8x7b",
    "overrides": {**MODEL["overrides"], "num_local_experts": 4, "num_experts_per_tok": 2},
}
TRAININGS: dict[str, dict[str, Any]] = {
    # At larger rates the loss of so few pairs is near 0 in the end, and its relative difference is that of rounding.
    "adamw": {"optimizer": {"name": "adamw", "lr": 3e-5, "weight_decay": 0.1}},
    "muon": {"optimizer": {"name": "muon", "lr": 3e-5, "weight_decay": 0.1}},
    "lora": {"model": ADAPTERS},
}


@pytest.mark.whole
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo", "simpo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_thirty_steps_train_what_one_process_trains(
    preferences: Callable[..., Recipe],
    ranks: Ranks,
    baselines: dict[str, ParityRun],
    objective: str,
    layout: str,
    training: str,
) -> None:
    changes = {"train__steps": 30, **TRAININGS[training]}
    check_equal(preferences, ranks, objective, LAYOUTS[layout], baselines=baselines, **changes)


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        pytest.param(objective, layout, marks=() if (objective, layout) == ("kto", "z3") else pytest.mark.whole)
        for objective in ("dpo", "kto")
        for layout in LAYOUTS
    ],
)
def test_a_reference_in_memory_gives_what_a_computed_one_gives(
    preferences: Callable[..., Recipe], ranks: Ranks, objective: str, layout: str
) -> None:
    section = LAYOUTS[layout]
    size = math.prod(section.get(axis, 1) for axis in ("dp", "cp", "tp", "pp", "ulysses"))
    fields = {"name": objective, **OBJECTIVES[objective]}
    online = preferences(objective, parallel=section, train__objective={**fields, "reference": "online"})
    run = ranks(train_in_memory, size, online)[0]
    assert not list(Path(online.data.cache_dir or "").glob("reference-*"))
    baseline = ranks(train_in_memory, 1, preferences(objective, train__engine="reference"))[0]
    result = ParityResult.of(run, baseline)
    assert result.passed, str(result)
    assert result.curves.max_loss_difference < LARGEST_DIFFERENCE


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "pp2" else pytest.mark.whole) for name in LAYOUTS]
)
def test_the_reference_of_a_checkpoint_is_the_same_in_every_layout(
    preferences: Callable[..., Recipe], ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    fields = {"name": "dpo", "reference": str(save_base(tmp_path / "other", "llama", seed=8))}
    model = {"name_or_path": str(save_base(tmp_path / "base", "llama")), "init": "pretrained"}
    result = check_equal(preferences, ranks, "dpo", LAYOUTS[layout], model=model, train__objective=fields)
    assert abs(result.baseline.curve.losses[0] - math.log(2)) > 1e-3


@pytest.mark.whole
@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo"])
@pytest.mark.parametrize("layout", ["z3", "tp2-sp", "pp2", "u2", "cp2"])
def test_adapters_train_what_they_do_in_one_process(
    preferences: Callable[..., Recipe], ranks: Ranks, objective: str, layout: str
) -> None:
    check_equal(preferences, ranks, objective, LAYOUTS[layout], model=ADAPTERS)


@pytest.mark.whole
@pytest.mark.parametrize("reference", ["online", "checkpoint"])
@pytest.mark.parametrize("layout", ["z0", "z3", "tp2-sp", "pp2", "u2"])
def test_adapters_have_any_reference(
    preferences: Callable[..., Recipe], ranks: Ranks, tmp_path: Path, layout: str, reference: str
) -> None:
    if reference == "checkpoint":
        reference = str(save_base(tmp_path / "other", "llama", seed=8))
    base = {"name_or_path": str(save_base(tmp_path / "base", "llama")), "init": "pretrained"}
    fields = {"name": "dpo", "reference": reference}
    model = {**base, "lora": ADAPTERS["lora"]}
    check_equal(preferences, ranks, "dpo", LAYOUTS[layout], model=model, train__objective=fields)


@pytest.mark.whole
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("reference", ["online", "checkpoint"])
def test_the_engines_of_pytorch_have_any_reference(
    preferences: Callable[..., Recipe], ranks: Ranks, tmp_path: Path, engine: str, reference: str
) -> None:
    if reference == "checkpoint":
        reference = str(save_base(tmp_path / "other", "llama", seed=8))
    model = {"name_or_path": str(save_base(tmp_path / "base", "llama")), "init": "pretrained"}
    fields = {"name": "dpo", "reference": reference}
    section = {"dp": 2, "zero_stage": 0}
    check_equal(preferences, ranks, "dpo", section, model=model, train__objective=fields, train__engine=engine)


@pytest.mark.whole
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("objective", ["dpo", "kto", "bco", "orpo", "simpo"])
def test_experts_of_several_ranks_train_what_they_do_in_one_process(
    preferences: Callable[..., Recipe], ranks: Ranks, objective: str, training: str
) -> None:
    lora = {"r": 4, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    model = {**EXPERTS, "lora": lora} if training == "lora" else EXPERTS
    changes = {"train__steps": 30, **TRAININGS[training], "model": model}
    check_equal(preferences, ranks, objective, {"dp": 2, "ep": 2, "zero_stage": 1}, **changes)


@pytest.mark.whole
@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_the_engines_of_pytorch_train_what_one_process_trains(
    preferences: Callable[..., Recipe], ranks: Ranks, objective: str, engine: str
) -> None:
    check_equal(preferences, ranks, objective, {"dp": 2, "zero_stage": 0}, train__engine=engine)
