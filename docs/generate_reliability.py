"""Write the tables of docs/reliability.md from the results of the scripts under tests/cluster/.

python tests/cluster/faults.py --cases 20
python docs/generate_reliability.py

Each file build/reliability/NAME.jsonl has one case per line; `problem` is empty for a case that passed. Only the text
between the markers of NAME is replaced, so a campaign that was not run again keeps its table.
"""

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "build" / "reliability"
PAGE = Path(__file__).parent / "reliability.md"
_END = "<!-- end of results -->"
Case = dict[str, Any]


def table(cases: Sequence[Case]) -> str:
    """Format counts and delays of one campaign."""
    failed = [case for case in cases if case["problem"]]
    rows = [("cases", str(len(cases))), ("failed", str(len(failed)))]
    if any("is_named" in case for case in cases):
        rows.append(("rank and step named", f"{sum(case.get('is_named', False) for case in cases)} of {len(cases)}"))
    delays = [case["delay_seconds"] for case in cases if "delay_seconds" in case]
    if delays:
        rows.append(("delay, median", f"{statistics.median(delays):.1f} s"))
        rows.append(("delay, largest", f"{max(delays):.1f} s"))
    drawn = {name: _drawn(cases, name) for name in ("layout", "phase", "rank", "where")}
    rows += [(f"drawn: {name}", values) for name, values in drawn.items() if values]
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join([*lines, *(f"\nFailed: {case}" for case in failed)])


def matrix(differences: Mapping[str, Mapping[str, float]]) -> str:
    """Format a row for each layout that saved, a column for each that resumed."""
    names = list(differences)
    rows = [
        f"| **{name}** | {' | '.join('0' if values[other] == 0 else f'{values[other]:.0e}' for other in names)} |"
        for name, values in differences.items()
    ]
    return "\n".join([f"| from, to | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}", *rows])


def page(current: str, results: Iterator[tuple[str, str]]) -> str:
    """Replace the tables of `current` for which there are results."""
    for name, text in results:
        begin = f"<!-- results: {name} -->"
        if begin not in current:
            raise SystemExit(f"{PAGE.name}: no {begin}")
        pattern = re.compile(rf"{re.escape(begin)}\n.*?{re.escape(_END)}", re.DOTALL)
        new = f"{begin}\n\n{text}\n\n{_END}"
        current = pattern.sub(lambda _, new=new: new, current)  # type: ignore[misc]
    return current


def read_results() -> Iterator[tuple[str, str]]:
    """Yield name and table of each campaign that was run."""
    for path in sorted(RESULTS.glob("*.jsonl")):
        cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if cases:
            yield path.stem, table(cases)
    resumed = RESULTS / "resume.json"
    if resumed.exists():
        yield "resume", matrix(json.loads(resumed.read_text(encoding="utf-8"))["table"])


def _drawn(cases: Sequence[Case], name: str) -> str:
    """Count how often each value was drawn, or '' if cases have none."""
    values = [str(case[name]) for case in cases if case.get(name) is not None]
    return ", ".join(f"{value} ({values.count(value)})" for value in sorted(set(values)))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read_results()), encoding="utf-8")
