"""Charts as a page has them, with its colors and text, and as image files."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from toolkit.report.chart import DARK, LIGHT, Band, Chart, Event, Line, RingMark
from toolkit.report.drawing import Drawing
from toolkit.report.images import write_chart


def chart(*lines: Line, **changes: Any) -> Chart:
    return Chart(name="loss", title="Loss of $x$ & $y$", unit="nats", lines=lines, **changes)


def line(label: str = "z1", *, values: Sequence[float | None] = (3.0, 2.0, 1.0), **changes: Any) -> Line:
    return Line(label=label, points=tuple(enumerate(values, start=1)), **({"tone": "cool0", "key": "k0"} | changes))


def everything() -> Chart:
    return chart(
        line(values=(3.0, None, 2.0, 1.0), dots=True, labelled=True),
        line("other", tone="warm0", key="k1", dash=(6, 3)),
        bands=(Band(label="tolerance", points=((1, 1.0), (4, 1.0))),),
        marks=(RingMark(step=2, value=2.0, tone="warm0", key="k1"),),
        events=(Event(step=2, kind="failed"),),
    )


def drawn(chart: Chart, width: int = 540) -> str:
    return str(Drawing(chart, width, 320).markup())


def test_a_page_has_every_color_as_a_variable_of_the_palette() -> None:
    colors = re.findall(r"(?:stroke|fill):([^;\"]+)", drawn(everything()))
    assert {"var(--cool0)", "var(--warm0)", "var(--failed)", "var(--tolerance-ground)", "var(--muted)"} <= set(colors)
    assert set(colors) <= {f"var(--{name})" for name in DARK}


def test_what_belongs_to_a_curve_has_its_key() -> None:
    found = set(re.findall(r'<(\w+) class="(\w+)" data-k="(\w+)"', drawn(everything())))
    assert found == {("path", "curve", "k0"), ("path", "curve", "k1"), ("path", "gap", "k0"), ("path", "ring", "k1"),
                     ("text", "end", "k0")}  # fmt: skip


def test_a_narrow_drawing_has_no_labels_beside_the_curves() -> None:
    assert "<text" in drawn(everything(), width=340)
    assert 'class="end"' not in drawn(everything(), width=340)


def test_a_value_that_is_not_finite_interrupts_the_curve_and_a_value_alone_is_a_dot() -> None:
    dot, curve = re.findall(r'class="curve" data-k="k0" d="([^"]+)"', drawn(chart(line(values=(1.0, 2.0, None, 3.0)))))
    assert (dot.count("M"), dot.count("L")) == (1, 1)
    assert re.sub(r"[^ML]", "", curve) == "MLM"


def test_dashes_are_in_pixels_whatever_the_width_of_the_line() -> None:
    assert 'stroke-width="2.5" stroke-dasharray="6 3"' in drawn(chart(line(dash=(6, 3), width=2.5)))


def test_a_file_keeps_its_title_its_labels_and_its_legend_as_text(tmp_path: Path) -> None:
    write_chart(everything(), tmp_path / "a.svg")
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", (tmp_path / "a.svg").read_text())
    assert {"Loss of $x$ &amp; $y$", "nats", "step"} <= set(texts)
    assert (texts.count("z1"), texts.count("other")) == (2, 1)  # at the end of the curve, and in the legend


def test_every_dot_is_in_an_image(tmp_path: Path) -> None:
    write_chart(chart(line(values=[20.0 - step for step in range(20)], dots=True, width=0.1)), tmp_path / "a.png")
    distance = np.abs(imread(tmp_path / "a.png")[..., :3] - to_rgb(LIGHT["cool0"])).max(axis=-1)
    assert (distance < 0.05).sum() > 20 * 100  # pixels
