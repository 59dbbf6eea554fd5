"""The tests that `make test-fast` leaves out are named in tests/slow_tests.json, which follows renamed tests."""

import ast
from pathlib import Path

import pytest
from nonempty import nonempty
from slow_tests import ROOT, function_name, slow_tests


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
