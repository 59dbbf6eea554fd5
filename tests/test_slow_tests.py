"""What tests took, in tests/slow_tests.json, follows renamed tests, and decides which of them run each day."""

from pathlib import Path
from typing import Any

import pytest
from nonempty import nonempty
from slow_tests import (
    DAILY_SECONDS,
    LONGEST_DAILY_CASE,
    ROOT,
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


def _daily_cases(monkeypatch: pytest.MonkeyPatch, measured: Measured, *marks: str) -> list[str]:
    """The cases that `make test` keeps of twelve."""
    monkeypatch.setattr("slow_tests.slow_tests", lambda: {"tests/test_a.py::test_b": measured})
    items: list[Any] = [_Case(f"tests/test_a.py::test_b[{number}]", *marks) for number in range(12)]
    leave_long_cases_to_test_all(items)
    return [item.nodeid for item in items if "whole" not in item.marks]


def test_of_many_long_cases_as_many_remain_as_fit_into_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    remaining = _daily_cases(monkeypatch, Measured(seconds=DAILY_SECONDS * 3, cases=12))
    assert len(remaining) == 4
    again = _daily_cases(monkeypatch, Measured(seconds=DAILY_SECONDS, cases=4))
    assert remaining == again, "the same after the next measurement"


def test_one_of_very_long_cases_remains_but_none_that_takes_longer_than_all_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(_daily_cases(monkeypatch, Measured(seconds=12 * LONGEST_DAILY_CASE, cases=12))) == 1
    assert not _daily_cases(monkeypatch, Measured(seconds=12 * LONGEST_DAILY_CASE + 1, cases=12))


def test_short_cases_remain_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_daily_cases(monkeypatch, Measured(seconds=200.0, cases=600))) == 12


def test_a_test_may_keep_all_of_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_daily_cases(monkeypatch, Measured(seconds=1200.0, cases=12), "daily")) == 12
