"""Every strategy trains what one plain PyTorch process trains: loss and gradient norm of each step, and the weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cells import ACTIVE_CLIP, Cell, all_cells, covering_subset

from toolkit.parity import Tolerance, Trial, compare, parameter_differences, whole_difference
from toolkit.train.trial import run_trial

CELLS = all_cells()
DAILY = set(covering_subset(CELLS))
PARAMETER_TOLERANCE = 1e-6
"""Of all weights as one vector. Single tensors: see test_parameters_agree_one_by_one."""


@pytest.fixture(scope="session")
def reference(make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> Callable[[Cell], Trial]:
    """The oracle of a cell: it depends on the mathematics only, so few are needed and each runs once."""
    known: dict[str, Trial] = {}

    def of(cell: Cell) -> Trial:
        changes = cell.mathematics() | {"train__engine": "reference", "batch__micro_size": 16}
        key = repr(changes)
        if key not in known:
            known[key] = ranks(run_trial, 1, make_recipe(**changes))[0]
        return known[key]

    return of


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=str(c), marks=[] if c in DAILY else [pytest.mark.whole]) for c in CELLS]
)
def test_a_strategy_trains_what_one_process_trains(
    cell: Cell,
    reference: Callable[[Cell], Trial],
    make_recipe: Callable[..., Any],
    ranks: Callable[..., list[Any]],
    record_property: Callable[[str, object], None],
) -> None:
    baseline = reference(cell)
    trial: Trial = ranks(run_trial, cell.ranks, make_recipe(**cell.changes()), timeout_seconds=300)[0]
    report = compare(trial.curve, baseline.curve, Tolerance.fp32())
    whole = whole_difference(trial.parameters, baseline.parameters)
    single = parameter_differences(_learning(trial.parameters), _learning(baseline.parameters))
    for name, value in (
        ("loss", report.max_loss_difference),
        ("norm", report.max_norm_difference),
        ("parameters", whole),
        ("parameter", max(single.values())),
    ):
        record_property(name, value)
    assert report.passed, str(report)
    assert whole <= PARAMETER_TOLERANCE


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("tied", [True, False])
def test_clipping_is_active_at_every_step(reference: Callable[[Cell], Trial], optimizer: str, tied: bool) -> None:
    cell = Cell(strategy="z0", ranks=1, accumulation=1, optimizer=optimizer, clipped=True, tied=tied)
    assert min(reference(cell).curve.grad_norms) > ACTIVE_CLIP


def test_the_subset_shows_every_pair_of_options() -> None:
    assert len(DAILY) < len(CELLS) / 8
    assert {c.strategy for c in DAILY} == {c.strategy for c in CELLS}


def _learning(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Without the key biases: softmax does not see them, so their true gradient is zero and Adam amplifies rounding."""
    out = {}
    for name, value in parameters.items():
        if name.endswith("c_attn.bias"):
            query, _, values = np.split(value, 3)
            out[name + ".query"], out[name + ".value"] = query, values
        else:
            out[name] = value
    return out
