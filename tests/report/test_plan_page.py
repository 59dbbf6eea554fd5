"""`dstk plan --report`: every candidate is a point and a row, the frontier is right, the bars are the steps."""

import html
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from toolkit.cli.main import main
from toolkit.hardware import gpu
from toolkit.models.shape import local_config
from toolkit.planner.cluster import Cluster
from toolkit.planner.request import Plan, PlanRequest
from toolkit.planner.search import Goal, SearchResult, candidates, evaluated, frontier, least_bytes, search
from toolkit.report.plan_page import PlansPage, bars, outcome, plans_page, shown_plans
from toolkit.report.plan_picture import PlanPicture, Point, memory_axis

GPT2 = ["plan", "--model", "gpt2", "--gpus", "8xL4", "--seq", "1024", "--global-batch", "16"]


def page_of(model: str, name: str, *, gpus: int = 8, seq_len: int = 1024, batch: int = 16,
            goal: Goal = "speed") -> PlansPage:  # fmt: skip
    request = PlanRequest.of(
        model, local_config(model), cluster=Cluster.of(gpu(name)), gpus=gpus, seq_len=seq_len, global_batch_size=batch
    )
    chosen, found = search(request, goal=goal).plans, evaluated(request, goal=goal)
    return PlansPage(request=request, goal=goal, evaluated=found, chosen=chosen, cost=None, command="dstk plan")


@cache
def gpt2_page() -> PlansPage:
    return page_of("gpt2", "L4")


@cache
def tight_page() -> PlansPage:
    """Some candidates do not fit, and some not even their states."""
    return page_of("llama-3-8b", "A100-40", seq_len=2048, batch=64)


def circles(text: str, kind: str = "wide") -> list[tuple[str, str]]:
    """Class and key of each point of one of the two drawings."""
    drawing = text.partition(f'class="chart scatter {kind}"')[2].partition("</svg>")[0]
    return re.findall(r'<circle [^>]*class="([^"]*)" data-k="(\w+)"', drawing)


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each candidate's row by its key."""
    table = text.partition('id="candidates"')[2].partition("</table>")[0]
    found = re.findall(r'<tr data-k="(\w+)">(.*?)</tr>', table)
    return {key: re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", cells) for key, cells in found}


@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_each_candidate_is_a_row_and_one_point(kind: str) -> None:
    page = tight_page()
    text = plans_page(page)
    table, points = rows(text), circles(text, kind)
    limit = 4 * page.request.gpu.memory_bytes
    drawn = [plan for plan in page.evaluated.plans if plan.memory.total <= limit]
    assert sorted(cells[0] for cells in table.values()) == sorted(plan.strategy for plan in page.evaluated.plans)
    assert len(points) == len({key for _, key in points}) == len(drawn) < len(table)
    for classes, key in points:
        fits, on_frontier = table[key][5:7]
        assert {"yes": "fits", "tight": "tight", "no": "does-not-fit"}[fits] == classes.split()[0]
        assert (on_frontier == "yes") == ("frontier" in classes)


def test_schedules_that_were_tried_have_a_column_and_a_choice() -> None:
    with_schedules = replace(gpt2_page().request, schedules=True)
    plans = [plan for plan in evaluated(with_schedules).plans if plan.layout.pp in (1, 2)]
    text = plans_page(replace(gpt2_page(), evaluated=SearchResult(plans=plans, candidates=len(plans))))
    header = re.findall(r"<th[^>]*>(.*?)</th>", text.partition('id="candidates"')[2].partition("</thead>")[0])
    place = next(index for index, name in enumerate(header) if "schedule" in name)
    shown = {cells[0]: cells[place] for cells in rows(text).values()}
    assert shown == {plan.strategy: plan.layout.schedule or "default" for plan in plans}
    assert {"default", "1f1b", "zb-h1", "zb-v", "interleaved"} == set(shown.values())
    assert "schedule" not in plans_page(gpt2_page()).partition('id="candidates"')[2].partition("</thead>")[0]


def test_what_the_states_exclude_is_counted_but_not_estimated() -> None:
    page = tight_page()
    every = candidates(page.request)
    possible = [one for one in every if least_bytes(page.request, one.layout) <= page.request.gpu.memory_bytes]
    assert page.evaluated.candidates == len(every) > len(possible) == len(page.evaluated.plans)
    assert {outcome(plan) for plan in page.evaluated.plans} == {"fits", "tight", "does not fit"}


@pytest.mark.parametrize("make", [gpt2_page, tight_page])
def test_the_frontier_is_what_no_other_that_fits_beats(make) -> None:
    plans = [plan for plan in make().evaluated.plans if plan.fits]

    def value(plan: Plan) -> tuple[float, int]:
        return plan.step.tokens_per_second_per_gpu, -plan.memory.total

    def is_beaten(plan: Plan) -> bool:
        (speed, memory) = value(plan)
        return any(s >= speed and m >= memory and (s, m) != (speed, memory) for s, m in map(value, plans))

    found = [value(plan) for plan in frontier(make().evaluated.plans)]
    assert found == sorted({value(plan) for plan in plans if not is_beaten(plan)}, reverse=True)
    assert len(found) > 2


@pytest.mark.parametrize("goal", ["speed", "cost"])
def test_the_search_chooses_the_best_of_what_is_evaluated(goal: Goal) -> None:
    page = page_of("gpt2", "L4", goal=goal)
    best: dict[object, Plan] = {}
    for plan in page.evaluated.plans:
        if plan.fits:
            best.setdefault(plan.layout, plan)
    expected = [plan.step.tokens_per_second_per_gpu for plan in list(best.values())[:10]]
    assert [plan.step.tokens_per_second_per_gpu for plan in page.chosen] == pytest.approx(expected)


def test_the_parts_of_a_bar_are_its_step_and_the_longest_fills_the_width() -> None:
    page = tight_page()
    found = bars(page.chosen)
    assert len(found) == 10
    longest = max(plan.step.seconds for plan in page.chosen)
    for bar, plan in zip(found, page.chosen, strict=True):
        assert sum(bar.terms.values()) == pytest.approx(plan.step.seconds)
        assert sum(bar.widths.values()) == pytest.approx(100 * plan.step.seconds / longest)


def test_of_too_many_candidates_the_frontier_and_what_fits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    page = tight_page()
    monkeypatch.setattr("toolkit.report.plan_page.MOST_SHOWN", 40)
    shown = {plan.strategy for plan in shown_plans(page)}
    assert len(shown) == 40
    assert {plan.strategy for plan in frontier(page.evaluated.plans)} <= shown
    assert plans_page(page).count("<tr data-k=") == 40


def test_more_memory_stands_further_right_and_more_throughput_higher() -> None:
    points = [
        Point(key=f"c{i}", label="l", gib=gib, speed=speed, outcome="fits", is_frontier=False)
        for i, (gib, speed) in enumerate([(3.0, 900.0), (20.0, 100.0), (95.0, 2000.0), (1000.0, 9000.0)])
    ]
    picture = PlanPicture(points, gpu("A100-80"), width=340, height=320)
    assert picture.drawn == points[:3]
    places = [picture.place(point.gib, point.speed) for point in picture.drawn]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert places[2][1] < places[0][1] < places[1][1]
    assert all(picture.left < x < picture.right and picture.top < y < picture.bottom for x, y in places)


@pytest.mark.parametrize("values", [[0.4, 0.5], [2.0, 300.0], [70.0, 80.0], [0.01, 5000.0]])
def test_a_memory_axis_has_round_ticks_with_room(values: list[float]) -> None:
    axis = memory_axis(values, most=7)
    assert 2 <= len(axis.ticks) <= 7
    assert all(axis.low <= tick.value <= axis.high for tick in axis.ticks)
    assert axis.fraction(values[0]) > 0
    assert axis.fraction(values[1]) < 1


def test_names_are_escaped() -> None:
    page = gpt2_page()
    text = plans_page(replace(page, request=replace(page.request, name="<script>alert(1)</script>")))
    assert "<script>alert" not in text
    assert "alert(1)" in text


def exit_of(*arguments: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def test_the_command_writes_one_page_and_says_where(capsys, tmp_path: Path) -> None:
    folder = tmp_path / "a page"
    assert exit_of(*GPT2, "--tokens", "1e10", "--report", str(folder)) == 0
    assert f"report  {folder / 'index.html'}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.rglob("*")] == ["a page", "index.html"]
    text = (folder / "index.html").read_text()
    assert len(rows(text)) == len(gpt2_page().evaluated.plans)
    assert f"<code>dstk plan {' '.join(GPT2[1:])} --tokens 1e+10 --report &#39;{folder}&#39;</code>" in text
    assert exit_of(*GPT2, "--report", str(folder)) == 0  # replaces its own page


def test_the_command_that_the_page_shows_writes_the_same_page(capsys, tmp_path: Path) -> None:
    arguments = [*GPT2, "--schedules", "--tokens", "1e10", "--report", str(tmp_path / "page")]
    pages = []
    for _ in range(2):
        assert exit_of(*arguments) == 0
        pages.append((tmp_path / "page" / "index.html").read_text())
        shown = re.search(r"<pre[^>]*><code[^>]*>(dstk plan .*?)</code>", pages[-1])
        assert shown is not None
        arguments = shlex.split(html.unescape(shown[1]))[1:]
    assert pages[0] == pages[1]


@pytest.mark.parametrize("more", [["--layout", "z1"], ["--why", "z1"], ["--seq", "1025"]])
def test_what_has_no_page_is_one_line_and_leaves_nothing(capsys, tmp_path: Path, more: list[str]) -> None:
    assert exit_of(*GPT2, *more, "--report", str(tmp_path / "new")) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_and_a_page_have_folders_of_their_own(capsys, tmp_path: Path) -> None:
    folder, other = str(tmp_path / "recipe"), str(tmp_path / "page")
    assert exit_of(*GPT2, "--write", folder, "--report", f"{folder}/") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert exit_of(*GPT2, "--write", folder, "--report", other) == 0
    assert "--write" not in (tmp_path / "page" / "index.html").read_text()


def test_a_folder_of_something_else_stays_as_it_is(capsys, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert exit_of(*GPT2, "--report", str(tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "thesis.tex" in captured.err
    assert captured.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
