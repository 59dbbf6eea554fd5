"""What the estimate says of each published run, beside what was measured."""

from collections.abc import Iterable
from dataclasses import dataclass

from published import formulas, reader
from published.rows import GIB, Row, configuration
from toolkit.errors import ToolkitError

_RESULTS = ("fits", "tight", "does not fit")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run. Numbers in bytes."""

    row: Row
    setup: str
    """The kind: framework or engine of the option."""
    refused: str
    kind: str
    """What was measured: allocated, reserved, nvidia-smi."""
    peak: int | None = None
    static: int | None = None
    plain_peak: float | None = None
    plain_static: float | None = None
    result: str = ""
    """Of all stages: fits, tight, does not fit."""

    @property
    def measured_peak(self) -> float | None:
        return GIB * float(self.row["peak_mem_gib"]) if self.row["peak_mem_gib"] else None

    @property
    def measured_static(self) -> float | None:
        return GIB * float(self.row["static_mem_gib"]) if self.row["static_mem_gib"] else None

    @property
    def configuration(self) -> tuple[str, ...]:
        return configuration(self.row)

    @property
    def did_fit(self) -> bool:
        return self.row["fits"] != "0"


def outcomes(rows: Iterable[Row]) -> list[Outcome]:
    """Of every row, refused ones included."""
    return [_outcome(row) for row in rows]


def _outcome(row: Row) -> Outcome:
    kind = _kind(row)
    try:
        run = reader.read(row)
        stages = run.request.stages()
    except (reader.RefusedError, ToolkitError) as error:
        return Outcome(row=row, setup="", refused=str(error), kind=kind)
    seen = stages if run.stage is None else stages[run.stage : run.stage + 1]
    figure = {"allocated": "allocated", "reserved": "reserved", "nvidia-smi": "occupied"}[kind]
    return Outcome(
        row=row,
        setup=run.framework,
        refused="",
        kind=kind,
        peak=max(getattr(stage, figure) for stage in seen),
        static=seen[-1].static,
        plain_peak=formulas.peak(run),
        plain_static=formulas.states(run),
        result=_RESULTS[max(_RESULTS.index(stage.verdict) for stage in stages)],
    )


def _kind(row: Row) -> str:
    """What the figure is. nanotron's are "Mem Res" of its own table, whatever the column says: the data's README."""
    if row["framework"].startswith("nanotron"):
        return "reserved"
    words = (("nvidia-smi", "nvidia-smi"), ("reserved", "reserved"))
    return next((name for word, name in words if word in row["peak_mem_kind"]), "allocated")
