"""Ranks that share sequences, or attend in blocks to whole ones, train what one plain PyTorch process trains.

The cells of every day; all of them: whole_matrix.py, with `--suite context`.
"""

import pytest
from cell_runs import Outcome, TrainedCell
from context_cells import DATA, FAMILIES, STRATEGIES, ContextCell, context_cells

from toolkit.config.strategy import Strategy

DAILY = [
    ContextCell(strategy="cp2-tp2-z3-sp", family="gemma3_text", data="documents"),
    ContextCell(strategy="cp2-pp2-z1", family="qwen3", data="documents", exchange="ring"),
    ContextCell(strategy="cp2-z3-offload-recompute", data="documents", is_tiled=True),
]
MORE = [
    ContextCell(strategy="cp4-z2", family="mistral", data="documents", exchange="ring"),
    ContextCell(strategy="cp2-tp2-z1", family="gpt_oss", exchange="ring", optimizer="adamw"),
    ContextCell(strategy="cp2-ep2-z1", family="qwen3_moe", data="documents"),
    ContextCell(strategy="u2-cp2-z1", family="gpt_oss", exchange="ring"),
    ContextCell(strategy="u2-cp1-pp2-z1", family="llama", data="documents"),
    ContextCell(strategy="dp2-tp2-z2", family="gemma3_text", data="documents"),
    ContextCell(strategy="pp2-z1", family="qwen3_moe", data="padded chats"),
    ContextCell(strategy="cp2-z0"),
    ContextCell(strategy="cp2-z1", family="gpt2", data="padded chats", optimizer="adamw"),
    ContextCell(strategy="dp2-cp2-z3-recompute", family="gemma2", data="documents"),
    ContextCell(strategy="cp2-pp2-z0-recompute", family="olmo2", data="padded chats"),
]


@pytest.mark.daily
@pytest.mark.timeout(1800)  # the first test trains the cells of all
@pytest.mark.parametrize("cell", [*DAILY, *(pytest.param(cell, marks=pytest.mark.whole) for cell in MORE)], ids=str)
def test_a_layout_trains_what_one_process_trains(cell: ContextCell, outcomes: dict[TrainedCell, Outcome]) -> None:
    assert not outcomes[cell].failure, outcomes[cell].failure


def test_every_strategy_has_every_family_and_kind_of_data_that_one_process_trains() -> None:
    cells = list(context_cells())
    assert len({str(cell) for cell in cells}) == len(cells)
    triples = {(cell.strategy, cell.family, cell.data) for cell in cells}
    strategies = [strategy for strategy, _ in STRATEGIES if Strategy.parse(strategy).ep == 1]
    missing = {
        (strategy, family, data)
        for strategy in strategies
        for family in FAMILIES
        for data in DATA
        if (strategy, family, data) not in triples
    }
    assert {(family, data) for _, family, data in missing} == {("gpt_oss", "documents")}
    exchanges = {(cell.family, cell.data, cell.exchange) for cell in cells if cell.where.cp > 1}
    assert {(family, data) for family, data, exchange in exchanges if exchange == "ring"} == {
        (family, data) for family, data, exchange in exchanges if exchange == "gather"
    }
