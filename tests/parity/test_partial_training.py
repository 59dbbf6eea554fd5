"""Models of which some parameters are frozen train what a plain loop over Hugging Face's model trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_fine_tuning import differences, save_base, train_plainly

from toolkit.config.recipe import Recipe
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "reference": {},
    "z0": {"dp": 2, "zero_stage": 0},
    "z1": {"dp": 2, "zero_stage": 1},
    "z2": {"dp": 2, "zero_stage": 2},
    "z3": {"dp": 2, "zero_stage": 3},
    "z2-offload": {"dp": 2, "zero_stage": 2, "offload_optimizer": "cpu"},
    "z3-recompute": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "ddp": {"dp": 2},
    "fsdp": {"dp": 2},
    "tp2-z1": {"tp": 2, "zero_stage": 1},
    "tp2-sp-z3": {"tp": 2, "sequence_parallel": True, "zero_stage": 3},
    "pp2-z0": {"pp": 2, "zero_stage": 0},
    "pp2-z1": {"pp": 2, "zero_stage": 1},
    "tp2-pp2-z1": {"tp": 2, "pp": 2, "zero_stage": 1},
    "u2-z2": {"ulysses": 2, "zero_stage": 2},
    "pp2-zbv-z1": {"pp": 2, "zero_stage": 1, "schedule": "zb-v"},
    "pp2-zbh1-z0": {"pp": 2, "zero_stage": 0, "schedule": "zb-h1"},
    "tp2-pp2-zbv-z1": {"tp": 2, "pp": 2, "zero_stage": 1, "schedule": "zb-v"},
}
CHOICES: dict[str, dict[str, list[str]]] = {
    # The first half of the model: the inputs of the trained layers need no gradient.
    "head": {"train_only": ["*.layers.1.*", "*.layers.2.*", "*.layers.3.mlp.*", "lm_head.*"]},
    "embeddings": {"freeze": ["*.wte.*", "*.wpe.*"]},
    "biases": {"freeze": ["*.mlp.*"]},
}
DAILY = {("z3", "llama", "head"), ("z2-offload", "gpt2", "biases")}


def cells() -> list[Any]:
    found = []
    for number, layout in enumerate(LAYOUTS):
        for family, choice in (("llama", "head"), ("gpt2", "embeddings"), ("gpt2", "biases")):
            cell = (layout, family, choice)
            if layout == "u2-z2" and choice == "biases":
                continue
            marks = () if cell in DAILY else (pytest.mark.whole,)
            found.append(pytest.param(*cell, "padded" if number % 2 else "packed", marks=marks, id="-".join(cell)))
    return found


def small(make_recipe: Callable[..., Recipe], folder: Path, family: str, layout: str, **model: Any) -> Recipe:
    """A recipe of six steps, each clipped, with accumulation, from published weights."""
    section = {"name_or_path": str(save_base(folder / family, family)), "init": "pretrained", **model}
    engine = layout if layout in ("reference", "ddp", "fsdp") else "deepspeed"
    return make_recipe(
        model=section,
        parallel=LAYOUTS[layout],
        train__engine=engine,
        train__steps=6,
        train__grad_clip=0.2,
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        optimizer={"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
        schedule={"name": "cosine", "warmup_steps": 1},
    )


def world(layout: str) -> int:
    section = LAYOUTS[layout]
    return int(section.get("dp", 1) * section.get("tp", 1) * section.get("pp", 1) * section.get("ulysses", 1))


@pytest.mark.parametrize(("layout", "family", "choice", "packing"), cells())
def test_frozen_parameters_change_nothing_of_the_others(
    make_recipe: Callable[..., Recipe],
    ranks: Ranks,
    tmp_path: Path,
    layout: str,
    family: str,
    choice: str,
    packing: str,
) -> None:
    recipe = small(make_recipe, tmp_path, family, layout, **CHOICES[choice])
    recipe = recipe.changed({"data": {"packing": packing}})
    run = ranks(train_in_memory, world(layout), recipe)[0]
    found = differences(run, train_plainly(recipe))
    print(layout, family, choice, found)
    assert max(found.values()) < 1e-6
    assert not run.diverged
    frozen = run.parameters.keys() - run.first_gradients.keys()
    assert frozen
    assert all((run.parameters[name] == run.initial[name]).all() for name in frozen)
