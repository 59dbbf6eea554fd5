"""A run of the tests says what it skipped, and fails in CI when that is more than a handful."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import skipped_tests

TESTS = """
import pytest

@pytest.mark.parametrize("case", range(3))
def test_in_a_browser(case):
    pytest.skip("chromium is not installed")

@pytest.mark.skipif(True, reason="torchao is not installed")
def test_float8():
    pass

@pytest.mark.xfail
def test_known_bug():
    assert False

def test_that_runs():
    pass
"""
CONFTEST = """
from pathlib import Path
from skipped_tests import SkippedTests, add_options

def pytest_addoption(parser):
    add_options(parser)

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        limit = config.getoption("--max-skipped")
        config.pluginmanager.register(SkippedTests(limit=limit, path=Path("build/skipped.txt")))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six tests of which four are skipped, and a module that is."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_pages.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text('import pytest\n\npytest.importorskip("a_module_that_nobody_has")\n')
    return tmp_path


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the folder's tests in a process of their own."""
    support = Path(skipped_tests.__file__).parent
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(support)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("processes", [[], ["-n", "1"]], ids=["one process", "xdist"])
def test_skipped_tests_are_counted_by_reason(folder: Path, processes: list[str]) -> None:
    done = run(folder, *processes)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.partition("skipped tests")[2].splitlines()[1:5]
    assert lines[0] == "    3  chromium is not installed"
    assert lines[1:3] == [
        "    1  could not import 'a_module_that_nobody_has': No module named 'a_module_that_nobody_has'",
        "    1  torchao is not installed",
    ] or lines[1:3] == [
        "    1  torchao is not installed",
        "    1  could not import 'a_module_that_nobody_has': No module named 'a_module_that_nobody_has'",
    ]
    assert lines[3] == "5 skipped. To install what they need and run them: make test-skipped"


def test_the_skipped_ones_are_written_down_so_that_they_can_be_run(folder: Path) -> None:
    run(folder)
    assert sorted((folder / "build" / "skipped.txt").read_text().splitlines()) == [
        "test_module.py",
        "test_pages.py::test_float8",
        "test_pages.py::test_in_a_browser[0]",
        "test_pages.py::test_in_a_browser[1]",
        "test_pages.py::test_in_a_browser[2]",
    ]
    again = run(folder, "@build/skipped.txt")
    assert "5 skipped" in again.stdout


@pytest.mark.parametrize(("limit", "code"), [(5, 0), (4, 1)])
def test_more_than_the_allowed_number_fails(folder: Path, limit: int, code: int) -> None:
    done = run(folder, "--max-skipped", str(limit))
    assert done.returncode == code
    assert ("FAILED: more than 4 tests are skipped" in done.stdout) == (code == 1)


def test_a_run_that_skips_nothing_says_nothing() -> None:
    assert skipped_tests.summary([], limit=0) == []
