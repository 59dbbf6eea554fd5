"""What the tests took when they were last measured, and what follows: which of them `make test` and `test-fast` run.

`make test-fast` leaves out the functions that took longest. `make test` runs of each long function the cases that fit
into DAILY_SECONDS, but at least one, and few of functions whose cases take longer than LONGEST_DAILY_CASE each.
`make test-all` runs all. `make durations` measures what `make test` runs and writes slow_tests.json, in which it keeps
what it did not run; a test in tests/test_slow_tests.py keeps its names current.
"""

import ast
import hashlib
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PATH = Path(__file__).parents[1] / "slow_tests.json"
ROOT = PATH.parents[1]
SECONDS_OF_A_FAST_TEST = 3.0
"""A test function is slow when all its cases in `make test` together take longer than this."""
SECONDS_OF_A_FAST_SETUP = 8.0
"""A shared fixture that takes longer makes every test of its module slow: one of them would pay for it."""
SECONDS_OF_A_LONG_CASE = 0.5
"""A function with longer cases is written down however few of them were run: the others take as long."""
DAILY_SECONDS = 2.0
"""What the long cases of a test function may take in `make test`, all together."""
SECONDS_OF_SHORT_CASES = 30.0
"""The same of shorter ones."""
LONGEST_DAILY_CASE = 4.0
"""A test function whose cases take longer, on average, runs in `make test` only where its file has few others."""
SECONDS_OF_A_FILE = 3.0
"""What long tests of a file take in `make test`, at least, where it has as many."""
LONGEST_OF_A_FILE = 20.0
"""None of them takes longer."""


class Measured(NamedTuple):
    """What a test function took, or a whole module."""

    seconds: float
    cases: int

    @property
    def seconds_of_a_case(self) -> float:
        """The mean."""
        return self.seconds / self.cases

    @property
    def is_slow(self) -> bool:
        """Whether `make test-fast` leaves it out."""
        return self.seconds > SECONDS_OF_A_FAST_TEST


def slow_tests() -> dict[str, Measured]:
    """What each test function with long cases or many took, by `path::name`, or a slow module, by `path`."""
    return {name: Measured(*row) for name, row in json.loads(PATH.read_text()).items()}


def leave_long_cases_to_test_all(items: list[pytest.Item]) -> None:
    """Mark cases of long test functions with `whole`, by what they took when they were last measured.

    Of each function as many cases remain as take DAILY_SECONDS (or SECONDS_OF_SHORT_CASES), but at least one, and none
    of a function whose cases take longer than LONGEST_DAILY_CASE. Of those, the shortest remain with one case each, as
    long as all long tests of their file take less than SECONDS_OF_A_FILE. Which cases remain is drawn by their names,
    so that all parameters occur. A test with the mark `daily` keeps all.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    measured = slow_tests()
    for item in items:
        name = function_name(item.nodeid)
        if name in measured and not any(item.get_closest_marker(mark) for mark in ("whole", "gpu", "daily")):
            cases[name].append(item)
    remaining = {
        name: _daily_cases(measured[name], len(items_of_function)) for name, items_of_function in cases.items()
    }
    seconds_of_file: dict[str, float] = defaultdict(float)
    for name, number in remaining.items():
        seconds_of_file[module_name(name)] += number * measured[name].seconds_of_a_case
    for name in sorted(cases, key=lambda name: measured[name].seconds_of_a_case):
        module = module_name(name)
        seconds = measured[name].seconds_of_a_case
        if remaining[name] == 0 and seconds < LONGEST_OF_A_FILE and seconds_of_file[module] < SECONDS_OF_A_FILE:
            remaining[name] = 1
            seconds_of_file[module] += seconds
    for name, items_of_function in cases.items():
        for item in sorted(items_of_function, key=_drawn)[remaining[name] :]:
            item.add_marker(pytest.mark.whole)


def _daily_cases(measured: Measured, cases: int) -> int:
    """How many of the cases of a test function `make test` runs, whatever else its file has."""
    if measured.seconds_of_a_case > LONGEST_DAILY_CASE:
        return 0
    is_short = measured.seconds_of_a_case < SECONDS_OF_A_LONG_CASE
    seconds = SECONDS_OF_SHORT_CASES if is_short else DAILY_SECONDS
    return min(cases, max(1, int(seconds / measured.seconds_of_a_case)))


def _drawn(item: pytest.Item) -> str:
    return hashlib.sha256(item.nodeid.encode()).hexdigest()


def mark_slow_tests(items: list[pytest.Item]) -> None:
    """Mark slow functions, and all of slow modules, with `slow`."""
    slow = {name for name, measured in slow_tests().items() if measured.is_slow}
    for item in items:
        if function_name(item.nodeid) in slow or module_name(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)


def slowest_files_first(items: list[pytest.Item]) -> None:
    """Sort files by what `make test` takes for them: with a file of a minute begun last, one process works alone."""
    slow = slow_tests()
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        row = slow.get(function_name(item.nodeid))
        if row is not None and not item.get_closest_marker("whole"):
            seconds[module_name(item.nodeid)] += row.seconds_of_a_case
    items.sort(key=lambda item: (-seconds[module_name(item.nodeid)], module_name(item.nodeid)))


def function_name(nodeid: str) -> str:
    """`path::Class::name` without the parameters."""
    return nodeid.partition("[")[0]


def module_name(nodeid: str) -> str:
    """`path`, without the test function."""
    return nodeid.partition("::")[0]


def exists(name: str) -> bool:
    """Whether there is a module or a test function of this name."""
    path, *parts = name.split("::")
    if not (ROOT / path).is_file():
        return False
    node: ast.AST = _parsed(path)
    for part in parts:
        children = {
            child.name: child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef)
        }
        if part not in children:
            return False
        node = children[part]
    return True


@cache
def _parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


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
            self._slow_modules.add(module_name(report.nodeid))

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        if hasattr(session.config, "workerinput") or exitstatus > pytest.ExitCode.TESTS_FAILED:
            return
        measured_modules = {module_name(name) for name in self._seconds}
        rows = {
            name: row
            for name, row in slow_tests().items()
            if name not in self._seconds and name not in measured_modules and exists(name)
        }
        for name, seconds in self._seconds.items():
            module = module_name(name)
            measured = Measured(round(seconds, 1), self._cases[name])
            if measured.is_slow or (measured.cases and measured.seconds_of_a_case > SECONDS_OF_A_LONG_CASE):
                rows[name] = measured
            if module in self._slow_modules:
                before = rows.get(module, Measured(0.0, 0))
                rows[module] = Measured(round(before.seconds + seconds, 1), before.cases + self._cases[name])
        lines = [f" {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())]
        PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
