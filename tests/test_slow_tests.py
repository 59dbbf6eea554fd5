"""What tests took, in tests/slow_tests.json, follows renamed tests, and decides which of them run each day."""

import ast
from pathlib import Path
from typing import Any

import pytest
from nonempty import nonempty
from slow_tests import (
    DAILY_SECONDS,
    FEWEST_CASES,
    ROOT,
    Measured,
    function_name,
    leave_long_cases_to_test_all,
    slow_tests,
)


def test_nearly_every_slow_test_exists() -> None:
    slow = slow_tests()
    assert len(slow) > 20
    missing = []
    for name in slow:
        path, *parts = name.split("::")
        tree: ast.AST | None = ast.parse((ROOT / path).read_text()) if (ROOT / path).is_file() else None
        for part in parts:
            tree = next(
                (
                    node
                    for node in ast.iter_child_nodes(tree or ast.Module(body=[], type_ignores=[]))
                    if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
                ),
                None,
            )
        if tree is None:
            missing.append(name)
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
    remaining = _daily_cases(monkeypatch, Measured(seconds=48.0, cases=12))
    assert len(remaining) == DAILY_SECONDS // 4
    assert remaining == _daily_cases(monkeypatch, Measured(seconds=16.0, cases=4)), (
        "the same after the next measurement"
    )
    assert len(_daily_cases(monkeypatch, Measured(seconds=1200.0, cases=12))) == FEWEST_CASES


def test_short_cases_remain_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_daily_cases(monkeypatch, Measured(seconds=500.0, cases=600))) == 12


def test_a_test_may_keep_all_of_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_daily_cases(monkeypatch, Measured(seconds=48.0, cases=12), "every_case")) == 12
