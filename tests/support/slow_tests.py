"""Which tests `make test-fast` leaves out: the functions that took longest when the whole suite was last measured.

`make durations` runs the suite and writes slow_tests.json; a test in tests/test_slow_tests.py keeps its names current.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[1] / "slow_tests.json"
ROOT = PATH.parents[1]
SECONDS_OF_A_FAST_TEST = 3.0
"""A test function is slow when all its parameters together take longer than this."""
SECONDS_OF_A_FAST_SETUP = 8.0
"""A shared fixture that takes longer makes every test of its module slow: one of them would pay for it."""


def slow_tests() -> dict[str, float]:
    """Seconds of each slow test function, by `path::name`, or of a whole module, by `path`."""
    return json.loads(PATH.read_text())


def mark_slow_tests(items: list[pytest.Item]) -> None:
    """Mark what slow_tests.json lists with `slow`."""
    slow = slow_tests()
    for item in items:
        if function_name(item.nodeid) in slow or item.nodeid.partition("::")[0] in slow:
            item.add_marker(pytest.mark.slow)


def slowest_files_first(items: list[pytest.Item]) -> None:
    """Sort files by what they took: with a file of a minute begun last, one process works and the other waits."""
    seconds: dict[str, float] = defaultdict(float)
    for name, taken in slow_tests().items():
        seconds[name.partition("::")[0]] += taken
    files = {item.nodeid: item.nodeid.partition("::")[0] for item in items}
    items.sort(key=lambda item: (-seconds[files[item.nodeid]], files[item.nodeid]))


def function_name(nodeid: str) -> str:
    """`path::Class::name` without the parameters."""
    return nodeid.partition("[")[0]


class Durations:
    """The pytest plugin behind `--write-durations`: adds up what each test function takes."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._slow_modules: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[function_name(report.nodeid)] += report.duration
        if report.when == "setup" and report.duration > SECONDS_OF_A_FAST_SETUP:
            self._slow_modules.add(report.nodeid.partition("::")[0])

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        if hasattr(session.config, "workerinput") or exitstatus > pytest.ExitCode.TESTS_FAILED:
            return
        found: dict[str, float] = defaultdict(float)
        for name, seconds in self._seconds.items():
            module = name.partition("::")[0]
            if module in self._slow_modules:
                found[module] += seconds
            elif seconds > SECONDS_OF_A_FAST_TEST:
                found[name] += seconds
        rows = {name: round(seconds, 1) for name, seconds in sorted(found.items())}
        PATH.write_text(json.dumps(rows, indent=1) + "\n")
