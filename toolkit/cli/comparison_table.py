"""The table of a comparison in a terminal, with a diagnosis for what differs."""

import math

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.parity.comparison import Comparison, Entry
from toolkit.parity.verdict import Verdict

_STYLE = {"same": "green", "differs": "bold red", "failed": "bold red"}
_ENDING = {"differs": "differ", "failed": "failed"}


def print_comparison(comparison: Comparison, *, seconds: float) -> None:
    """Title, table, tolerances, diagnoses, and one line that says it all."""
    console = Console(highlight=False)
    console.print(Text(comparison.title, style="bold"), Text(f"against {comparison.baseline.curve.label}"))
    console.print(_table(comparison))
    bounds, last = comparison.bounds, len(comparison.baseline.curve) - 1
    has_tensors = bool(comparison.baseline.initial)  # finished runs keep none
    (loss, norm), (last_loss, last_norm) = bounds.curve.at(0), bounds.curve.at(last)
    _wrapped(
        console,
        "allowed",
        f"loss {loss:.1e} in step 1 to {last_loss:.1e} in step {last + 1}, grad norm {norm:.1e} to {last_norm:.1e}"
        + (f", weights {bounds.parameters:.1e}, one gradient {bounds.gradient:.1e}" if has_tensors else ""),
    )
    _wrapped(console, "from", bounds.curve.source)
    for note in comparison.notes:
        _wrapped(console, "note", note)
    for entry in comparison.entries:
        if entry.error:
            _wrapped(console, entry.asked, f"failed: {entry.error}", style="bold red")
            if entry.command:
                _wrapped(console, "", f"alone: {entry.command}")
        elif entry.diagnosis is not None:
            diagnosis = entry.diagnosis
            _wrapped(console, entry.asked, f"{diagnosis.cause}: {diagnosis.sentence}", style="bold red")
            if diagnosis.evidence:
                _wrapped(console, "", diagnosis.evidence)
    wrong = [entry.asked for entry in comparison.entries if not entry.passed]
    count = len(comparison.entries)
    if wrong:
        words = " or ".join(dict.fromkeys(_ENDING[entry.word] for entry in comparison.entries if not entry.passed))
        line = f"{len(wrong)} of {count} {words}: {', '.join(wrong)}"
    else:
        line = f"all {count} train the same" if count > 1 else "it trains the same"
    console.print(
        Text(line, style="bold red" if wrong else "bold green"), Text(f"({seconds:.0f} s)", style="dim"), soft_wrap=True
    )


def _table(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("strategy", "loss", "grad norm", "weights", "gradient", "agrees", "verdict"):
        is_text = heading in ("strategy", "agrees", "verdict")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for entry in comparison.entries:
        table.add_row(*_cells(entry), Text(entry.word, style=_STYLE[entry.word]))
    return table


def _cells(entry: Entry) -> list[str]:
    verdict = entry.verdict
    if verdict is None:
        return [entry.asked, "", "", "", "", ""]
    report = verdict.report
    return [
        entry.asked,
        number(report.max_loss_difference),
        number(report.max_norm_difference),
        number(verdict.parameters if verdict.case.baseline.initial else math.nan),
        number(verdict.rows[0].difference if verdict.rows else math.nan),
        agreement(verdict),
    ]


def agreement(verdict: Verdict) -> str:
    """How far a strategy agrees with the baseline."""
    step = verdict.report.first_diverging_step
    if verdict.rung == "bitwise":
        return "every bit"
    if verdict.passed:
        return "every step"
    if verdict.rung == "none":
        return "nowhere"
    return "in every loss" if step is None else f"until step {step - 1}"


def number(value: float) -> str:
    """`1.2e-07`; `0` for none at all, and words for what is no number."""
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.1e}"


def _wrapped(console: Console, name: str, text: str, *, style: str = "dim") -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=9, style=style, no_wrap=True)
    grid.add_column()
    grid.add_row(name, text)
    console.print(grid)
