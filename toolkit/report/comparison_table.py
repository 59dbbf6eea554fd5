"""The table of a comparison in a terminal, with a diagnosis for what differs."""

import math
import re

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.parity.comparison import Baseline, Comparison, StrategyResult
from toolkit.parity.result import ParityResult
from toolkit.report.terminal import table_console
from toolkit.units import english_list

_STYLE = {"same": "green", "cannot tell": "bold yellow", "differs": "bold red", "failed": "bold red"}
_NUMBER_WIDTH = len("1.2e-07")
_GAP = 3
"""Spaces between two columns."""
_EDGE = 1
"""Spaces on both sides of the table."""
_NUMBERS = ("loss", "grad norm", "weights", "gradient")


def print_comparison(comparison: Comparison, *, seconds: float) -> None:
    """Print title, table, tolerances, diagnoses, and a one-line summary."""
    console = table_console()
    baselines = comparison.baselines
    labels = english_list([baseline.run.curve.label for baseline in baselines])
    console.print(Text(comparison.title, style="bold"), Text(f"against {labels}"))
    console.print(_table(comparison, console.width))
    for baseline in baselines:
        name = f" ({baseline.run.curve.label})" if len(baselines) > 1 else ""
        _wrapped(console, "allowed", f"{_allowed(baseline)}{name}")
    _wrapped(console, "from", baselines[0].bounds.curve.source)
    for note in comparison.notes:
        _wrapped(console, "note", note)
    for strategy in comparison.results:
        _print_reasons(console, strategy)
    console.print(
        Text(_summary(comparison), style=f"bold {_STYLE[comparison.outcome]}"),
        Text(f"({seconds:.0f} s)", style="dim"),
        soft_wrap=True,
    )


def _allowed(baseline: Baseline) -> str:
    """Say which differences from a baseline are within the tolerance."""
    bounds = baseline.bounds
    curve = baseline.run.curve
    last = len(curve) - 1
    first_loss, first_norm = bounds.curve.at(0)
    last_loss, last_norm = bounds.curve.at(last)
    allowed = f"loss {first_loss:.1e} in step {curve.step(1)} to {last_loss:.1e} in step {curve.step(last + 1)}"
    if curve.grad_norms:
        allowed += f", grad norm {first_norm:.1e} to {last_norm:.1e}"
    if baseline.run.initial:  # finished runs keep no tensors
        allowed += f", weights {bounds.parameters:.1e}, one gradient {bounds.gradient:.1e}"
    return allowed


def _print_reasons(console: Console, strategy: StrategyResult) -> None:
    """Print why a strategy failed, or how it differs; nothing for one that trains the same."""
    if strategy.error:
        _wrapped(console, strategy.name, f"failed: {strategy.error}", style="bold red")
        if strategy.command:
            _wrapped(console, "", f"alone: {strategy.command}")
        return
    diagnosis = strategy.diagnosis
    if diagnosis is None:
        return
    sentence = diagnosis.sentence
    if strategy.outcome != "cannot tell":
        sentence = f"{diagnosis.cause}: {sentence}"
    _wrapped(console, strategy.name, sentence, style=_STYLE[strategy.outcome])
    if diagnosis.evidence:
        _wrapped(console, "", diagnosis.evidence)


def _summary(comparison: Comparison) -> str:
    wrong = [strategy for strategy in comparison.results if not strategy.passed]
    count = len(comparison.results)
    if not wrong:
        return f"all {count} train the same" if count > 1 else "it trains the same"
    if comparison.outcome == "cannot tell":
        names = ", ".join(strategy.name for strategy in wrong)
        return f"cannot tell from rounding at this learning rate: {names} ({len(wrong)} of {count})"
    verbs = {"differs": "differ", "failed": "failed", "cannot tell": "cannot be told from rounding"}
    words = " or ".join(dict.fromkeys(verbs[strategy.outcome] for strategy in wrong))
    return f"{len(wrong)} of {count} {words}: {', '.join(strategy.name for strategy in wrong)}"


def _table(comparison: Comparison, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    headings = _NUMBERS if comparison.baselines[0].run.initial else _NUMBERS[:2]  # finished runs keep no tensors
    name = "strategy" if comparison.baselines[0].run.initial else "run"
    least = {heading: max(_NUMBER_WIDTH, *map(len, heading.split())) for heading in (*headings, "agrees", "result")}
    # Names stay whole where there is room beside the other columns, which wrap between words.
    room = max(len(name), width - 2 * _EDGE - sum(_GAP + narrowest for narrowest in least.values()))
    longest = max((cell_len(strategy.name) for strategy in comparison.results), default=0)
    table.add_column(name, overflow="fold", width=min(room, max(len(name), longest)))
    for heading, narrowest in least.items():
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", min_width=narrowest)
    for strategy in comparison.results:
        cells = [""] * (len(headings) + 1)
        result = strategy.result
        if result is not None:
            weights = result.parameters if result.baseline.initial else math.nan
            gradient = result.gradients[0].difference if result.gradients else math.nan
            numbers = (result.curves.max_loss_difference, result.curves.max_norm_difference, weights, gradient)
            cells = [*map(number, numbers[: len(headings)]), agreement(result)]
        table.add_row(_broken(strategy.name, room), *cells, Text(strategy.outcome, style=_STYLE[strategy.outcome]))
    return table


def _broken(name: str, width: int) -> str:
    """Break a strategy's name before its parts, where it is longer than `width`."""
    lines = [""]
    for part in re.findall(r"-?[^-]*", name):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def agreement(result: ParityResult) -> str:
    """Say how far a strategy agrees with the baseline."""
    step = result.curves.first_diverging_step
    if result.agreement == "bitwise":
        return "every bit"
    if result.passed:
        return "every step"
    if result.agreement == "none":
        return "nowhere"
    return "in every loss" if step is None else f"until step {result.run.curve.step(step - 1)}"


def number(value: float) -> str:
    """Format as `1.2e-07`; `0` for exactly zero, `not finite` for an infinity, nothing for NaN."""
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.1e}"


def _wrapped(console: Console, name: str, text: str, *, style: str = "dim") -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=9, max_width=32, style=style, overflow="fold")
    grid.add_column()
    grid.add_row(name, text)
    console.print(grid)
