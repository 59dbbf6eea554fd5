"""LoRA in every layout trains what peft trains in one process: losses, the first gradient of every adapter, weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_fine_tuning import differences, save_base, train_from_nonzero, train_plainly
from transformers import MixtralConfig

from toolkit.config.recipe import ParallelSection, Recipe
from toolkit.config.strategy import Strategy
from toolkit.parallel.adapter_names import PREFIX
from toolkit.parity import ParityResult
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "reference": {},
    **{f"z{stage}": {"dp": 2, "zero_stage": stage} for stage in range(4)},
    "z2-offload": {"dp": 2, "zero_stage": 2, "offload_optimizer": "cpu"},
    "z3-offload": {"dp": 2, "zero_stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "z3-recompute": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "ddp": {"dp": 2},
    "fsdp": {"dp": 2},
    "tp2": {"tp": 2, "zero_stage": 1},
    "tp2-z3": {"tp": 2, "zero_stage": 3},
    "tp2-sp": {"tp": 2, "sequence_parallel": True, "zero_stage": 2},
    "tp4": {"tp": 4, "zero_stage": 1},
    "pp2": {"pp": 2, "zero_stage": 1},
    "pp2-z0": {"pp": 2, "zero_stage": 0},
    "tp2-pp2-dp2": {"tp": 2, "pp": 2, "dp": 2, "zero_stage": 1},
    "tp2-pp2-dp2-sp-recompute": {
        "tp": 2, "pp": 2, "dp": 2, "zero_stage": 1, "sequence_parallel": True, "recompute": "full"
    },
    "u2": {"ulysses": 2, "zero_stage": 2},
    "cp2": {"cp": 2, "zero_stage": 3},
    "cp2-tp2-sp": {"cp": 2, "tp": 2, "zero_stage": 2, "sequence_parallel": True},
    "cp2-pp2": {"cp": 2, "pp": 2, "zero_stage": 1},
    "pp2-zbv": {"pp": 2, "zero_stage": 1, "schedule": "zb-v"},
    "pp2x2-z0": {"pp": 2, "zero_stage": 0, "schedule": "interleaved"},
    "tp2-pp2-zbh1-recompute": {"tp": 2, "pp": 2, "zero_stage": 1, "schedule": "zb-h1", "recompute": "full"},
}  # fmt: skip
ASKED = ("z0", "z1", "z2", "z3", "tp2", "pp2", "tp2-pp2-dp2")
FAMILIES = ("llama", "qwen3", "gpt2")
DAILY = {("z3", "gpt2", "padded"), ("tp2-pp2-dp2", "qwen3", "packed")}


def world(layout: str) -> int:
    axes = ("dp", "tp", "pp", "ulysses", "cp")
    size = 1
    for axis in axes:
        size *= int(LAYOUTS[layout].get(axis, 1))
    return size


def cells() -> list[Any]:
    found = []
    for number, layout in enumerate(LAYOUTS):
        for other, family in enumerate(FAMILIES):
            for packing in ("packed", "padded"):
                if layout not in ASKED and (number + other) % 2 != (packing == "packed"):
                    continue
                cell = (layout, family, packing)
                marks = () if cell in DAILY else (pytest.mark.whole,)
                found.append(pytest.param(*cell, marks=marks, id="-".join(cell)))
    return found


def lora_recipe(
    make_recipe: Callable[..., Recipe], folder: Path, family: str, layout: str, *, packing: str = "packed", **lora: Any
) -> Recipe:
    """Six steps, each clipped, with accumulation, of adapters on every linear layer of a published model."""
    section = {"r": 4, "alpha": 16, "targets": ["all-linear"], **lora}
    engine = layout if layout in ("reference", "ddp", "fsdp") else "deepspeed"
    recipe = make_recipe(
        model={"name_or_path": str(save_base(folder / family, family)), "init": "pretrained", "lora": section},
        parallel=LAYOUTS[layout],
        train__engine=engine,
        train__steps=6,
        train__grad_clip=0.05,
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        optimizer={"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        schedule={"name": "cosine", "warmup_steps": 1},
    )
    return recipe.changed({"data": {"packing": packing}})


@pytest.mark.parametrize(("layout", "family", "packing"), cells())
def test_adapters_train_what_peft_trains(
    make_recipe: Callable[..., Recipe], ranks: Ranks, tmp_path: Path, layout: str, family: str, packing: str
) -> None:
    recipe = lora_recipe(make_recipe, tmp_path, family, layout, packing=packing)
    run = ranks(train_from_nonzero, world(layout), recipe)[0]
    plain = train_plainly(recipe, run.initial)
    found = differences(run, plain)
    print(layout, family, packing, found)
    assert max(found.values()) < 1e-6
    assert min(plain.norms) > recipe.train.grad_clip
    assert not run.diverged
    assert all((run.parameters[name] == run.initial[name]).all() for name in run.parameters.keys() - plain.trained)


def test_a_target_may_be_of_one_stage_alone(make_recipe: Callable[..., Recipe], ranks: Ranks, tmp_path: Path) -> None:
    targets = ["layers.0.self_attn.q_proj", "layers.3.mlp.down_proj"]
    recipe = lora_recipe(make_recipe, tmp_path, "llama", "pp2", targets=targets)
    run = ranks(train_from_nonzero, 2, recipe)[0]
    plain = train_plainly(recipe, run.initial)
    assert len(plain.trained) == 4  # A and B of two layers
    assert max(differences(run, plain).values()) < 1e-6


DAILY_DORA = {("z3", "llama"), ("tp2-pp2-dp2", "gpt2")}
DORA = [(layout, family) for layout in LAYOUTS for family in ("llama", "gpt2")]
# One has a key-value head that ranks share in a fused layer, the other gathers the outputs of its column layers.
DORA += [(layout, family) for layout in ("z0", "tp2", "tp2-z3") for family in ("gpt_bigcode", "phi3")]


@pytest.mark.parametrize(
    ("layout", "family"),
    [pytest.param(*cell, marks=() if cell in DAILY_DORA else pytest.mark.whole) for cell in DORA],
)
def test_dora_trains_what_peft_trains(
    make_recipe: Callable[..., Recipe], ranks: Ranks, tmp_path: Path, layout: str, family: str
) -> None:
    recipe = lora_recipe(make_recipe, tmp_path, family, layout, dora=True, rslora=True, alpha=4)
    run = ranks(train_from_nonzero, world(layout), recipe)[0]
    plain = train_plainly(recipe, run.initial)
    found = differences(run, plain)
    print("dora", layout, family, found)
    assert max(found.values()) < 1e-6
    magnitudes = [name for name in plain.gradients if "magnitude" in name]
    assert magnitudes
    for name in magnitudes:
        adapter = name.removesuffix("lora_magnitude_vector")
        weight = run.initial[f"{adapter.removeprefix(PREFIX)}weight"]
        product = run.initial[f"{adapter}lora_B.weight"] @ run.initial[f"{adapter}lora_A.weight"]
        whole = (weight.T if family == "gpt2" else weight) + 2 * product
        assert run.initial[name] == pytest.approx((whole.astype(float) ** 2).sum(1) ** 0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "family", "lora"),
    [
        ("tp2", "gpt2", {"dora": True}),
        pytest.param("tp2", "gpt2", {}, marks=pytest.mark.whole),
        *(pytest.param(layout, "llama", {}, marks=pytest.mark.whole) for layout in ("z1", "z3", "pp2", "tp2-pp2-dp2")),
        *(pytest.param(layout, "qwen3", {}, marks=pytest.mark.whole) for layout in ("z3-recompute", "tp4")),
        *(pytest.param(layout, "phi3", {"dora": True}, marks=pytest.mark.whole) for layout in ("z3-recompute", "tp2")),
    ],
)
def test_every_layout_drops_the_same_inputs_of_adapters(
    make_recipe: Callable[..., Recipe], ranks: Ranks, tmp_path: Path, layout: str, family: str, lora: dict[str, bool]
) -> None:
    """Micro-batches decide what is dropped, so they are equal; one process has the same seeds."""
    recipe = lora_recipe(make_recipe, tmp_path, family, layout, dropout=0.3, **lora)
    alone = recipe.changed({"train": {"engine": "reference"}}).model_copy(update={"parallel": ParallelSection()})
    run = ranks(train_from_nonzero, world(layout), recipe)[0]
    baseline = ranks(train_from_nonzero, 1, alone)[0]
    plain = train_plainly(recipe, run.initial)
    assert max(abs(a - b) for a, b in zip(run.curve.losses, plain.losses, strict=True)) > 1e-5  # something is dropped
    assert run.curve.losses == pytest.approx(baseline.curve.losses, rel=1e-6)
    assert run.curve.grad_norms == pytest.approx(baseline.curve.grad_norms, rel=1e-6)


def test_muon_updates_adapters_beside_experts_that_replicas_share_out(
    make_recipe: Callable[..., Recipe], ranks: Ranks, tmp_path: Path
) -> None:
    """ZeRO-3 has sharded the adapters, so that their parameters are empty, before their shapes are noted."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 321}
    config = MixtralConfig(**shape, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    config.save_pretrained(tmp_path)
    recipe = make_recipe(
        model={"name_or_path": str(tmp_path), "lora": {"r": 4, "targets": ["q_proj", "v_proj"]}},
        optimizer={"name": "muon", "lr": 3e-3},
        train__steps=4,
    )
    baseline = ranks(train_in_memory, 1, Strategy.parse("reference").apply(recipe, 1))[0]
    run = ranks(train_in_memory, 2, Strategy.parse("dp2-ep2-z3").apply(recipe, 2))[0]
    result = ParityResult.of(run, baseline)
    assert result.passed, str(result)
