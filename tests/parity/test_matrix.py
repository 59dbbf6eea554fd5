"""The regression matrix: every strategy trains what one plain PyTorch process trains. The daily cells, and the matrix.

The whole of it: whole_matrix.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import page
import pytest
from cell_runs import CORES, Baselines, CellRun, Outcome, run_cells, run_of
from fresh_ranks import fresh_ranks
from matrix import (
    ACCUMULATIONS,
    FAMILIES,
    LAYOUTS,
    OPTIMIZERS,
    PRECISIONS,
    STEPS,
    STRATEGIES,
    Cell,
    Text,
    combinations_of,
    daily_cells,
    legal_cells,
    long_cells,
    paired_cells,
)
from nonempty import nonempty
from results import Result, State, read_results

from toolkit.engines import deepspeed_engine
from toolkit.parallel.tensor import collectives
from toolkit.parity import ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def selected_cells(request: pytest.FixtureRequest) -> list[Cell]:
    """The daily cells of the selected strategies."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    strategies = {item.callspec.params.get("strategy") for item in items}
    return [cell for cell in daily_cells() if cell.strategy in strategies]


@pytest.mark.daily
@pytest.mark.timeout(1800)  # the first test trains the cells of all
@pytest.mark.parametrize("strategy", STRATEGIES)  # daily cells take seconds to choose, in each process that collects
def test_a_strategy_trains_what_one_process_trains(strategy: str, outcomes: dict[Cell, Outcome]) -> None:
    of_strategy = nonempty((cell, outcome) for cell, outcome in outcomes.items() if cell.strategy == strategy)
    failures = [f"{cell}:\n{outcome.failure}" for cell, outcome in of_strategy if outcome.failure]
    assert not failures, "\n".join(failures)


class TestTheMatrix:
    def test_it_has_all_legal_combinations_of_its_strategies(self) -> None:
        kept = [cell for cell in legal_cells() if cell.strategy in STRATEGIES]
        # 24 strategies x 4 families x 2^5; three without ZeRO have tp or pp, which bf16 does not allow.
        assert len(kept) == 24 * 128 + 3 * 64
        assert len(legal_cells()) == 3912

    def test_combinations_are_rejected_for_bf16_without_zero_only(self) -> None:
        combinations = [cell for strategy in (*STRATEGIES, *LAYOUTS) for cell in combinations_of(strategy)]
        rejected = {cell: problems for cell in combinations if (problems := cell.problems())}
        assert len(combinations) == 128 * (len(STRATEGIES) + len(LAYOUTS))
        assert rejected
        for cell, problems in rejected.items():
            assert cell.precision == "bf16", cell
            assert all("zero_stage=0" in problem and "bf16" in problem for problem in problems), cell

    def test_every_value_of_every_option_occurs_with_every_strategy(self) -> None:
        assert len({*STRATEGIES, *LAYOUTS}) == 102
        for strategy in (*STRATEGIES, *LAYOUTS):
            cells = [cell for cell in legal_cells() if cell.strategy == strategy]
            assert {cell.family for cell in cells} == set(FAMILIES), strategy
            assert {cell.optimizer for cell in cells} == set(OPTIMIZERS), strategy
            assert {cell.accumulation for cell in cells} == set(ACCUMULATIONS), strategy
            assert {cell.clipped for cell in cells} == {cell.tied for cell in cells} == {True, False}, strategy
            assert {cell.mathematics.packing for cell in cells} == {"packed", "padded"}, strategy
            assert {cell.precision for cell in cells} >= {"fp32"}, strategy

    def test_it_has_every_zero_stage_and_every_layout(self) -> None:
        names = {*STRATEGIES, *LAYOUTS}
        places = ("z0", "z1", "z2", "z3", "z1-offload", "z2-offload", "z3-offload", "ddp", "fsdp")
        wanted = {f"dp{dp}-{place}" for dp, place in product((1, 2, 4), places)}
        for zero, sp, dp in product((0, 1, 2, 3), ("", "-sp"), ("", "-dp2")):
            wanted |= {f"tp{tp}{dp}-z{zero}{sp}" for tp in (2, 4)}
        for zero in (0, 1):
            wanted |= {f"pp{pp}{dp}-z{zero}" for pp, dp in product((2, 4), ("", "-dp2"))}
            wanted |= {f"tp2-pp2-dp2-z{zero}{sp}" for sp in ("", "-sp")}
        wanted |= {f"u2-z{zero}" for zero in (0, 1, 2, 3)}
        assert wanted <= names
        assert len(names) == len(STRATEGIES) + len(LAYOUTS)

    def test_cell_names_are_unique(self) -> None:
        assert len({str(cell) for cell in legal_cells()}) == len(legal_cells())


def pairs_of_parts(cells: Sequence[Cell]) -> set[Any]:
    return {pair for cell in cells for pair in combinations(enumerate((*cell.parts, *cell.options)), 2)}


class TestTheDailyCells:
    def test_they_cover_every_strategy_and_every_pair_of_options_and_parts_of_a_strategy(self) -> None:
        full = [cell for cell in legal_cells() if cell.strategy in STRATEGIES]
        assert {cell.strategy for cell in daily_cells()} == set(STRATEGIES)
        assert pairs_of_parts(daily_cells()) == pairs_of_parts(full)

    def test_the_long_ones_cover_every_pair_of_options_and_parts_of_a_strategy(self) -> None:
        assert long_cells() < set(paired_cells())
        assert pairs_of_parts(sorted(long_cells(), key=str)) == pairs_of_parts(paired_cells())

    def test_those_that_they_are_chosen_from_cover_every_pair_of_options_and_strategies(self) -> None:
        def pairs(cells: Sequence[Cell]) -> set[Any]:
            return {p for cell in cells for p in combinations(enumerate((cell.strategy, *cell.options)), 2)}

        full = [cell for cell in legal_cells() if cell.strategy in STRATEGIES]
        assert pairs(paired_cells()) == pairs(full)

    def test_half_of_them_have_micro_batches_with_different_numbers_of_targets(self) -> None:
        padded = sum(cell.mathematics.packing == "padded" for cell in daily_cells())
        assert 0.4 < padded / len(daily_cells()) < 0.6


def bits(run: ParityRun) -> Any:
    return run.curve.losses, run.curve.grad_norms, {k: v.tobytes() for k, v in run.parameters.items()}


def train_in_sequence(cells: Sequence[Cell], text: Text) -> list[Any]:
    """On every rank."""
    found = []
    for cell in cells:
        with fresh_ranks():
            found.append(bits(train_in_memory(cell.recipe(text, steps=2))))
    return found


def simple(strategy: str, **options: Any) -> Cell:
    chosen = {"family": "llama", "optimizer": "adamw", "accumulation": 1, "precision": "bf16"} | options
    return Cell(strategy=strategy, clipped=True, tied=True, **chosen)


def test_a_training_is_the_same_to_the_bit_whatever_ran_before_it_in_its_ranks(text: Text, ranks: Ranks) -> None:
    names = ("dp2-z1", "dp2-z3", "dp2-ddp", "dp2-fsdp", "tp2-z1-sp", "pp2-z1", "u2-z2")
    cells = [simple(name) for name in names]
    forth, back = (ranks(train_in_sequence, 2, order, text)[0] for order in (cells, cells[::-1]))
    alone = [ranks(train_in_sequence, 2, [cell], text)[0][0] for cell in cells]
    assert forth == alone
    assert back[::-1] == alone


class TestPlantedFaults:
    """Planted mistakes, in ranks that are forked after the baselines were trained."""

    @pytest.fixture
    def failed_checks(self, text: Text, baselines: Baselines) -> Callable[..., dict[str, tuple[str, ...]]]:
        def of(*cells: Cell) -> dict[str, tuple[str, ...]]:
            ended = run_cells([CellRun(cell=cell, steps=STEPS) for cell in cells], text, baselines, cores=CORES)
            return {run.cell.strategy: outcome.failed_checks for run, outcome, _ in ended}

        return of

    @pytest.fixture(autouse=True)
    def trained(self, baselines: Baselines) -> None:
        baselines.train(
            CellRun(cell=simple("dp2-z1", precision=precision), steps=STEPS) for precision in ("fp32", "bf16")
        )

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_a_loss_that_is_divided_by_the_replicas_twice(
        self, failed_checks: Any, monkeypatch: pytest.MonkeyPatch, precision: str
    ) -> None:
        init = deepspeed_engine.DeepSpeedEngine.__init__

        def halved(engine: Any, *arguments: Any, **keywords: Any) -> None:
            init(engine, *arguments, **keywords)
            engine.dp = 1

        monkeypatch.setattr(deepspeed_engine.DeepSpeedEngine, "__init__", halved)
        found = failed_checks(*(simple(f"dp2-z{stage}", precision=precision) for stage in range(4)))
        assert all({"gradient", "norm"} <= set(raised) for raised in nonempty(found.values()))

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_a_missing_f(self, failed_checks: Any, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
        monkeypatch.setattr(collectives, "copy_to_tensor_ranks", lambda x, *_, **__: x)
        found = failed_checks(simple("tp2-z1", precision=precision), simple("dp2-z1", precision=precision))
        assert "gradient" in found["tp2-z1"]
        assert found["dp2-z1"] == ()

    def test_a_weight_decay_of_biases_and_norms(self, failed_checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def one_group(named_parameters: Any, section: Any) -> Any:
            trained = [p for _, p in named_parameters if p.requires_grad]
            return [{"params": trained, "weight_decay": section.weight_decay}]

        monkeypatch.setattr(deepspeed_engine, "parameter_groups", one_group)
        found = failed_checks(simple("dp2-z1", precision="fp32"))
        assert "parameters" in found["dp2-z1"]
        assert "gradient" not in found["dp2-z1"]


class TestThePage:
    @pytest.fixture
    def state(self) -> State:
        return State(commit="abc", code="def", has_changes=False, versions="torch 2")

    @pytest.fixture
    def results(self, state: State) -> dict[str, Result]:
        outcome = Outcome(loss=1e-7, norm=2e-7, parameters=3e-7, gradient=4e-7)
        found = (Result.of(run_of(cell), outcome, 1.0, state) for cell in legal_cells())
        return {result.cell: result for result in found}

    def page(self, state: State, results: dict[str, Result]) -> str:
        return page.page(state, [run_of(cell) for cell in legal_cells()], results)

    def test_it_lists_every_strategy_the_commit_and_the_versions(
        self, state: State, results: dict[str, Result]
    ) -> None:
        text = self.page(state, results)
        assert all(f"| {name} | fp32 |" in text for name in (*STRATEGIES, *LAYOUTS))
        assert "commit abc, torch 2" in text

    def test_a_missing_cell_is_refused(self, state: State, results: dict[str, Result]) -> None:
        del results[str(legal_cells()[7])]
        with pytest.raises(page.IncompleteError, match="1 of 3912 cells have no result"):
            self.page(state, results)

    def test_a_failed_cell_is_refused(self, state: State, results: dict[str, Result]) -> None:
        name = str(legal_cells()[7])
        results[name] = replace(results[name], outcome=Outcome(failure="differs"))
        with pytest.raises(page.IncompleteError, match="1 of 3912 cells failed"):
            self.page(state, results)

    def test_it_is_of_files_that_are_here(self) -> None:
        assert len(State.now().code) == 12

    def test_it_lists_every_commit(self, state: State, results: dict[str, Result]) -> None:
        name = str(legal_cells()[7])
        results[name] = replace(results[name], state=replace(state, commit="other", has_changes=True))
        assert "commits abc and other with uncommitted changes, torch 2" in self.page(state, results)

    def test_a_result_of_another_recipe_does_not_count(self, results: dict[str, Result]) -> None:
        cell = next(cell for cell in legal_cells() if cell.mathematics.rounding == "autocast")
        run, result = run_of(cell), results[str(cell)]
        assert result.is_of(run)
        assert not result.is_of(replace(run, steps=run.steps + 1))
        assert not replace(result, recipes=results[str(legal_cells()[0])].recipes).is_of(run)

    def test_each_kind_of_bf16_has_a_baseline_of_its_own(self) -> None:
        kinds = {cell.strategy: cell.mathematics.rounding for cell in legal_cells() if cell.precision == "bf16"}
        assert {kinds[name] for name in ("dp2-z0", "dp2-ddp", "u2-z0")} == {"autocast"}
        assert {kinds[name] for name in ("dp2-z1", "dp2-z3-offload", "tp2-z1", "pp2-z1")} == {"weights"}
        assert kinds["dp2-fsdp"] == "fsdp"

    def test_a_result_round_trips(self, results: dict[str, Result], tmp_path: Path) -> None:
        first, second, *_ = results.values()
        (tmp_path / "shard-1-of-1.jsonl").write_text(first.line() + second.line() + first.line()[:50])
        assert list(read_results(tmp_path)) == [first, second]
