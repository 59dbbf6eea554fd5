"""A page: one HTML file rendered from a template, with inline style, script and drawings, and the folder it is in."""

from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from toolkit import __version__
from toolkit.errors import ReportError
from toolkit.files import published
from toolkit.report.chart import Chart, readout, style_sheet
from toolkit.report.drawing import Drawing
from toolkit.report.step_bars import TONES, digits
from toolkit.units import UNKNOWN, difference, fixed, format_bytes, plural, scientific, seconds

GENERATOR = '<meta name="generator" content="dstk'
"""A tag in the head of every page, which identifies a folder as a report."""


def render(template: str, **content: Any) -> str:
    """Render the page with all data escaped."""
    return _environment().get_template(template).render(**content)


def figure(chart: Chart) -> dict[str, Any]:
    """Return a chart with its drawings for wide and narrow screens, for a template."""
    return {"chart": chart, "drawings": [Drawing(chart, 540, 320), Drawing(chart, 340, 260)]}


def readouts(charts: Iterable[Chart]) -> dict[str, Any]:
    """Return the values of all charts by name."""
    return {chart.name: readout(chart) for chart in charts}


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("toolkit.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {each.__name__: each for each in (difference, scientific, fixed, seconds, plural)}
    environment.filters |= {"bytes": format_bytes, "digits": digits, "precise": lambda value: f"{digits(value)} s"}
    colors = Markup(style_sheet())
    environment.globals |= {"unknown": UNKNOWN, "version": __version__, "colors": colors, "tones": TONES}
    return environment


def replace_folder(folder: Path, files: Collection[str], write: Callable[[Path], None]) -> Path:
    """Let `write` fill a new folder that then replaces `folder`. `files` are the file names that a report may have.

    Returns the path of index.html. Raises ReportError if `folder` contains anything but a report or cannot be written;
    it is unchanged then.
    """
    check_replaceable(folder, files)
    try:
        with published(folder.resolve(), replaces=True) as place:  # a link to a folder stays one
            write(place)
    except OSError as error:
        raise ReportError(
            f"{folder}: the report cannot be written ({error.strerror or error}). Choose another folder."
        ) from error
    return folder / "index.html"


def check_replaceable(folder: Path, files: Collection[str]) -> None:
    """Raise ReportError if `folder` exists and is neither empty nor a report. Cheap: call it before long work."""
    try:
        if not folder.exists() and not folder.is_symlink():
            return
        if not folder.is_dir():
            raise ReportError(f"{folder}: not a folder. Choose another folder for the report.")
        held = sorted(path.name for path in folder.iterdir())
        foreign = [name for name in held if name not in files]
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise ReportError(
                f"{folder}: it contains {foreign[0]}{more}, which is not part of a report and would be deleted. "
                "Choose another folder."
            )
        page = folder / "index.html"
        if held and not (page.is_file() and GENERATOR in page.read_text(encoding="utf-8", errors="replace")[:4000]):
            raise ReportError(
                f"{folder}: it contains {held[0]} but no page of dstk report, and a report would replace it. "
                "Choose another folder."
            )
    except OSError as error:
        raise ReportError(
            f"{folder}: cannot be read ({error.strerror or error}). Choose another folder for the report."
        ) from error
