"""Optimizers of whole matrices train what one plain PyTorch process trains, wherever the pieces of those are."""

from itertools import product

import pytest
from cell_runs import Outcome
from daily import daily
from matrix import FAMILIES, Cell
from mixtures import MixtureCell

LAYOUTS = (
    *("dp2-z0", "dp2-z1", "dp2-z2", "dp2-z3", "dp4-z1", "dp2-ddp", "dp2-fsdp", "u2-z1"),
    *("tp2-z0", "tp2-z3-sp", "tp2-dp2-z1-sp", "tp4-z2", "pp2-z0", "pp2-z1", "tp2-pp2-dp2-z1-sp"),
)
OF_MIXTURES = (
    *(("dp4-ep2-z0", "mixtral"), ("dp4-ep2-z3", "mixtral"), ("dp4-ep4-z2", "gpt_oss")),
    *(("pp2-dp2-ep2-z1", "deepseek_v3"), ("tp2-dp2-ep2-z3", "qwen3_moe"), ("tp2-z1-inner", "mixtral")),
)
DAILY = {
    "muon": (
        *(("dp4-z1", "qwen3"), ("dp2-z3", "gpt2"), ("tp4-z2", "llama"), ("tp2-pp2-dp2-z1-sp", "gpt2")),
        OF_MIXTURES[1],
    ),
    "adafactor": (("tp2-z3-sp", "llama"), ("pp2-dp2-ep2-z1", "deepseek_v3")),
}


def _cells() -> list[Cell]:
    dense = [
        Cell(strategy=layout, family=family, precision=precision, optimizer=optimizer, **_OPTIONS)
        for layout, family, precision, optimizer in product(LAYOUTS, FAMILIES, ("fp32", "bf16"), DAILY)
    ]
    legal = [cell for cell in dense if not cell.problems()]
    options = _OPTIONS | {"tied": False, "precision": "fp32"}
    return legal + [
        MixtureCell(strategy=layout, family=family, optimizer=optimizer, **options)
        for (layout, family), optimizer in product(OF_MIXTURES, DAILY)
    ]


_OPTIONS = {"accumulation": 2, "clipped": True, "tied": True}


def _is_daily(number: int, cell: Cell) -> bool:
    return cell.precision == "fp32" and (cell.strategy, cell.family) in DAILY[cell.optimizer]


@pytest.mark.timeout(1800)  # the first test trains the cells of all
@pytest.mark.parametrize("cell", daily(_cells(), _is_daily), ids=str)
def test_a_cell_trains_what_one_process_trains(cell: Cell, outcomes: dict[Cell, Outcome]) -> None:
    assert not outcomes[cell].failure, outcomes[cell].failure
