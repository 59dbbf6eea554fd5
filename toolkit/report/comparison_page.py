"""The report of a comparison: index.html, comparison.json, and the plots as files.

    write_comparison(Path("report"), comparison)

`comparison` is plain data in the form of comparison.json (docs/report.md). The page only presents it: results, causes
and tolerances are those of the comparison.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.report.comparison_charts import Look, comparison_charts, looks
from toolkit.report.heat_map import gradient_tolerance, heat_map, legend
from toolkit.report.page import figure, readouts, render, replace_folder
from toolkit.units import NOT_FINITE, UNKNOWN, difference, english_list, scientific

PLOTS = ("losses", "loss-difference", "grad-norms", "grad-norm-difference", "gradients")
FILES = ("index.html", "comparison.json", *(f"{plot}.{kind}" for plot in PLOTS for kind in ("png", "svg")))

_AGREEMENT = {"bitwise": "every bit", "curve": "every step", "first step": "first step only", "none": "nothing"}
_SHOWN_PARAMETERS = 8
_ROUNDING = "from rounding at this learning rate"

Data = Mapping[str, Any]


def write_comparison(folder: Path, comparison: Data) -> Path:
    """Write the report into `folder` and return the path of its page.

    Raises ReportError if `folder` contains anything but such a report. A failure leaves no partial report.
    """
    data = finite(comparison)

    def write(place: Path) -> None:
        from toolkit.report.images import write_chart, write_heat_map  # matplotlib is slow to import

        def files(name: str) -> list[Path]:
            return [place / f"{name}.png", place / f"{name}.svg"]

        (place / "comparison.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (place / "index.html").write_text(comparison_page(data), encoding="utf-8")
        strategies = data["strategies"]
        for chart in comparison_charts(data):
            write_chart(chart, *files(chart.name))
        write_heat_map(heat_map(strategies), [strategy["label"] for strategy in strategies], *files("gradients"))

    return replace_folder(folder, FILES, write)


def comparison_page(comparison: Data) -> str:
    """Render the page as HTML."""
    strategies = comparison["strategies"]
    charts = comparison_charts(comparison)
    gradients = heat_map(strategies)
    others = [strategy["label"] for index, strategy in enumerate(strategies) if index not in gradients.columns]
    looked = list(zip(strategies, looks(strategies), strict=True))
    drawn = [looked[index] for index in gradients.columns]
    heat_readout = {
        "columns": [strategy["label"] for strategy, _ in drawn],
        "rows": gradients.data(),
        "unknown": NOT_FINITE,
    }
    return render(
        "comparison.html",
        comparison=comparison,
        sentence=sentence(comparison),
        baselines=english_list([baseline["label"] for baseline in comparison["baselines"]]),
        remainder=remainder(strategies),
        rows=[_row(strategy, look) for strategy, look in looked],
        figures=[figure(chart) for chart in charts],
        heat=gradients,
        heat_columns=[(strategy["label"], look, strategy["result"]) for strategy, look in drawn],
        heat_legend=legend([gradient_tolerance(strategy) for strategy, _ in drawn] or [1e-6]),
        without_gradients=english_list(others),
        readouts={"charts": readouts(charts), "heat": heat_readout},
    )


def sentence(comparison: Data) -> str:
    """Summarize the comparison in one sentence."""
    strategies = comparison["strategies"]
    baselines = english_list([baseline["label"] for baseline in comparison["baselines"]])
    same = sum(strategy["result"] == "same" for strategy in strategies)
    if not strategies:
        return "No strategy was compared."
    if len(strategies) == 1:
        label = strategies[0]["label"]
        result = strategies[0]["result"]
        if result == "failed":
            return f"{label} failed to run."
        if result == "cannot tell":
            return f"Whether {label} trains the same model as the {baselines} cannot be told {_ROUNDING}."
        subject = f"{label} {'trains' if result == 'same' else 'does not train'}"
    elif same == len(strategies):
        subject = f"All {same} strategies train"
    else:
        subject = f"{same or 'None'} of {len(strategies)} strategies {'trains' if same <= 1 else 'train'}"
    return f"{subject} the same model as the {baselines}."


def remainder(strategies: Sequence[Data]) -> str:
    """Summarize the strategies that are not the same: '1 differs and 2 failed to run.'"""
    count = Counter(strategy["result"] for strategy in strategies)
    differs = f"{count['differs']} {'differs' if count['differs'] == 1 else 'differ'}"
    said = {
        "differs": differs,
        "failed": f"{count['failed']} failed to run",
        "cannot tell": f"{count['cannot tell']} cannot be told {_ROUNDING}",
    }
    parts = [text for result, text in said.items() if count[result]]
    return f"{english_list(parts)}." if parts and len(strategies) > 1 else ""


def finite(value: Any) -> Any:
    """Return the data as JSON can represent it: numbers that are not finite become null, tuples become lists."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _row(strategy: Data, look: Look) -> dict[str, Any]:
    """Return what the table and the diagnosis box show of a strategy."""
    tolerance: Data = strategy.get("tolerance") or {}
    gradients = _worst(strategy, "gradients", tolerance.get("gradient"))
    updates = _worst(strategy, "updates", tolerance.get("gradient"))
    weights = tolerance.get("parameters")  # finished runs keep none
    ran = strategy["result"] != "failed"
    has_norms = strategy.get("grad_norms") != []
    agreement = strategy.get("agreement") or ""
    return {
        "strategy": strategy,
        "look": look,
        "agreement": _AGREEMENT.get(agreement, agreement) if ran else UNKNOWN,
        "numbers": [
            _against(strategy.get("loss_difference"), _highest(tolerance.get("loss")), ran=ran),
            _against(strategy.get("norm_difference"), _highest(tolerance.get("grad_norm")), ran=ran and has_norms),
            _against(gradients["worst"], tolerance.get("gradient"), ran=ran and bool(strategy.get("gradients"))),
            _against(strategy.get("parameter_difference"), weights, ran=ran and weights is not None),
        ],
        "gradients": gradients,
        "updates": updates,
    }


def _against(value: float | None, bound: float | None, *, ran: bool) -> dict[str, Any]:
    """Format a difference, and say whether it is beyond its bound."""
    if not ran:
        return {"text": UNKNOWN, "beyond": False, "title": ""}
    beyond = value is None or (bound is not None and value > bound)
    title = f"tolerance {scientific(bound)}" if bound is not None else ""
    if value is not None and bound:
        title += f", {value / bound:.2g} of it"
    return {"text": difference(value), "beyond": beyond, "title": title}


def _worst(strategy: Data, field: str, tolerance: float | None) -> dict[str, Any]:
    """Sort the parameters of a strategy by difference, largest first; only the first few are shown unfolded."""

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
