"""The page of a comparison: what it says, how numbers look, what it refuses."""

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ReportError
from toolkit.report.chart import COOL, DARK, LIGHT, WARM
from toolkit.report.comparison_charts import comparison_charts, first_beyond, looks, relative_points
from toolkit.report.comparison_page import FILES, comparison_page, sentence, write_comparison
from toolkit.report.heat_map import grouped, heat_map, tone_of
from toolkit.report.page import replace_folder

Make = Callable[..., dict[str, Any]]
EVIL = "<script>alert(1)</script>\"'&</script>"


def row(page: str, label: str) -> list[str]:
    """The cells of a strategy's row in the matrix, as text."""
    matrix = page.partition('<table class="matrix">')[2].partition("</table>")[0]
    (found,) = (part for part in matrix.split("<tr") if f"{label}<" in part)
    return [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", found, re.DOTALL)]


def test_the_sentence_counts_the_strategies_that_agree(make_comparison: Make) -> None:
    page = comparison_page(make_comparison())
    assert "6 of 8 strategies train the same model as the reference." in page
    assert "1 differs and 1 failed to run." in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"same": 1, "differs": False, "failed": False}, "dp2-tp1-pp1-z1 trains the same model as the reference."),
        ({"same": 0, "failed": False}, "dp2-tp9-pp1-z3 does not train the same model as the reference."),
        ({"same": 0, "differs": False}, "dp1-tp1-pp2-z3 failed to run."),
        ({"same": 3, "differs": False, "failed": False}, "All 3 strategies train the same model as the reference."),
        ({"same": 0}, "None of 2 strategies trains the same model as the reference."),
        ({"same": 1}, "1 of 3 strategies trains the same model as the reference."),
        ({"same": 0, "differs": False, "failed": False}, "No strategy was compared."),
    ],
)
def test_the_sentence_fits_the_number_of_strategies(make_comparison: Make, arguments: Any, said: str) -> None:
    comparison = make_comparison(**arguments)
    assert sentence(comparison) == said
    assert said in comparison_page(comparison)


@pytest.fixture
def unclear(make_comparison: Make) -> Make:
    """A comparison whose first strategy rounding explains."""

    def make(**options: Any) -> dict[str, Any]:
        comparison = make_comparison(**options)
        comparison["strategies"][0] |= {
            "result": "cannot tell",
            "cause": "chaos",
            "sentence": "no step is wrong.",
            "first_diverging_step": 9,
        }
        if comparison["outcome"] == "same":
            comparison["outcome"] = "cannot tell"
        return comparison

    return make


@pytest.mark.parametrize(
    ("options", "said", "color"),
    [
        (
            {"same": 3, "differs": False, "failed": False},
            "2 of 3 strategies train the same model as the reference. 1 cannot be told from rounding",
            "cannot-tell",
        ),
        (
            {"same": 1, "differs": False, "failed": False},
            "Whether dp2-tp1-pp1-z1 trains the same model as the reference cannot be told from rounding",
            "cannot-tell",
        ),
        ({"same": 2}, "1 differs, 1 failed to run and 1 cannot be told from rounding", "differs"),
    ],
)
def test_what_rounding_explains_is_amber_unless_something_is_wrong(
    unclear: Make, options: dict[str, Any], said: str, color: str
) -> None:
    page = comparison_page(unclear(**options))
    banner = re.sub(r"<[^>]+>", "", page.partition('<p class="result ')[2].partition("</p>")[0])
    assert banner.startswith(color)
    assert f"{said} at this learning rate" in banner
    assert 'class="badge cannot-tell"' in page


def test_what_rounding_explains_is_not_called_a_difference(unclear: Make) -> None:
    page = comparison_page(unclear(same=2, differs=False, failed=False))
    assert row(page, "dp2-tp1-pp1-z1</a>")[1] == "cannot tellfrom rounding"
    assert "What rounding explains" in page
    assert "not the same" not in page.partition("</header>")[2]


def test_each_strategy_is_drawn_against_its_own_baseline(make_comparison: Make) -> None:
    comparison = make_comparison(same=2, differs=False, failed=False)
    first, second = comparison["strategies"]
    other = comparison["baselines"][0] | {"label": "dp1-z0", "losses": second["losses"], "reruns": []}
    comparison["baselines"].append(other)
    second["baseline"] = "dp1-z0"
    lines = {line.label: line for line in comparison_charts(comparison)[1].lines}
    assert {value for _, value in lines[second["label"]].points} == {0.0}
    assert {value for _, value in lines[first["label"]].points} != {0.0}
    assert "the same model as the reference and dp1-z0." in comparison_page(comparison)


def test_a_row_has_the_numbers_of_its_strategy(make_comparison: Make) -> None:
    comparison = make_comparison()
    comparison["strategies"][0] |= {"loss_difference": 1.234e-7, "norm_difference": 0.0, "parameter_difference": 2e-10}
    cells = row(comparison_page(comparison), "dp2-tp1-pp1-z1")
    assert cells[1:5] == ["same", "every step", "1.2e-7", "0"]
    assert cells[6:] == ["2.0e-10", "–", "dp2-tp1-pp1-z1", "12 s"]


def test_a_number_beyond_its_tolerance_is_marked(make_comparison: Make) -> None:
    comparison = make_comparison(same=2, differs=False, failed=False)
    comparison["strategies"][1]["loss_difference"] = 1.1e-6
    page = comparison_page(comparison)
    assert page.count('class="number beyond"') == 1
    assert '<td class="number beyond" title="tolerance 1e-6, 1.1 of it">1.1e-6</td>' in page


def test_a_number_that_is_not_finite_is_beyond_its_tolerance(make_comparison: Make) -> None:
    comparison = make_comparison(same=1, differs=False, failed=False)
    comparison["strategies"][0]["loss_difference"] = None
    assert re.search(r'class="number beyond"[^>]*>not finite<', comparison_page(comparison))


def test_a_failed_strategy_has_its_error_and_no_numbers(make_comparison: Make) -> None:
    page = comparison_page(make_comparison())
    assert row(page, "dp1-tp1-pp2-z3</a>")[2:8] == ["–"] * 6
    assert '<pre class="error" tabindex="0">no such layout</pre>' in page


def test_a_failing_strategy_has_its_diagnosis(make_comparison: Make) -> None:
    page = comparison_page(make_comparison())
    box = page.partition('<article class="diagnosis differs"')[2].partition("</article>")[0]
    assert "The gradients of norms are each rank&#39;s part only." in box
    assert "missing all-reduce" in box
    assert "Ranks that should hold the same bits do not, in 2 parameters" in box
    assert "transformer.h.0.ln_1.weight" in box
    assert "dstk compare --against dp2-tp9-pp1-z3" in box


def test_every_parameter_of_a_failing_strategy_is_in_its_table(make_comparison: Make) -> None:
    box = comparison_page(make_comparison(layers=3)).partition('<article class="diagnosis differs"')[2]
    gradients = box.partition("First update")[0]
    assert gradients.count('<th scope="row"><code>') == 3 * 4 + 2


def test_strategies_that_are_the_same_get_no_diagnosis(make_comparison: Make) -> None:
    assert "<article" not in comparison_page(make_comparison(differs=False, failed=False))


def poisoned(value: Any) -> Any:
    """Return the data with a script in every free text."""
    if isinstance(value, dict):
        fixed = ("result", "agreement", "created")
        return {key: item if key in fixed else poisoned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return value + EVIL if isinstance(value, str) and value else value


def test_all_text_is_escaped(make_comparison: Make) -> None:
    clean, page = comparison_page(make_comparison()), comparison_page(poisoned(make_comparison()))
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert page.count("</script>") == clean.count("</script>") == 2
    assert len(re.findall(r"<\w+", page)) == len(re.findall(r"<\w+", clean))


class _Tags(HTMLParser):
    VOID = ("meta", "link", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "action")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_tag_closes_ids_are_unique_and_every_link_stays_in_the_page(make_comparison: Make) -> None:
    tags = _Tags()
    tags.feed(comparison_page(make_comparison()))
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    inside = {f"#{name}" for name in tags.ids} | {"data:,"}
    assert set(tags.addresses) <= inside


def test_the_page_has_no_external_address_and_forbids_loading_any(make_comparison: Make) -> None:
    page = comparison_page(make_comparison())
    assert "default-src 'none'" in page
    assert not re.search(r"(https?:)?//\w+\.|@import|url\(", page)


def test_a_chart_has_a_title_and_a_description(make_comparison: Make) -> None:
    page = comparison_page(make_comparison())
    drawings = re.findall(r'<svg class="chart.*?</svg>', page, re.DOTALL)
    assert len(drawings) == 8
    assert all(re.search(r"<title id=[^>]+>[^<]+</title><desc id=[^>]+>[^<]+</desc>", one) for one in drawings)


def test_every_table_header_has_a_scope(make_comparison: Make) -> None:
    headers = re.findall(r"<th[ >][^>]*>?", comparison_page(make_comparison()))
    assert headers
    assert all("scope=" in header for header in headers)


@pytest.mark.parametrize("steps", [1, 2, 400])
def test_any_number_of_steps_can_be_drawn(make_comparison: Make, steps: int) -> None:
    assert "nan" not in re.sub(
        r"<script.*?</script>", "", comparison_page(make_comparison(steps=steps)), flags=re.DOTALL
    )


def test_thirty_strategies_fit_and_the_legend_names_those_that_differ(make_comparison: Make) -> None:
    page = comparison_page(make_comparison(same=34))
    legend = page.partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert "dp2-tp9-pp1-z3" in legend
    assert "dp2-tp12-pp1-z1" not in legend
    assert "colors as in the table above" in legend


def test_eight_strategies_of_150_parameters_stay_under_500_kilobytes(make_comparison: Make) -> None:
    assert len(comparison_page(make_comparison(layers=37)).encode()) < 500_000


def test_losses_that_are_not_finite_interrupt_the_curve(make_comparison: Make) -> None:
    comparison = make_comparison(same=1, differs=False, failed=False)
    comparison["strategies"][0]["losses"][3] = None
    overlay = comparison_charts(comparison)[0]
    assert [len(run) for run in overlay.lines[1].runs()] == [3, 26]
    assert 'class="gap"' in comparison_page(comparison)


def test_differences_are_relative_and_stop_where_a_curve_ends() -> None:
    assert relative_points([2.0, 3.0, None], [1.0, 3.0, 1.0, 1.0]) == ((1, 1.0), (2, 0.0), (3, None))


def test_the_last_tolerance_holds_for_later_steps() -> None:
    assert first_beyond([(1, 0.5), (2, 0.5), (3, 2.0)], [1.0]) == (3, 2.0)
    assert first_beyond([(1, 0.5)], []) is None


def test_dashes_of_equal_curves_alternate(make_comparison: Make) -> None:
    lines = [line for line in comparison_charts(make_comparison(same=3))[0].lines if line.tone in COOL]
    assert [line.dash for line in lines] == [(7.0, 14.0)] * 3
    assert sorted(line.offset for line in lines) == [-14.0, -7.0, 0.0]


def test_colors_are_warm_for_failures_and_cool_for_agreement(make_comparison: Make) -> None:
    strategies = make_comparison()["strategies"]
    assert len(strategies) == 8
    for strategy, look in zip(strategies, looks(strategies), strict=True):
        assert look.tone in (COOL if strategy["result"] == "same" else WARM)


@pytest.mark.parametrize(
    ("value", "tone"),
    [(0.0, "heat0"), (1e-12, "heat1"), (0.99e-6, "heat4"), (1e-6, "heat4"), (1.1e-6, "heat5"), (9e-5, "heat6"),
     (1.0, "heat8"), (None, "missing"), (math.inf, "missing")],
)  # fmt: skip
def test_the_color_of_a_square_counts_powers_of_ten_from_the_tolerance(value: float | None, tone: str) -> None:
    assert tone_of(value, 1e-6) == tone


def test_parameters_are_grouped_by_layer_in_model_order() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.10.mlp.weight",
        "model.layers.2.mlp.weight",
        "model.norm.weight",
    ]
    assert grouped(names) == [
        ("before the layers", [("model.embed_tokens.weight", "embed_tokens.weight")]),
        ("layer 2", [("model.layers.2.mlp.weight", "mlp.weight")]),
        ("layer 10", [("model.layers.10.mlp.weight", "mlp.weight")]),
        ("after the layers", [("model.norm.weight", "norm.weight")]),
    ]


def test_a_parameter_that_one_strategy_lacks_has_an_empty_cell(make_comparison: Make) -> None:
    comparison = make_comparison(same=2, differs=False, failed=False)
    del comparison["strategies"][0]["gradients"][0]
    cells = {parameter.name: parameter.cells for parameter in heat_map(comparison["strategies"]).parameters()}
    assert cells["transformer.wte.weight"][0] is None
    assert cells["transformer.wte.weight"][1] is not None


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_contrast(colors: dict[str, str]) -> None:
    pairs = [(text, ground) for text in ("ink", "muted", "accent", "differs") for ground in ("ground", "panel")]
    pairs += [(result, f"{result}-ground") for result in ("same", "differs", "failed", "warning")]
    pairs += [("warning", "panel"), ("warning", "ground")]
    assert {pair: contrast(colors[pair[0]], colors[pair[1]]) for pair in pairs if
            contrast(colors[pair[0]], colors[pair[1]]) < 4.5} == {}  # fmt: skip


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_curves_have_contrast(colors: dict[str, str]) -> None:
    assert {name for name in COOL + WARM if contrast(colors[name], colors["ground"]) < 3} == set()


def test_light_and_dark_have_the_same_colors() -> None:
    assert LIGHT.keys() == DARK.keys()


def test_a_report_has_a_page_its_numbers_and_its_plots(make_comparison: Make, tmp_path: Path) -> None:
    comparison = make_comparison(same=1, layers=1, steps=3)
    page = write_comparison(tmp_path / "a" / "report", comparison)
    assert page == tmp_path / "a" / "report" / "index.html"
    assert {path.name for path in page.parent.iterdir()} == set(FILES)
    assert json.loads((page.parent / "comparison.json").read_text()) == comparison
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["report"]


def test_the_same_comparison_gives_the_same_svg(make_comparison: Make, tmp_path: Path) -> None:
    for name in "ab":
        write_comparison(tmp_path / name, make_comparison(same=1, layers=1, steps=3))
    first, second = (sorted((tmp_path / name).glob("*.svg")) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_numbers_that_are_not_finite_are_null_in_the_json(make_comparison: Make, tmp_path: Path) -> None:
    comparison = make_comparison(same=1, differs=False, failed=False, layers=1, steps=3)
    comparison["strategies"][0]["losses"][1] = math.nan
    page = write_comparison(tmp_path / "report", comparison)
    assert json.loads((page.parent / "comparison.json").read_text())["strategies"][0]["losses"][1] is None


def test_an_older_report_is_replaced_completely(tmp_path: Path) -> None:
    def report(*names: str) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            for name in names:
                (folder / name).write_text('<meta name="generator" content="dstk 0">')

        return write

    replace_folder(tmp_path / "r", FILES, report("index.html", "losses.png"))
    replace_folder(tmp_path / "r", FILES, report("index.html"))
    assert [path.name for path in tmp_path.rglob("*")] == ["r", "index.html"]


def test_a_folder_with_other_files_is_refused(make_comparison: Make, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(ReportError, match=r"it contains thesis.tex, which is not part of a report"):
        write_comparison(tmp_path, make_comparison())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_foreign_page_is_refused(make_comparison: Make, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>My home page</h1>")
    with pytest.raises(ReportError, match="no page of dstk report"):
        write_comparison(tmp_path, make_comparison())


def test_a_file_at_the_path_of_the_folder_is_refused(make_comparison: Make, tmp_path: Path) -> None:
    (tmp_path / "r").write_text("")
    with pytest.raises(ReportError, match="not a folder"):
        write_comparison(tmp_path / "r", make_comparison())


def test_a_failed_report_leaves_the_old_one(tmp_path: Path) -> None:
    def good(folder: Path) -> None:
        (folder / "index.html").write_text('<meta name="generator" content="dstk 0">')

    def full(folder: Path) -> None:
        (folder / "index.html").write_text("half")
        raise OSError(28, "No space left on device")

    replace_folder(tmp_path / "r", FILES, good)
    with pytest.raises(ReportError, match="No space left on device"):
        replace_folder(tmp_path / "r", FILES, full)
    assert [path.name for path in tmp_path.rglob("*")] == ["r", "index.html"]
    assert "dstk 0" in (tmp_path / "r" / "index.html").read_text()
