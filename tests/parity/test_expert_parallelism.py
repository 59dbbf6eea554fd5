"""Mixtures of experts train what one plain PyTorch process trains, wherever their experts are."""

import pytest
from cell_runs import Outcome
from daily import daily
from matrix import Cell
from mixtures import MIXTURES, MixtureCell

DAILY = (
    *("dp4-ep2-z1", "dp4-ep2-z3", "dp4-ep4-z2", "pp2-dp2-ep2-z1"),
    *("tp2-z1-inner", "tp2-dp2-ep2-z3", "tp2-dp2-ep2-z2-sp"),
)
LAYOUTS = (
    *DAILY,
    *("dp4-ep2-z0", "dp4-ep2-z2", "tp2-dp2-ep2-z1", "tp2-pp2-dp2-ep2-z1", "tp2-z3-inner-sp"),
    *("dp2-ep2-z1-recompute", "dp2-ep2-z2-offload"),
)


def _cells() -> list[MixtureCell]:
    return [
        MixtureCell(
            strategy=strategy,
            family=family,
            optimizer=optimizer,
            accumulation=2,
            clipped=True,
            tied=False,
            precision="fp32",
        )
        for strategy in LAYOUTS
        for family in MIXTURES
        for optimizer in ("sgd", "adamw")
    ]


def _is_daily(number: int, cell: MixtureCell) -> bool:
    """Each family in a layout of its own, with SGD, whose updates show a factor that Adam hides; one with Adam."""
    if cell.strategy not in DAILY:
        return False
    place = DAILY.index(cell.strategy)
    return cell.family == list(MIXTURES)[place] and (cell.optimizer == "sgd") == (place > 0)


@pytest.mark.timeout(1800)  # the first test trains the cells of all
@pytest.mark.parametrize("cell", daily(_cells(), _is_daily), ids=str)
def test_a_mixture_trains_what_one_process_trains(cell: MixtureCell, outcomes: dict[Cell, Outcome]) -> None:
    assert not outcomes[cell].failure, outcomes[cell].failure
