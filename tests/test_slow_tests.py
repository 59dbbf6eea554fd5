"""What tests took, in tests/slow_tests.json, follows renamed tests, and decides which of them run each day."""

from pathlib import Path
from typing import Any

import pytest
from nonempty import nonempty
from slow_tests import (
    DAILY_SECONDS,
    LONGEST_DAILY_CASE,
    LONGEST_OF_A_FILE,
    ROOT,
    SECONDS_OF_SHORT_CASES,
    Measured,
    exists,
    function_name,
    leave_long_cases_to_test_all,
    slow_tests,
)


def test_nearly_every_slow_test_exists() -> None:
    slow = slow_tests()
    assert len(slow) > 20
    missing = [name for name in slow if not exists(name)]
    assert len(missing) < len(slow) / 10, f"run make durations: {missing}"


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [("tests/a.py::test_b[c::d-1]", "tests/a.py::test_b"), ("tests/a.py::TestB::test_c", "tests/a.py::TestB::test_c")],
)
def test_the_name_of_a_test_function_has_no_parameters(nodeid: str, name: str) -> None:
    assert function_name(nodeid) == name


def test_fast_tests_leave_whole_packages_covered() -> None:
    slow_files = {name for name in slow_tests() if "::" not in name}
    for folder in nonempty(path for path in sorted((ROOT / "tests").iterdir()) if any(path.glob("test_*.py"))):
        files = {str(path.relative_to(ROOT)) for path in Path(folder).glob("test_*.py")}
        assert files - slow_files or folder.name == "gpu", f"make test-fast runs nothing in {folder.name}"


class _Case:
    """A collected case, as far as it is asked for here."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid = nodeid
        self.marks = list(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def _daily_cases(monkeypatch: pytest.MonkeyPatch, measured: Measured, *marks: str, cases: int = 12) -> list[str]:
    """The cases that `make test` keeps of so many."""
    monkeypatch.setattr("slow_tests.slow_tests", lambda: {"tests/test_a.py::test_b": measured})
    items: list[Any] = [_Case(f"tests/test_a.py::test_b[{number}]", *marks) for number in range(cases)]
    leave_long_cases_to_test_all(items)
    return [item.nodeid for item in items if "whole" not in item.marks]


def test_of_many_long_cases_as_many_remain_as_fit_into_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    remaining = _daily_cases(monkeypatch, Measured(seconds=DAILY_SECONDS * 3, cases=12))
    assert len(remaining) == 4
    again = _daily_cases(monkeypatch, Measured(seconds=DAILY_SECONDS, cases=4))
    assert remaining == again, "the same after the next measurement"


def test_one_of_long_cases_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_daily_cases(monkeypatch, Measured(seconds=12 * LONGEST_DAILY_CASE, cases=12))) == 1


def test_of_very_long_tests_the_shortest_remain_where_their_file_has_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds_of_a_case = {
        "tests/test_a.py::test_longest": LONGEST_DAILY_CASE + 2,
        "tests/test_a.py::test_long": LONGEST_DAILY_CASE + 1,
        "tests/test_b.py::test_shorter": LONGEST_DAILY_CASE,
        "tests/test_b.py::test_long": LONGEST_DAILY_CASE + 1,
        "tests/test_c.py::test_longest_of_all": LONGEST_OF_A_FILE + 1,
    }
    rows = {name: Measured(seconds=3 * seconds, cases=3) for name, seconds in seconds_of_a_case.items()}
    monkeypatch.setattr("slow_tests.slow_tests", lambda: rows)
    items: list[Any] = [_Case(f"{name}[{number}]") for name in rows for number in range(3)]
    leave_long_cases_to_test_all(items)
    daily = [function_name(item.nodeid) for item in items if "whole" not in item.marks]
    assert daily == ["tests/test_a.py::test_long", "tests/test_b.py::test_shorter"]


def test_of_short_cases_more_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(seconds=2 * SECONDS_OF_SHORT_CASES, cases=200)
    assert len(_daily_cases(monkeypatch, measured, cases=200)) == 100


def test_a_test_may_keep_all_of_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_daily_cases(monkeypatch, Measured(seconds=1200.0, cases=12), "daily")) == 12
