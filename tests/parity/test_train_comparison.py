"""How `dstk compare` runs strategies: which runs there are, and what happens if one fails."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import baseline, with_losses

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.errors import ConfigError, LayoutError, ModelError, NonFiniteError, RecipeError, RunError, ToolkitError
from toolkit.launch.local_ranks import RankFailedError
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity.run import compare_strategies as comparison
from toolkit.parity.run.compare_strategies import (
    baseline_reruns,
    compare_strategies,
    for_comparison,
    plan,
)

MakeRecipe = Callable[..., Recipe]
TRACEBACK = RankFailedError("rank 1 failed:\nTraceback (most recent call last):\n  File …\nValueError: of mine\n")


def jobs(recipe: Recipe, names: str, nproc: int = 2) -> list[comparison.StrategyRun]:
    return plan(recipe, Strategy.parse_list(names), nproc)


@pytest.mark.parametrize(
    ("name", "sizes", "micro_sizes"),
    [
        ("reference", (16, 4), {4, 1}),
        ("reference", (16, 1), {1, 2}),
        ("reference", (15, 1), {1, 3}),
        ("dp2-z1", (6, 1), {1, 3}),
        ("dp2-z1", (2, 1), {1}),
        ("tp2", (16, 2), {2, 1}),
    ],
)
def test_the_baseline_is_run_again_in_micro_batches_that_divide_its_share(
    make_recipe: MakeRecipe, name: str, sizes: tuple[int, int], micro_sizes: set[int]
) -> None:
    recipe = make_recipe(batch__global_batch_size=sizes[0], batch__micro_batch_size=sizes[1])
    (first,) = jobs(recipe, name)
    reruns = baseline_reruns(first, 1)
    assert {job.recipe.batch.micro_batch_size for job in reruns} == micro_sizes
    for job in reruns:
        job.recipe.resolve_batch(job.recipe.layout(job.ranks))


def test_each_seed_of_rounding_is_a_run(make_recipe: MakeRecipe) -> None:
    (first,) = jobs(make_recipe(), "reference")
    assert [job.rounding_seed for job in baseline_reruns(first, 3)] == [None, None, 1, 2, 3]


def test_every_strategy_that_cannot_run_is_named(make_recipe: MakeRecipe) -> None:
    with pytest.raises(RecipeError) as raised:
        jobs(make_recipe(), "z1,m3,tp3")
    assert [problem.partition(":")[0] for problem in raised.value.problems] == ["strategy m3", "strategy tp3"]


def test_what_only_the_config_of_a_model_tells_is_refused_too(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Of a family whose shape is not known, so that the rules of recipes cannot tell."""
    config = tiny_config("afmoe", vocab_size=321)
    config.num_attention_heads = 6
    config.save_pretrained(tmp_path)
    with pytest.raises(RecipeError) as raised:
        jobs(make_recipe(model={"name_or_path": str(tmp_path)}), "tp2,tp4,tp4-sp,tp4")
    assert raised.value.problems == [
        f"strategy {name}: parallel.tp=4 with model_type=afmoe: 6 heads are not divisible by it. Choose another one."
        for name in ("tp4", "tp4-sp")
    ]


class TestARecipeForComparison:
    def test_has_a_short_warm_up(self, make_recipe: MakeRecipe) -> None:
        recipe = make_recipe(schedule={"name": "cosine", "warmup_steps": 30}, train__steps=100)
        assert for_comparison(recipe, steps=20, dropout=False).schedule.warmup_steps == 2

    def test_has_no_warm_up_where_the_recipe_has_none(self, make_recipe: MakeRecipe) -> None:
        recipe = make_recipe(schedule={"name": "cosine", "warmup_steps": 0})
        assert for_comparison(recipe, steps=20, dropout=False).schedule.warmup_steps == 0

    @pytest.mark.parametrize("name", ["cosine", "constant_with_warmup", "warmup_stable_decay", "linear"])
    @pytest.mark.parametrize("steps", [2, 5, 30])
    def test_breaks_no_rule(self, make_recipe: MakeRecipe, name: str, steps: int) -> None:
        recipe = make_recipe(schedule={"name": name, "warmup_steps": 3}, train__eval_every=5)
        assert jobs(for_comparison(recipe, steps=steps, dropout=False), "z1,reference")

    def test_draws_no_masks(self, make_recipe: MakeRecipe) -> None:
        recipe = make_recipe(overrides__resid_pdrop=0.1, overrides__attn_pdrop=0.2)
        overrides = for_comparison(recipe, steps=5, dropout=False).model.overrides
        assert (overrides["resid_pdrop"], overrides["attn_pdrop"]) == (0.0, 0.0)

    def test_draws_them_with_the_option(self, make_recipe: MakeRecipe) -> None:
        recipe = make_recipe(overrides__resid_pdrop=0.1)
        assert for_comparison(recipe, steps=5, dropout=True).model.overrides["resid_pdrop"] == 0.1


class Ranks:
    """Stands for `run_jobs`: ends each job with what it is told, and knows whether it was closed."""

    def __init__(self, outcomes: dict[int, Any]) -> None:
        self.outcomes, self.ended, self.closed = outcomes, 0, False

    def __call__(self, calls: Any, **options: Any) -> Generator[tuple[int, Any, float], None, None]:
        try:
            for number in range(len(calls)):
                self.ended += 1
                yield number, self.outcomes.get(number, [baseline()]), 1.0
        finally:
            self.closed = True


@pytest.fixture
def compare(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def call(ranks: Ranks, **options: Any) -> Any:
        monkeypatch.setattr(comparison, "run_jobs", ranks)
        (first,) = jobs(make_recipe(), "reference")
        return compare_strategies(
            make_recipe(), jobs(make_recipe(), "z1,tp2"), [first, first], title="t", rounding_seeds=1, **options
        )

    return call


# The jobs: 0 the baseline, 1 to 3 its reruns, 4 and 5 the strategies.
def test_a_failed_strategy_has_a_result(compare: Callable[..., Any]) -> None:
    found = compare(Ranks({5: TRACEBACK}))
    assert [result.outcome for result in found.results] == ["same", "failed"]
    assert found.results[1].error == "rank 1 failed: ValueError: of mine"


def test_a_strategy_that_differs_has_a_result(compare: Callable[..., Any]) -> None:
    other = with_losses(baseline(), lambda step, loss: loss * 1.01)
    assert [result.outcome for result in compare(Ranks({4: [other]})).results] == ["differs", "same"]


@pytest.mark.parametrize(
    "error", [LayoutError("it cannot be"), ModelError("it cannot be"), ConfigError("it cannot be")]
)
def test_what_ranks_refuse_while_they_build_the_model_is_bad_input(
    compare: Callable[..., Any], error: ToolkitError
) -> None:
    ranks = Ranks({4: error})
    with pytest.raises(RecipeError, match=r"^strategy z1: it cannot be$") as raised:
        compare(ranks)
    assert raised.value.exit_code == 2
    assert (ranks.ended, ranks.closed) == (5, True)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_baseline_that_fails_ends_all_at_once(compare: Callable[..., Any], number: int) -> None:
    ranks = Ranks({number: TRACEBACK})
    with pytest.raises(RunError, match=r"^the baseline reference .*failed.*: rank 1 failed: ValueError: of mine\. "):
        compare(ranks)
    assert (ranks.ended, ranks.closed) == (number + 1, True)


def test_an_error_of_the_user_is_raised_unchanged(compare: Callable[..., Any]) -> None:
    error: ToolkitError = NonFiniteError("the loss is nan on rank 0")
    with pytest.raises(NonFiniteError, match="the loss is nan on rank 0"):
        compare(Ranks({0: error}))


def test_ranks_are_stopped_if_the_progress_callback_raises(compare: Callable[..., Any]) -> None:
    def interrupted(name: str, outcome: str, seconds: float) -> None:
        raise KeyboardInterrupt

    ranks = Ranks({})
    with pytest.raises(KeyboardInterrupt):
        compare(ranks, progress=interrupted)
    assert ranks.closed


@pytest.mark.parametrize(("loss", "words"), [(1.0, "repeats to the bit"), (1 + 1e-9, "does not repeat to the bit")])
def test_it_is_noted_whether_the_baseline_repeats(compare: Callable[..., Any], loss: float, words: str) -> None:
    again = with_losses(baseline(), lambda step, value: value * loss)
    assert compare(Ranks({1: [again]})).notes == [f"The baseline {words}."]
