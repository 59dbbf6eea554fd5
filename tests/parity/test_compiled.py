"""Runs with compiled decoder layers train what one plain, uncompiled process trains, in every kind of layout."""

from collections.abc import Iterator
from typing import Any

import pytest
from cell_runs import CORES, Baselines, CellRun, Outcome, run_cells
from matrix import LONG_STEPS, STEPS, Cell, Text
from mixtures import MixtureCell
from schedules import MixtureScheduleCell, ScheduleCell

from toolkit.config.recipe import Recipe


class Compiled(Cell):
    """The cell with train.compile."""

    def recipe(self, text: Text, *, steps: int) -> Recipe:
        recipe = super().recipe(text, steps=steps)
        return recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": True})})


class CompiledSchedule(Compiled, ScheduleCell):
    """With a pipeline schedule, and a layer for each stage."""


class CompiledMixture(Compiled, MixtureCell):
    """With experts, which are one operation of a graph."""


class CompiledScheduledMixture(Compiled, MixtureScheduleCell):
    """With experts and a pipeline schedule."""


DENSE = {
    "llama": (
        *("tp2-z3-sp", "tp2-z1", "dp2-z1", "dp2-z3", "dp2-z3-recompute", "dp2-ddp", "dp2-fsdp", "u2-z1", "u2-z3"),
        *("tp2-dp2-z1-sp", "tp2-pp2-dp2-z1-sp"),
    ),
    "gpt2": ("pp2-z1-recompute", "dp2-z0", "dp2-z2-offload", "pp4-z1", "tp2-z1-sp-recompute", "u2-z2"),
}
SCHEDULED = (
    "pp2-1f1b-z1",
    "pp2-gpipe-z0-recompute",
    "pp2x2-z1",
    "tp2-pp2x2-z1-sp",
    "pp2-zbh1-z1",
    "pp4-zbh1-z0-recompute",
    "pp2-zbv-z1-recompute",
    "tp2-pp2-zbv-z1-sp",
    "pp2-zbh1-dp2-z1",
)
EXPERTS = ("dp2-ep2-z1", "dp2-ep2-z3-recompute", "tp2-dp2-ep2-z2-sp", "pp2-dp2-ep2-z1")
DAILY = ("tp2-z3-sp",)


def _cells() -> list[Cell]:
    fixed: dict[str, Any] = {"optimizer": "sgd", "accumulation": 4, "clipped": True, "tied": False}
    dense = [(strategy, family) for family, strategies in DENSE.items() for strategy in strategies]
    return [
        *(Compiled(strategy=strategy, family=family, precision="fp32", **fixed) for strategy, family in dense),
        *(CompiledSchedule(strategy=place, family="llama", precision="fp32", **fixed) for place in SCHEDULED),
        CompiledSchedule(strategy="pp2-zbv-z1", family="llama", precision="bf16", **fixed),
        CompiledScheduledMixture(strategy="pp2-zbh1-dp2-ep2-z1", family="mixtral", precision="fp32", **fixed),
        *(Compiled(strategy=place, family="llama", precision="bf16", **fixed) for place in ("dp2-z0", "tp2-z1-sp")),
        *(CompiledMixture(strategy=place, family="mixtral", precision="fp32", **fixed) for place in EXPERTS),
    ]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, text: Text, baselines: Baselines) -> Iterator[dict[Cell, Outcome]]:
    """Graphs are captured, but run as they are: translating them takes seconds each (test_compiled_layers.py)."""
    from toolkit.engines import compiled_layers

    selected = [item.callspec.params.get("cell") for item in request.session.items if hasattr(item, "callspec")]
    cells = [cell for cell in dict.fromkeys(selected) if isinstance(cell, Compiled)]
    steps = STEPS if len(cells) <= len(DAILY) else LONG_STEPS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_layers, "_OPTIONS", {"backend": "aot_eager"})
        ended = run_cells([CellRun(cell=cell, steps=steps) for cell in cells], text, baselines, cores=CORES)
        yield {run.cell: outcome for run, outcome, _ in ended}


@pytest.mark.timeout(1800)  # the first test trains the cells of all
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=pytest.mark.daily if cell.strategy in DAILY else pytest.mark.whole)
        for cell in _cells()
    ],
)
def test_compiled_layers_train_what_one_process_trains(cell: Cell, compiled: dict[Cell, Outcome]) -> None:
    assert not compiled[cell].failure, compiled[cell].failure
