"""Compositions at random train what one process trains (make fuzz); and a fault that is planted is found and shrunk."""

import hashlib
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import fuzz_runs
import pytest
from compositions import BASE, LAYOUTS, ROOT, Composition, draw, draw_layout, draw_options, family_at
from fuzz import shrunk, write_files
from fuzz_page import BEGIN, section, with_section
from fuzz_results import Result, known_results
from fuzz_runs import Verdict, judge, validated
from odd_models import Sizes, families, write_model
from page import COMPOSITIONS
from planted_faults import forget_moments
from results import State
from shrink_composition import shrink_composition

from toolkit import __version__
from toolkit.cli.main import main
from toolkit.config import load_recipe
from toolkit.config.pipeline_schedules import KINDS
from toolkit.config.strategy import Strategy
from toolkit.errors import LayoutError
from toolkit.models.support import all_families

DAILY = 4
DAILY_LAYOUTS = 2
SEED = int.from_bytes(hashlib.sha256(__version__.encode()).digest()[:4], "big")
"""Others with each version."""


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands name files relative to it."""
    monkeypatch.chdir(ROOT)
    write_files()


@pytest.mark.daily
def test_compositions_train_what_one_process_trains(ranks: Callable[..., list[Any]]) -> None:
    drawn = {index: draw(SEED, index) for index in range(DAILY)}
    compositions = {
        index: replace(composition, layouts=composition.layouts[:DAILY_LAYOUTS])
        for index, composition in drawn.items()
        if composition is not None
    }
    verdicts = dict(zip(compositions, judge(list(compositions.values())), strict=True))
    results = [
        Result.of(SEED, index, composition, verdicts[index], 0.0, State.now())
        for index, composition in compositions.items()
    ]
    failures = [f"{verdict}\n{result.command}" for result in results for verdict in result.failures]
    assert not failures, "\n".join([f"make fuzz SEED={SEED} N=1 INDEX=…", *failures])
    trained = [verdict for result in results for verdict in result.verdicts if verdict.verdict == "same"]
    assert len(trained) >= DAILY


SMALL = Composition(
    family="llama",
    sizes=Sizes(layers=3, vocabulary=331),
    steps=3,
    options={
        "train.grad_clip": 0.3,
        "optimizer.name": "sgd",
        "optimizer.momentum": 0.9,
        "data.packing": "padded",
        "optimizer.lr": 0.1,
    },
    layouts=("dp2-z2-recompute",),
)


def test_a_planted_fault_is_found_shrunk_and_shown_by_the_printed_command(
    ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGD loses its momentum under DeepSpeed: what is left is momentum, on one rank."""
    forget_moments(monkeypatch, "momentum_buffer")
    write_model(SMALL.family, SMALL.sizes)
    ((failure,),) = judge([SMALL])
    assert failure.verdict == "differs"
    smallest = shrunk(SMALL, failure, seconds=300)
    assert smallest.layouts == ("dp1-z1",)
    assert set(smallest.options) == {"optimizer.name", "optimizer.momentum"}
    assert smallest.sizes == Sizes(layers=2)
    assert smallest.steps == 2
    _, *arguments = shlex.split(smallest.command)
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 1
    assert "differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("needed", "layout"),
    [({"optimizer.momentum", "optimizer.name"}, "dp1-tp2-z1"), ({"train.grad_clip"}, "dp2-z1"), (set(), "dp1-z1")],
)
def test_a_composition_shrinks_to_what_its_failure_needs(needed: set[str], layout: str) -> None:
    parts = Strategy.parse(layout)

    def fails(composition: Composition) -> Verdict:
        try:
            own = Strategy.parse(composition.layouts[0])
        except LayoutError:
            return Verdict(layout=composition.layouts[0], verdict="refused")
        holds = needed <= composition.options.keys() and own.tp >= parts.tp and (own.dp or 1) >= (parts.dp or 1)
        holds = holds and composition.steps >= 3
        return Verdict(layout=composition.layouts[0], verdict="differs" if holds else "same")

    large = replace(SMALL, layouts=("dp2-tp2-z3-sp-recompute-offload",), steps=5)
    failure = Verdict(layout=large.layouts[0], verdict="differs")
    smallest = shrink_composition(large, failure, fails, quick=fails, seconds=60)
    assert set(smallest.options) == needed
    assert smallest.steps == 3
    assert Strategy.parse(smallest.layouts[0]).world_size(1) == parts.world_size(1)
    assert len(smallest.layouts[0].split("-")) <= len(layout.split("-"))


def test_a_failure_that_the_quick_judge_takes_for_another_is_shrunk_by_the_other_judge() -> None:
    def exact(composition: Composition) -> Verdict:
        verdict = "differs" if "optimizer.name" in composition.options else "same"
        return Verdict(layout=composition.layouts[0], verdict=verdict)

    def rash(composition: Composition) -> Verdict:
        return Verdict(layout=composition.layouts[0], verdict="differs")

    failure = Verdict(layout=SMALL.layouts[0], verdict="differs")
    smallest = shrink_composition(SMALL, failure, exact, quick=rash, seconds=60)
    assert set(smallest.options) == {"optimizer.name"}


def test_a_composition_follows_from_seed_and_index_alone() -> None:
    first = draw(5, 3)
    draw(5, 4)
    assert first is not None
    assert draw(5, 3) == first
    assert draw(6, 3) != first


def test_every_family_with_a_tiny_model_is_drawn_in_one_round() -> None:
    drawn = Counter(family_at(1, index) for index in range(3 * len(families())))
    assert len(families()) > 150
    assert set(drawn) == set(families())
    assert {name for name, support in all_families().items() if support.supports("ep")} <= set(drawn)


def test_every_option_and_every_axis_is_drawn() -> None:
    chance = Random(0)
    moe = replace(SMALL, family="mixtral")
    options = {field for _ in range(1000) for field in draw_options(chance, "mixtral")}
    assert {"precision", "model.lora", "model.freeze", "model.train_only", "data.packing", "train.grad_clip"} <= options
    assert {"model.router_aux_loss", "model.expert_capacity_factor", "schedule.name", "optimizer.name"} <= options
    assert {"train.objective", "train.distill", "data.sources", "data.weight_field", "parallel.cp_exchange"} <= options
    layouts = [layout for text in {draw_layout(chance, moe) for _ in range(3000)} for layout in _readable(text)]
    assert all(layout.world_size(1) <= 4 for layout in layouts)
    for axis in ("dp", "cp", "cp_ulysses", "tp", "pp", "ep", "ulysses"):
        assert {getattr(layout, axis) for layout in layouts} >= {1, 2}
    assert {layout.schedule for layout in layouts} == {None, *KINDS}
    for flag in ("sp", "inner", "offload", "offacts", "tiled", "recompute", "selective"):
        assert any(getattr(layout, flag) for layout in layouts), flag
    assert {layout.zero_stage for layout in layouts if layout.engine == "deepspeed"} == {0, 1, 2, 3}
    assert {layout.engine for layout in layouts} == {"deepspeed", "ddp", "fsdp"}


def _readable(text: str) -> list[Strategy]:
    try:
        return [Strategy.parse(text)]
    except LayoutError:
        return []


def test_a_command_trains_the_composition(capsys: pytest.CaptureFixture[str]) -> None:
    composition = draw(5, 3)
    assert composition is not None
    words = shlex.split(composition.command)
    assert words[:4] == ["dstk", "compare", "--recipe", BASE]
    assert words[words.index("--against") + 1] == ",".join(composition.layouts)
    assert load_recipe(BASE, words[words.index("--steps") + 2 :]) == composition.load()
    assert len(composition.layouts) == LAYOUTS


def test_a_refusal_is_one_line_a_problem_and_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(SMALL.family, SMALL.sizes)
    refused = validated(SMALL, "dp2-tp3-z1")
    assert refused is not None
    assert refused.verdict == "refused"
    assert refused.reason == "4 attention heads cannot be shared equally by 3 ranks"
    assert validated(SMALL, "dp2-z1") is None

    def crash(arguments: list[str]) -> None:
        print("Traceback (most recent call last):", file=sys.stderr)
        raise SystemExit(1)

    monkeypatch.setattr(fuzz_runs, "main", crash)
    crashed = validated(SMALL, "dp2-z1")
    assert crashed is not None
    assert crashed.verdict == "bad refusal"
    assert crashed.verdict not in fuzz_runs.FINE


def _results() -> list[Result]:
    """A composition that trained and one that failed."""
    state = State(commit="0" * 12, code="1" * 12, has_changes=False, versions="Python 3")
    trained = Verdict(layout="dp2-z1", verdict="same", loss=2e-7, norm=3e-7, weights=4e-7)
    refused = Verdict(layout="tp3-z1", verdict="refused", reason="4 heads cannot be shared by 3 ranks")
    wrong = Verdict(layout="dp2-tp2-z3-sp", verdict="differs", reason="a scale", loss=0.1, norm=0.1, weights=0.1)
    first = Result.of(7, 0, replace(SMALL, layouts=("dp2-z1", "tp3-z1")), [trained, refused], 1.0, state)
    second = Result.of(7, 1, replace(SMALL, family="gpt2", layouts=("dp2-tp2-z3-sp",)), [wrong], 1.0, state)
    second.shrunk["dp2-tp2-z3-sp"] = "dstk compare --against tp2"
    return [first, second]


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    lines = "".join(result.line() for result in _results())
    (tmp_path / "results-1.jsonl").write_text(lines + '{"seed": 7, "ind')  # of a run that was killed
    assert list(known_results(tmp_path)) == _results()


def test_the_page_counts_what_was_trained_and_what_was_refused() -> None:
    text = section(_results())
    for row in (
        "| compositions | 2, of 2 families |",
        "| layouts | 3 |",
        "| layouts trained | 2 |",
        "| … different | 1 |",
        "| layouts refused by `dstk validate` | 1 |",
        "| fp32 | 1 | 2.0e-07 to 2.0e-07 | 3.0e-07 to 3.0e-07 | 4.0e-07 to 4.0e-07 | llama |",
        "| 1 | N heads cannot be shared by N ranks |",
        "| optimizer.name: sgd | 2 |",
        "| dp x tp | 1 |",
        "- index 1, `dp2-tp2-z3-sp`: differs. `dstk compare --against tp2`",
    ):
        assert row in text.splitlines(), row
    assert "6 of 6 pairs" in text


def test_the_page_of_the_matrix_and_the_section_do_not_overwrite_each_other() -> None:
    page = with_section("# Parity\n\nThe matrix.\n", "## First\n")
    again = with_section(page, "## Second\n")
    assert again.startswith("# Parity\n\nThe matrix.\n")
    assert "First" not in again
    assert again.count("## Second") == 1
    assert BEGIN.startswith(COMPOSITIONS)
