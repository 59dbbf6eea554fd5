"""The report of a comparison: index.html, comparison.json, and the plots as files.

    write_comparison(Path("report"), comparison)

`comparison` is plain data, as comparison.json holds it: docs/report.md has its form. The page shows it and judges
nothing: verdicts, causes and tolerances are the comparison's own.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.report.comparison_charts import Look, comparison_charts, looks
from toolkit.report.folder import replace_folder
from toolkit.report.heat_map import HeatMap, gradient_tolerance, heat_map, legend
from toolkit.report.numerals import NOT_FINITE, UNKNOWN, difference, english_list, scientific
from toolkit.report.page import figure, readouts, render

PLOTS = ("losses", "loss-difference", "grad-norms", "grad-norm-difference", "gradients")
FILES = ("index.html", "comparison.json", *(f"{plot}.{kind}" for plot in PLOTS for kind in ("png", "svg")))

_AGREEMENT = {"bitwise": "every bit", "curve": "every step", "first step": "first step only", "none": "nothing"}
_SHOWN_PARAMETERS = 8

Data = Mapping[str, Any]


def write_comparison(folder: Path, comparison: Data) -> Path:
    """Write the report into `folder` and return the path of its page.

    Raises ReportError where `folder` holds something that is not such a report; nothing half-written is left.
    """
    data = finite(comparison)

    def write(place: Path) -> None:
        from toolkit.report.images import write_chart, write_heat_map  # matplotlib is slow to import

        (place / "comparison.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (place / "index.html").write_text(comparison_page(data), encoding="utf-8")
        for chart in comparison_charts(data):
            write_chart(place, chart)
        write_heat_map(place, heat_map(data["strategies"]), [strategy["label"] for strategy in data["strategies"]])

    return replace_folder(folder, FILES, write)


def comparison_page(comparison: Data) -> str:
    """The page as HTML."""
    strategies: Sequence[Data] = comparison["strategies"]
    charts = comparison_charts(comparison)
    gradients = heat_map(strategies)
    return render(
        "comparison.html",
        comparison=comparison,
        sentence=sentence(comparison),
        remainder=remainder(strategies),
        rows=[_row(strategy, look) for strategy, look in zip(strategies, looks(strategies), strict=True)],
        figures=[figure(chart) for chart in charts],
        heat=gradients,
        heat_columns=[
            (strategies[index]["label"], looks(strategies)[index], strategies[index]["verdict"])
            for index in gradients.columns
        ],
        heat_legend=legend([gradient_tolerance(strategies[index]) for index in gradients.columns] or [1e-6]),
        without_gradients=english_list(
            [strategy["label"] for index, strategy in enumerate(strategies) if index not in gradients.columns]
        ),
        readouts={"charts": readouts(charts), "heat": _heat_readout(gradients, strategies)},
    )


def sentence(comparison: Data) -> str:
    """The overall verdict, in words."""
    strategies, baseline = comparison["strategies"], comparison["baseline"]["label"]
    same = sum(strategy["verdict"] == "same" for strategy in strategies)
    if not strategies:
        return "No strategy was compared."
    if len(strategies) == 1:
        label, verdict = strategies[0]["label"], strategies[0]["verdict"]
        if verdict == "failed":
            return f"{label} failed to run."
        return f"{label} {'trains' if verdict == 'same' else 'does not train'} the same model as the {baseline}."
    if same == len(strategies):
        return f"All {same} strategies train the same model as the {baseline}."
    if same == 0:
        return f"None of {len(strategies)} strategies trains the same model as the {baseline}."
    return (
        f"{same} of {len(strategies)} strategies {'trains' if same == 1 else 'train'} the same model as the {baseline}."
    )


def remainder(strategies: Sequence[Data]) -> str:
    """What the others do: '1 differs, 2 failed to run.'"""
    differing = sum(strategy["verdict"] == "differs" for strategy in strategies)
    failed = sum(strategy["verdict"] == "failed" for strategy in strategies)
    if len(strategies) < 2 or not differing + failed:
        return ""
    parts = [f"{differing} {'differs' if differing == 1 else 'differ'}"] if differing else []
    parts += [f"{failed} failed to run"] if failed else []
    return f"{english_list(parts)}."


def finite(value: Any) -> Any:
    """The same data as JSON has it: what is not finite becomes null, tuples become lists."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _row(strategy: Data, look: Look) -> dict[str, Any]:
    """A strategy as the matrix and its box show it."""
    tolerance: Data = strategy.get("tolerance") or {}
    gradients = _worst(strategy, "gradients", tolerance.get("gradient"))
    updates = _worst(strategy, "updates", tolerance.get("gradient"))
    ran = strategy["verdict"] != "failed"
    rung = strategy.get("rung") or ""
    return {
        "strategy": strategy,
        "look": look,
        "agreement": _AGREEMENT.get(rung, rung) if ran else UNKNOWN,
        "numbers": [
            _against(strategy.get("loss_difference"), _highest(tolerance.get("loss")), ran=ran),
            _against(strategy.get("norm_difference"), _highest(tolerance.get("grad_norm")), ran=ran),
            _against(gradients["worst"], tolerance.get("gradient"), ran=ran and bool(strategy.get("gradients"))),
            _against(strategy.get("parameter_difference"), tolerance.get("parameters"), ran=ran),
        ],
        "gradients": gradients,
        "updates": updates,
    }


def _against(value: float | None, bound: float | None, *, ran: bool) -> dict[str, Any]:
    """A difference, and whether it is beyond its bound."""
    if not ran:
        return {"text": UNKNOWN, "beyond": False, "title": ""}
    beyond = value is None or (bound is not None and value > bound)
    title = f"tolerance {scientific(bound)}" if bound is not None else ""
    if value is not None and bound:
        title += f", {value / bound:.2g} of it"
    return {"text": difference(value), "beyond": beyond, "title": title}


def _worst(strategy: Data, field: str, tolerance: float | None) -> dict[str, Any]:
    """The parameters of a strategy, the largest difference first; the first few are shown at once."""

    def size(row: Data) -> float:
        value = row.get("difference")
        return math.inf if value is None else float(value)

    rows = sorted(strategy.get(field) or [], key=lambda row: -size(row))
    beyond = sum(tolerance is not None and size(row) > tolerance for row in rows)
    return {
        "rows": rows[:_SHOWN_PARAMETERS],
        "rest": rows[_SHOWN_PARAMETERS:],
        "beyond": beyond,
        "count": len(rows),
        "worst": rows[0].get("difference") if rows else 0.0,
        "tolerance": tolerance,
    }


def _highest(bounds: Sequence[float | None] | None) -> float | None:
    return max((bound for bound in bounds or () if bound is not None), default=None)


def _heat_readout(gradients: HeatMap, strategies: Sequence[Data]) -> dict[str, Any]:
    return {
        "columns": [strategies[index]["label"] for index in gradients.columns],
        "rows": gradients.data(),
        "unknown": NOT_FINITE,
    }
