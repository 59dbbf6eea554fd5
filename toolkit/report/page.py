"""A page from a template: one HTML file with its style, its script and its drawings inside, which asks no network."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from toolkit import __version__
from toolkit.report.chart import Chart, readout
from toolkit.report.numerals import UNKNOWN, difference, fixed, plural, scientific, seconds
from toolkit.report.palette import style_sheet
from toolkit.report.svg import drawing, swatch

_WIDE, _NARROW = (540, 320), (340, 260)


def render(template: str, **content: Any) -> str:
    """The page. Whatever comes from data is escaped."""
    return _environment().get_template(template).render(**content)


def figure(chart: Chart) -> dict[str, Any]:
    """What a template needs of a chart: the chart, and its drawings for wide and narrow screens."""
    wide = drawing(chart, width=_WIDE[0], height=_WIDE[1], kind="wide")
    narrow = drawing(chart, width=_NARROW[0], height=_NARROW[1], kind="narrow")
    return {"chart": chart, "drawings": Markup("").join((wide, narrow))}


def readouts(charts: Iterable[Chart]) -> dict[str, Any]:
    """The values of all charts, by name."""
    return {chart.name: readout(chart) for chart in charts}


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("toolkit.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "difference": difference,
        "scientific": scientific,
        "fixed": fixed,
        "seconds": seconds,
        "plural": plural,
    }
    environment.globals |= {
        "swatch": swatch,
        "unknown": UNKNOWN,
        "version": __version__,
        "colours": Markup(style_sheet()),
    }
    return environment
