"""Every pipeline schedule trains what one plain process trains.

The cells of every day; all of them, for 30 steps: whole_matrix.py, with `--suite schedules`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cell_runs import Outcome
from matrix import Cell
from nonempty import nonempty
from schedules import SCHEDULES, MixtureScheduleCell, schedule_cells

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.parallel.pipeline.weight_gradients import WeightGradients
from toolkit.parity.run.train_in_memory import train_in_memory

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]

DAILY = (
    "pp2-zbv-z0-recompute:llama-sgd-a4-clip-untied-fp32",
    "pp2x2-z0:qwen3_moe-adamw-a4-clip-untied-fp32",
    "tp2-pp2-zbh1-z0:llama-sgd-a4-clip-untied-fp32",
)
"""Random compositions (tests/fuzz) have schedules too."""


@pytest.mark.daily
@pytest.mark.timeout(1800)  # the first test trains the cells of all
@pytest.mark.parametrize("cell", [cell for cell in schedule_cells() if str(cell) in DAILY], ids=str)
def test_a_schedule_trains_what_one_process_trains(cell: Cell, outcomes: dict[Cell, Outcome]) -> None:
    assert not outcomes[cell].failure, outcomes[cell].failure


def test_the_cells_are_legal_and_those_of_every_day_exist() -> None:
    cells = list(schedule_cells())
    assert set(DAILY) <= {str(cell) for cell in cells}
    dense = [cell for cell in cells if not isinstance(cell, MixtureScheduleCell)]  # a mixture's config is written first
    assert not [problem for cell in dense for problem in cell.problems()]
    assert {cell.where.schedule for cell in cells} == {"1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"}
    assert len(SCHEDULES) == 5


def dropping(schedule: str) -> dict[str, Any]:
    """An odd number of micro-batches, packed documents, dropout and validation, with four layers."""
    fields = Strategy.parse(schedule).sections(1)["parallel"]
    return {
        "parallel": {name: value for name, value in fields.items() if name != "dp"},
        "batch": {"global_batch_size": 10, "micro_batch_size": 2},
        "train__steps": 4,
        "train__eval_every": 2,
        "data__document_masking": True,
        "overrides__n_layer": 4,
        "overrides__resid_pdrop": 0.1,
        "overrides__embd_pdrop": 0.1,
        "overrides__attn_pdrop": 0.1,
    }


@pytest.mark.parametrize("schedule", ["pp2-zbh1-z1", "pp2x2-z1", "pp2-zbv-z0"])
def test_dropout_and_an_odd_number_of_micro_batches_change_nothing(
    make_recipe: Make, ranks: Ranks, schedule: str
) -> None:
    changes = dropping(schedule)
    alone = ranks(train_in_memory, 1, make_recipe(**changes | {"parallel": {}, "train__engine": "reference"}))[0]
    split = ranks(train_in_memory, 2, make_recipe(**changes))[0]
    for found, expected in nonempty(
        [(split.curve.losses, alone.curve.losses), (split.curve.grad_norms, alone.curve.grad_norms)]
    ):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=0)
    assert split.batches == alone.batches


def _train_with(fault: str, recipe: Recipe) -> Any:
    """Train with the weight gradients of the second micro-batch lost or doubled."""
    compute = WeightGradients.compute

    def planted(queue: WeightGradients, stage: int, micro_batch: int) -> None:
        again = list(queue._pending[stage, micro_batch])
        if micro_batch != 1:
            compute(queue, stage, micro_batch)
        elif fault == "lost":
            del queue._pending[stage, micro_batch]
        else:
            compute(queue, stage, micro_batch)
            queue._pending[stage, micro_batch] = again
            compute(queue, stage, micro_batch)

    WeightGradients.compute = planted  # type: ignore[method-assign]
    return train_in_memory(recipe)


@pytest.mark.parametrize("fault", ["lost", "doubled"])
def test_a_weight_gradient_that_is_lost_or_doubled_is_seen(make_recipe: Make, ranks: Ranks, fault: str) -> None:
    changes = dropping("pp2-zbh1-z1")
    right = ranks(train_in_memory, 2, make_recipe(**changes))[0]
    wrong = ranks(_train_with, 2, fault, make_recipe(**changes))[0]
    assert wrong.curve.losses[0] == right.curve.losses[0]
    assert abs(wrong.curve.grad_norms[0] / right.curve.grad_norms[0] - 1) > 1e-3
