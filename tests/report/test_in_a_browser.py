"""The pages in a real browser: nothing is loaded, nothing overflows, everything is printed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from test_plan_page import gpt2_page
from test_run_memory import RECIPE

from toolkit.report.comparison_page import comparison_page
from toolkit.report.fleet import STATE_MEANINGS, RunStatus, fleet_page
from toolkit.report.plan_page import plans_page
from toolkit.report.recorded_run import read_runs
from toolkit.report.runs_page import runs_page

Make = Callable[..., dict[str, Any]]
RUNS_STATUS = RunStatus(
    name="llama-3-8b",
    state="training",
    step=1200,
    steps=5000,
    loss=2.31,
    tokens_per_second=1.2e6,
    seconds_left=90000.0,
    incident="step 1100 rolled back to 1000: the gradient norm is inf while the loss is finite",
    hosts="node1, node2, node3, node4 and 12 more",
)
LONG = "transformer_with_a_name_that_goes_on_and_on-" * 4


@pytest.fixture(scope="session")
def pages(make_comparison: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    awkward = make_comparison(same=2, layers=1, steps=2)
    awkward["title"] = awkward["strategies"][0]["label"] = awkward["strategies"][2]["cause"] = LONG
    awkward["strategies"][2]["gradients"][0]["name"] = LONG
    found = {
        "eight": comparison_page(make_comparison()),
        "one": comparison_page(make_comparison(same=1, differs=False, failed=False)),
        "thirty": comparison_page(make_comparison(same=34, layers=12)),
        "awkward": comparison_page(awkward),
    }
    for name in ("first", "second"):
        (folder / name).mkdir()
        lines = [{"step": i, "loss": 8 - i / 50, "lr": 1e-3, "grad_norm": 1 + 20 * (i == 9), "tokens": 2048,
                  "seconds": 0.5, "memory_bytes": 2**30 + i, "skipped": i < 3, "router_aux_loss": 2.0,
                  "expert_load": 1.0, "layer_expert_load": [None, *[9 / i] * 60]} for i in range(1, 100)]  # fmt: skip
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "first" / "recipe.yaml").write_text(RECIPE)
    (folder / "first" / "environment.json").write_text('{"device": "NVIDIA H100 80GB HBM3 x 4"}')
    found["run"] = runs_page(read_runs([str(folder / "first")]), command=f"dstk report {LONG}")
    found["plans"] = plans_page(gpt2_page())
    found["runs"] = runs_page(read_runs([str(folder / "first"), str(folder / "second")]), command="dstk report")
    statuses = [replace(RUNS_STATUS, name=LONG), *(replace(RUNS_STATUS, state=state) for state in STATE_MEANINGS)]
    found["fleet"] = fleet_page(statuses, datetime(2026, 11, 24, 12), every_seconds=86400)
    for name, text in found.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in found}


NAMES = ("eight", "one", "thirty", "awkward", "run", "runs", "plans", "fleet")


@pytest.fixture
def visit(chromium: Any, pages: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Opens a page; its requests and its console messages are in `page.requests` and `page.messages`."""
    contexts = []

    def visit(name: str, *, width: int = 1280, **options: Any) -> Any:
        contexts.append(chromium.new_context(viewport={"width": width, "height": 800}, **options))
        page = contexts[-1].new_page()
        page.requests, page.messages = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("console", lambda message: page.messages.append(message.text))
        page.on("pageerror", lambda error: page.messages.append(str(error)))
        page.goto(pages[name].as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_requests_nothing_and_logs_nothing(visit: Any, pages: dict[str, Path], name: str) -> None:
    page = visit(name)
    page.mouse.wheel(0, 20_000)
    page.wait_for_timeout(50)
    assert [url for url in page.requests if not url.startswith("data:")] == [pages[name].as_uri()]
    assert page.messages == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 375, 1280])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_does_not_scroll_sideways(visit: Any, name: str, width: int, scheme: str) -> None:
    page = visit(name, width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_page_follows_the_preferred_color_scheme(visit: Any) -> None:
    grounds = {
        scheme: visit("eight", color_scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    }
    assert grounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}


@pytest.mark.parametrize(("width", "shown"), [(375, "narrow"), (1280, "wide")])
def test_each_chart_is_shown_once_in_the_size_that_fits(visit: Any, width: int, shown: str) -> None:
    page = visit("eight", width=width)
    visible = [chart.get_attribute("class") for chart in page.locator("svg.chart").all() if chart.is_visible()]
    assert visible == [f"chart {shown}"] * 4


def test_a_page_is_complete_without_javascript(visit: Any) -> None:
    page = visit("eight", java_script_enabled=False)
    assert page.locator(".matrix tbody tr").count() == 8
    assert page.locator("svg.chart.wide .curve").count() > 8
    assert page.locator(".heat-readout").is_hidden()
    assert "missing all-reduce" in page.inner_text("main")


@pytest.mark.parametrize("name", ["eight", "runs"])
def test_a_page_prints(visit: Any, name: str) -> None:
    page = visit(name, color_scheme="dark")
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ground')") == "#ffffff"


def test_print_unfolds_details_and_the_screen_folds_them_again(visit: Any) -> None:
    page = visit("eight")
    closed = page.locator("details:not([open])").count()
    assert closed
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() == closed


@pytest.mark.parametrize("name", ["eight", "awkward", "plans"])
def test_nothing_overflows_the_width_of_a_sheet(visit: Any, name: str) -> None:
    page = visit(name, width=700)
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 700


def test_the_pointer_shows_the_values_of_a_step(visit: Any) -> None:
    page = visit("eight")
    page.locator("#loss-difference svg.wide").hover()
    box = page.locator("#loss-difference .readout")
    assert box.is_visible()
    assert box.inner_text().startswith("step 1")
    assert "dp2-tp9-pp1-z3" in box.inner_text()


def test_a_tap_on_a_square_shows_its_ratio_and_cosine(visit: Any) -> None:
    page = visit("eight", width=375, has_touch=True)
    square = page.locator(".heat tr[data-r='3'] td").nth(6)
    square.tap()
    said = page.locator(".heat-readout").inner_text()
    assert said.startswith("transformer.h.0.attn.c_proj.bias in dp2-tp9-pp1-z3: difference")
    assert "norm ratio" in said
    assert "cosine" in said


def test_a_row_highlights_its_curves_in_all_plots(visit: Any) -> None:
    page = visit("eight")
    page.locator(".matrix tbody tr").first.click()
    assert page.locator("svg.wide .curve.lit").count() == 4


def test_a_filter_leaves_the_rows_and_points_of_its_axis(visit: Any) -> None:
    page = visit("plans")
    every, wanted = gpt2_page().evaluated.plans, [one for one in gpt2_page().evaluated.plans if one.layout.tp == 2]
    assert 0 < len(wanted) < len(every)
    page.locator("label", has_text="tp").locator("select").select_option("2")
    assert page.locator("#candidates tbody tr:visible").count() == len(wanted)
    assert page.locator(".filters output").inner_text() == f"{len(wanted)} of {len(every)}"
    drawn = page.locator(".scatter.wide circle")
    left = page.locator(".scatter.wide circle:visible")
    assert drawn.count() == len(every)
    assert left.count() == len(wanted)
    page.locator(".filters button").click()
    assert page.locator("#candidates tbody tr:visible").count() == len(every)


def test_a_column_orders_the_table_by_its_numbers(visit: Any) -> None:
    page = visit("plans")
    page.locator("#candidates thead button", has_text="GiB").click()
    texts = page.locator("#candidates tbody td:nth-child(3)").all_inner_texts()
    assert texts == sorted(texts, key=float, reverse=True)


def test_the_pointer_names_the_candidate_below_it_and_a_click_keeps_its_row_lit(visit: Any) -> None:
    page = visit("plans")
    label = gpt2_page().chosen[0].strategy
    key = page.locator("#candidates tbody tr", has_text=label).first.get_attribute("data-k")
    page.locator(f".scatter.wide circle[data-k={key}]").hover(force=True)
    assert page.locator(".drawing .readout").inner_text().startswith(label)
    page.mouse.down()
    page.mouse.up()
    assert page.locator("#candidates tr.lit th").inner_text() == label
