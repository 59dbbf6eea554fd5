"""What a run of the tests skipped, said at its end: how many tests for which reason, and the command that runs them.

`make test` and `make test-fast` use it (`--report-skipped`). With `--max-skipped N` a run that skips more fails: CI
has all that tests need, and a package that can no longer be installed there must not go unnoticed.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "build" / "skipped.txt"
"""Ids of the tests or files that the last run skipped, one a line: `make test-skipped` runs them."""
COMMAND = "make test-skipped"


def add_options(parser: pytest.Parser) -> None:
    """Add `--report-skipped` and `--max-skipped N` to pytest's options."""
    group = parser.getgroup("skipped tests")
    group.addoption("--report-skipped", action="store_true", help="say at the end what was skipped, and how to run it")
    group.addoption("--max-skipped", type=int, metavar="N", help="fail when more tests are skipped (CI)")


def reason_of(report: Any) -> str:
    """The reason that a skipped test or module gave, without pytest's own word before it."""
    longrepr = report.longrepr
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return str(reason).removeprefix("Skipped: ")


def summary(reasons: Iterable[str], *, limit: int | None) -> list[str]:
    """Lines that say how many tests were skipped, grouped by reason, most frequent first; none where none was."""
    counts = Counter(reasons)
    total = counts.total()
    if not total:
        return []
    lines = [f"{number:5d}  {reason}" for reason, number in counts.most_common()]
    lines.append(f"{total} skipped. To install what they need and run them: {COMMAND}")
    if limit is not None and total > limit:
        lines.append(f"FAILED: more than {limit} tests are skipped (--max-skipped)")
    return lines


class SkippedTests:
    """The pytest plugin behind `--report-skipped` and `--max-skipped`, in the process that prints."""

    def __init__(self, *, limit: int | None, path: Path = PATH) -> None:
        self._limit = limit
        self._path = path
        self._reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._reasons[report.nodeid] = reason_of(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._reasons[report.nodeid] = reason_of(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(f"{nodeid}\n" for nodeid in self._reasons))
        is_above_limit = self._limit is not None and len(self._reasons) > self._limit
        if is_above_limit and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        lines = summary(self._reasons.values(), limit=self._limit)
        if lines:
            terminalreporter.section("skipped tests")
            for line in lines:
                terminalreporter.line(line)
