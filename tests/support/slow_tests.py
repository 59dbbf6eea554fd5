"""What the tests took when they were last measured, and what follows: which of them `make test` and `test-fast` run.

`make test-fast` leaves out the functions that took longest. Of a function with many long cases `make test` runs some,
and `make test-all` all. `make durations` runs the suite and writes slow_tests.json; a test in tests/test_slow_tests.py
keeps its names current.
"""

import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PATH = Path(__file__).parents[1] / "slow_tests.json"
ROOT = PATH.parents[1]
SECONDS_OF_A_FAST_TEST = 3.0
"""A test function is slow when all its parameters together take longer than this."""
SECONDS_OF_A_FAST_SETUP = 8.0
"""A shared fixture that takes longer makes every test of its module slow: one of them would pay for it."""
SECONDS_OF_A_LONG_CASE = 1.0
DAILY_SECONDS = 20.0
"""What the long cases of a test function may take in `make test`, all together."""
FEWEST_CASES = 3


class Measured(NamedTuple):
    """What a test function took, or a whole module."""

    seconds: float
    cases: int


def slow_tests() -> dict[str, Measured]:
    """What each slow test function took, by `path::name`, or a whole module, by `path`."""
    return {name: Measured(*row) for name, row in json.loads(PATH.read_text()).items()}


def leave_long_cases_to_test_all(items: list[pytest.Item]) -> None:
    """Mark cases of long test functions with `whole` until the others take DAILY_SECONDS.

    Which remain is drawn by their names, so that all parameters occur. A test with the mark `every_case` keeps all.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        is_exempt = any(item.get_closest_marker(name) for name in ("whole", "gpu", "every_case"))
        if "[" in item.nodeid and not is_exempt:
            cases[function_name(item.nodeid)].append(item)
    measured = slow_tests()
    for name, items_of_function in cases.items():
        row = measured.get(name)
        if row is None or row.seconds < SECONDS_OF_A_LONG_CASE * row.cases:
            continue
        allowed = max(FEWEST_CASES, int(DAILY_SECONDS * row.cases / row.seconds))
        for item in sorted(items_of_function, key=_drawn)[allowed:]:
            item.add_marker(pytest.mark.whole)


def _drawn(item: pytest.Item) -> str:
    return hashlib.sha256(item.nodeid.encode()).hexdigest()


def mark_slow_tests(items: list[pytest.Item]) -> None:
    """Mark what slow_tests.json lists with `slow`."""
    slow = slow_tests()
    for item in items:
        if function_name(item.nodeid) in slow or item.nodeid.partition("::")[0] in slow:
            item.add_marker(pytest.mark.slow)


def slowest_files_first(items: list[pytest.Item]) -> None:
    """Sort files by what they took: with a file of a minute begun last, one process works and the other waits."""
    seconds: dict[str, float] = defaultdict(float)
    slow = slow_tests()
    for name, measured in slow.items():
        module = name.partition("::")[0]
        if name == module or module not in slow:
            seconds[module] += measured.seconds
    files = {item.nodeid: item.nodeid.partition("::")[0] for item in items}
    items.sort(key=lambda item: (-seconds[files[item.nodeid]], files[item.nodeid]))


def function_name(nodeid: str) -> str:
    """`path::Class::name` without the parameters."""
    return nodeid.partition("[")[0]


class Durations:
    """The pytest plugin behind `--write-durations`: adds up what each test function takes."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._cases: dict[str, int] = defaultdict(int)
        self._slow_modules: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[function_name(report.nodeid)] += report.duration
        self._cases[function_name(report.nodeid)] += report.when == "call"
        if report.when == "setup" and report.duration > SECONDS_OF_A_FAST_SETUP:
            self._slow_modules.add(report.nodeid.partition("::")[0])

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        if hasattr(session.config, "workerinput") or exitstatus > pytest.ExitCode.TESTS_FAILED:
            return
        rows: dict[str, Measured] = {}
        for name, seconds in self._seconds.items():
            module = name.partition("::")[0]
            if seconds > SECONDS_OF_A_FAST_TEST:
                rows[name] = Measured(round(seconds, 1), self._cases[name])
            if module in self._slow_modules:
                before = rows.get(module, Measured(0.0, 0))
                rows[module] = Measured(round(before.seconds + seconds, 1), before.cases + self._cases[name])
        lines = [f" {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())]
        PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
