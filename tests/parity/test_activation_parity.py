"""Ways to need less memory for activations train what one plain PyTorch process trains."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cell_runs import CORES, Baselines, CellRun, Outcome, run_cells
from daily import daily
from fresh_ranks import fresh_ranks
from matrix import LONG_STEPS, Cell, Text
from mixtures import MixtureCell

from toolkit.config.recipe import LoraSection, Recipe
from toolkit.engines.base import Engine
from toolkit.model_init import offload_activations
from toolkit.model_init.model_modules import decoder_layers
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]


def cell(
    strategy: str, family: str = "llama", kind: type[Cell] = Cell, *, precision: str = "fp32", accumulation: int = 1
) -> Cell:
    return kind(
        strategy=strategy,
        family=family,
        optimizer="sgd" if "z3" in strategy else "adamw",
        accumulation=accumulation,
        clipped=True,
        tied=family == "gpt2",
        precision=precision,  # type: ignore[arg-type]
    )


CELLS = [
    cell("pp2-z1-every2", accumulation=4),
    cell("dp2-z3-every2", "gpt2"),
    cell("pp4-z1-every2", "gpt2", accumulation=4),
    cell("tp2-z2-sp-every3", "qwen3"),
    cell("tp2-pp2-z1-sp-every2", "gpt_neox", precision="bf16"),
    cell("u2-z2-every2"),
    cell("dp2-ddp-every2", "gpt_neox"),
    cell("dp2-fsdp-every2", precision="bf16"),
    cell("dp2-z3-tiled", "gpt2"),
    cell("dp2-z0-tiled", precision="bf16"),
    cell("tp2-z2-tiled", "qwen3"),
    cell("tp2-dp2-z3-tiled-offacts", "gpt_neox"),
    cell("tp2-pp2-z1-recompute-tiled", "gpt_neox", precision="bf16", accumulation=4),
    cell("u2-z3-tiled-recompute-offacts"),
    cell("u2-dp2-z1-tiled", precision="bf16"),
    cell("dp2-z3-tiled-offload", precision="bf16"),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", daily(CELLS, lambda i, _: i in (0, 8)), ids=str)
def test_it_trains_what_one_process_trains(cell: Cell, outcomes: dict[Cell, Outcome]) -> None:
    assert not outcomes[cell].failure, outcomes[cell].failure


@pytest.mark.whole
@pytest.mark.timeout(1800)
def test_all_of_them_do_over_thirty_steps(text: Text, baselines: Baselines) -> None:
    runs = [CellRun(cell=each, steps=LONG_STEPS) for each in CELLS]
    ended = run_cells(runs, text, baselines, cores=CORES)
    assert not [f"{run.cell}: {outcome.failure}" for run, outcome, _ in ended if outcome.failure]


OFFLOADED = [
    *("dp2-z3-recompute", "tp2-pp2-z1-sp", "dp2-z0", "dp2-z1-every2", "dp2-z2-offload", "tp2-z3-sp-selective"),
    *("pp2-z0-recompute", "u2-z3-recompute", "u2-z1", "dp2-ep2-z1", "dp2-ep2-tp2-z2-recompute"),
]


def bytes_sent(engine: Engine) -> int:
    """To the host, on this rank."""
    by_layer = [getattr(layer, offload_activations.TRANSFERS, None) for layer in decoder_layers(engine.model)]
    return next((transfers.bytes_sent for transfers in by_layer if transfers is not None), 0)


def train_each(recipes: Sequence[Recipe]) -> list[Any]:
    """On every rank: all that there is of each run, to the bit, and bytes that went to the host."""
    results = []
    for recipe in recipes:
        with fresh_ranks():
            run = train_in_memory(recipe, bytes_sent)
        parameters = {name: value.tobytes() for name, value in run.parameters.items()}
        results.append((run.curve.losses, run.curve.grad_norms, parameters, run.inspected))
    return results


def check_offload(
    strategy: str, text: Text, ranks: Ranks, *, precision: str, steps: int, lora: bool = False, compiles: bool = False
) -> None:
    has_experts = "ep2" in strategy
    kind = MixtureCell if has_experts else Cell
    family = "mixtral" if has_experts else "llama"
    recipes = []
    for suffix in ("", "-offacts"):
        trained_cell = cell(f"{strategy}{suffix}", family, kind, precision=precision, accumulation=4)
        recipe = trained_cell.recipe(text, steps=steps)
        model_section = {
            "overrides": recipe.model.overrides | {"num_hidden_layers": 4},
            "lora": LoraSection(r=4) if lora else None,
        }
        recipes.append(recipe.changed({"model": model_section, "train": {"compile": compiles}}))
    results = ranks(train_each, trained_cell.ranks, recipes)
    for (*without, bytes_without), (*offloaded, _) in results:
        assert bytes_without == 0
        assert offloaded == without
    assert max(offloaded[-1] for _, offloaded in results) > 0  # a last stage may have a single layer, which stays


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", daily(OFFLOADED, lambda i, _: i < 1))
def test_offloaded_activations_change_no_bit(strategy: str, text: Text, ranks: Ranks) -> None:
    check_offload(strategy, text, ranks, precision="fp32", steps=2)


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", OFFLOADED)
def test_nor_over_thirty_steps_in_bf16(strategy: str, text: Text, ranks: Ranks) -> None:
    rounds = "z0" not in strategy or "dp2" in strategy
    check_offload(strategy, text, ranks, precision="bf16" if rounds else "fp32", steps=LONG_STEPS)


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["dp2-z3", "tp2-z1", "dp2-z0-recompute"])
def test_nor_beside_adapters(strategy: str, text: Text, ranks: Ranks) -> None:
    check_offload(strategy, text, ranks, precision="bf16", lora=True, steps=3)


COMPILED = ["dp2-z3-recompute", "tp2-pp2-z1-sp", "dp2-z0", "pp2-z0-recompute", "u2-z1", "dp2-ep2-z1"]


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", COMPILED)
def test_nor_where_layers_are_compiled(strategy: str, text: Text, ranks: Ranks) -> None:
    check_offload(strategy, text, ranks, precision="fp32", steps=3, compiles=True)
