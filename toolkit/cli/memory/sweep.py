"""The grid of `dstk memory --sweep`: the axes that it can have, and the memory of every combination of their values.

A new axis is an entry of `AXES`: the command's help and checks, the table and the JSON follow from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from toolkit.errors import LayoutError, ModelError

if TYPE_CHECKING:
    from toolkit.cli.memory.options import MemoryQuery
    from toolkit.estimate.breakdown import MemoryBreakdown


@dataclass(frozen=True, kw_only=True)
class QueryChange:
    """What a value of an axis changes in a MemoryQuery."""

    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of the recipe's fields, by section."""
    computed: Mapping[str, Any] = field(default_factory=dict)
    """Values of `MemoryQuery.computed`: an axis over a field of the Computation must be here, because these fields
    override what the recipe says."""


@dataclass(frozen=True, kw_only=True)
class SweepAxis:
    """A setting of a query that --sweep varies."""

    name: str
    values: tuple[Any, ...]
    change: Callable[["MemoryQuery", Any], QueryChange]
    """Returns what a value of the axis changes in a query."""


def _zero(query: "MemoryQuery", stage: int) -> QueryChange:
    return QueryChange(recipe={"parallel": {"zero_stage": stage}})


def _micro(query: "MemoryQuery", samples: int) -> QueryChange:
    """Change the micro-batch, and the global batch so that the accumulation stays."""
    global_batch_size = query.global_batch_size(samples)
    return QueryChange(recipe={"batch": {"micro_batch_size": samples, "global_batch_size": global_batch_size}})


def _recompute(query: "MemoryQuery", recompute: str) -> QueryChange:
    return QueryChange(recipe={"parallel": {"recompute": recompute}})


def _seq(query: "MemoryQuery", tokens: int) -> QueryChange:
    return QueryChange(recipe={"data": {"seq_len": tokens}})


AXES: Mapping[str, SweepAxis] = {
    axis.name: axis
    for axis in (
        SweepAxis(name="zero", values=(0, 1, 2, 3), change=_zero),
        SweepAxis(name="micro", values=(1, 2, 4, 8, 16), change=_micro),
        SweepAxis(name="recompute", values=("none", "selective", "full"), change=_recompute),
        SweepAxis(name="seq", values=(1024, 2048, 4096, 8192, 16384, 32768), change=_seq),
    )
}


def axis_names(text: str) -> list[str]:
    """Return the axes that an argument of --sweep names. Raises LayoutError for a name that is none or comes twice."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in AXES or names.count(name) > 1:
            problem = "is named twice" if name in AXES else "cannot be swept"
            advice = f"name some of {', '.join(AXES)}, each once"
            raise LayoutError.of("--sweep", text, f"{name!r} {problem}", advice)
    return names


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """One layout of the grid, and its stage that takes most; None where it cannot be trained."""

    names: tuple[str, ...]
    """Names of the axes."""
    values: tuple[Any, ...]
    """The cell's value on each axis."""
    peak: "MemoryBreakdown | None"
    reason: str = ""
    """Reason why the layout cannot be trained; empty where it can."""

    def as_json(self) -> dict[str, Any]:
        """Return the values of the cell for --json."""
        cell = dict(zip(self.names, self.values, strict=True))
        if self.peak is None:
            return cell | {"error": self.reason}
        fits = {"fits": self.peak.fits, "verdict": self.peak.verdict} if self.peak.device_bytes else {}
        return cell | {"allocated": self.peak.allocated, "total": self.peak.total, "stage": self.peak.stage} | fits


def varied(query: "MemoryQuery", values: Mapping[str, Any]) -> "MemoryQuery":
    """Return the query with a value on each axis. Raises LayoutError or ModelError for what no engine runs."""
    recipe: dict[str, dict[str, Any]] = {}
    computed: dict[str, Any] = {}
    for name, value in values.items():
        change = AXES[name].change(query, value)
        for section, fields in change.recipe.items():
            recipe.setdefault(section, {}).update(fields)
        computed.update(change.computed)
    cell = query.changed(recipe, computed)
    cell.check()
    return cell


def grid(query: "MemoryQuery", names: Sequence[str]) -> list[SweepCell]:
    """Every combination, the first name slowest. Raises LayoutError for `zero` where the engine has no such stages."""
    if "zero" in names and not query.has_zero_stages:
        reason = "only deepspeed has ZeRO stages, where no config names one"
        raise LayoutError.between((("--sweep", "zero"), ("train.engine", query.engine)), reason, "leave zero out")
    values = [_values(query, name) for name in names]
    cells = []
    for combination in product(*values):
        try:
            peak = varied(query, dict(zip(names, combination, strict=True))).peak()
            reason = ""
        except (LayoutError, ModelError) as error:
            peak = None
            reason = str(error)
        cells.append(SweepCell(names=tuple(names), values=combination, peak=peak, reason=reason))
    return cells


def _values(query: "MemoryQuery", name: str) -> tuple[Any, ...]:
    """Return the values of an axis: of lengths those that the model has positions for, or else all its positions."""
    values = AXES[name].values
    positions = query.model.shape.positions
    if name == "seq" and positions is not None:
        return tuple(length for length in values if length <= positions) or (positions,)
    return values
