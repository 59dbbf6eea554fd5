"""Ways to need less memory for activations train what one plain PyTorch process trains."""

import pytest
from cell_runs import CORES, Baselines, CellRun, Outcome, run_cells
from daily import daily
from matrix import LONG_STEPS, Cell, Text


def cell(strategy: str, family: str = "llama", *, precision: str = "fp32", accumulation: int = 1) -> Cell:
    return Cell(
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
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", daily(CELLS, lambda i, _: i < 1), ids=str)
def test_it_trains_what_one_process_trains(cell: Cell, outcomes: dict[Cell, Outcome]) -> None:
    assert not outcomes[cell].failure, outcomes[cell].failure


@pytest.mark.whole
@pytest.mark.timeout(1800)
def test_all_of_them_do_over_thirty_steps(text: Text, baselines: Baselines) -> None:
    runs = [CellRun(cell=each, steps=LONG_STEPS) for each in CELLS]
    ended = run_cells(runs, text, baselines, cores=CORES)
    assert not [f"{run.cell}: {outcome.failure}" for run, outcome, _ in ended if outcome.failure]
