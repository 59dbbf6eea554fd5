"""`dstk compare` in bf16 raises no false alarm: right strategies of four families, each against its own kind of bf16.

The comparison is that of the command line with --shrink. Daily a few strategies of GPT-2, the others with `whole`.
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.parity.comparison import StrategyResult
from toolkit.parity.run.compare_strategies import compare_strategies, for_comparison, plan
from toolkit.parity.run.shrink import shrink

FAMILIES = {"gpt2": "gpt2", "llama": "llama-3.2-1b", "qwen3": "qwen3-0.6b", "gpt_neox": "pythia-160m"}
STRATEGIES = (
    *("z0", "z1", "z2", "z3", "z1-offload", "z3-offload", "dp4-z2", "z1-recompute", "z2-m1", "ddp", "fsdp"),
    *("tp2", "tp2-sp", "tp2-z3-sp", "tp4-z2", "pp2", "pp4", "tp2-pp2-sp", "u2", "u2-z3"),
)
DAILY = {("gpt2", "z3"), ("gpt2", "tp2-sp"), ("gpt2", "fsdp")}
CASES = tuple(product(FAMILIES, STRATEGIES))

Results = Callable[[str], dict[str, StrategyResult]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, make_recipe: Callable[..., Recipe], ranks: object) -> Results:
    """The results of all selected strategies of a family, which share their baselines."""
    cases = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]

    @cache
    def of(family: str) -> dict[str, StrategyResult]:
        model = {"name_or_path": FAMILIES[family]}
        recipe = for_comparison(shrink(make_recipe(model=model, precision="bf16")), steps=10, dropout=False)
        names = [case["name"] for case in cases if case.get("family") == family and case.get("name") in STRATEGIES]
        strategies = [Strategy.parse(name) for name in names]
        baselines = [Strategy.parse(strategy.baseline("bf16")) for strategy in strategies]
        jobs, own = plan(recipe, strategies, 2), plan(recipe, baselines, 2)
        found = compare_strategies(recipe, jobs, own, title=family, rounding_seeds=2, timeout_seconds=600)
        return {result.name: result for result in found.results}

    return of


@pytest.mark.timeout(1800)  # the first test of a family trains the strategies of all
@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*case, marks=[] if case in DAILY else [pytest.mark.whole]) for case in CASES],
)
def test_a_right_strategy_in_bf16_raises_no_alarm(family: str, name: str, results: Results) -> None:
    result = results(family)[name]
    assert result.outcome in ("same", "cannot tell"), f"{result.error}\n{result.diagnosis}\n{result.result}"


def test_there_are_eighty() -> None:
    assert len(set(CASES)) == 80
    assert set(CASES) >= DAILY
