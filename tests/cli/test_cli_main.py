"""`dstk`: commands, exit codes, and what it does not import."""

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from toolkit import __version__
from toolkit.cli import Count
from toolkit.cli.main import COMMANDS, main
from toolkit.errors import DataError, RecipeError
from toolkit.units import LARGEST_COUNT

HEAVY = ("torch", "transformers", "deepspeed", "accelerate", "datasets", "numpy", "matplotlib", "rich")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line; gives exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        out, err = capfd.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, out, err

    return run


@pytest.fixture
def command_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Puts a command `probe` into the table that does what the test wants."""

    def install(action: Callable[[], object]) -> None:
        module = types.ModuleType("probe_command")
        module.command = click.Command("probe", callback=action)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "probe_command", module)
        monkeypatch.setitem(COMMANDS, "probe", ("probe_command:command", "A test."))

    return install


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def test_help_lists_every_command_with_its_line(run: Run) -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    width = max(map(len, COMMANDS)) + 2
    assert all(f"  {name:<{width}}{line}\n" in out for name, (_, line) in COMMANDS.items())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["validat"]])
def test_what_needs_no_command_imports_none(arguments: list[str]) -> None:
    assert not imported_by(arguments) & {module.partition(":")[0] for module, _ in COMMANDS.values()}


SCHEDULE = ["schedule", "--pp", "2", "--micro-batches", "4", "--json"]
DEMO = str(Path(__file__).parents[2] / "recipes" / "demo.yaml")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["schema"], ["validate", "--help"], ["validate", DEMO], ["config", DEMO], SCHEDULE]
)
def test_what_only_calculates_imports_nothing_heavy(arguments: list[str]) -> None:
    assert not imported_by(arguments) & set(HEAVY)


def imported_by(arguments: list[str]) -> set[str]:
    """Names of the modules that a process has imported at its end."""
    code = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: sys.__stderr__.write('\\n' + json.dumps(list(sys.modules))))\n"
        f"sys.argv = ['dstk', *{arguments!r}]\n"
        "from toolkit.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return set(json.loads(done.stderr.split("\n")[-1]))


def test_the_version_is_the_packages(run: Run) -> None:
    assert run("--version") == (0, f"dstk {__version__}\n", "")


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "toolkit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"dstk {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["validat"], "validat is not a command. Did you mean validate? See dstk --help."),
        (["qqq"], f"qqq is not a command. Commands: {', '.join(COMMANDS)}. See dstk --help."),
        (["--qqq"], "No such option '--qqq'. See dstk --help."),
        (
            ["validate", "--worldsize"],
            "No such option '--worldsize'. Did you mean '--world-size'? See dstk validate --help.",
        ),
        (["validate"], "Missing argument 'RECIPE... [SECTION.KEY=VALUE]...'. See dstk validate --help."),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(run: Run, arguments: list[str], line: str) -> None:
    assert run(*arguments) == (2, "", f"error: {line}\n")


def test_no_command_shows_the_help(run: Run) -> None:
    code, _, err = run()
    assert (code, err.split("\n")[0]) == (2, "Usage: dstk COMMAND ...")


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (7, 7)])
def test_a_number_that_a_command_returns_is_the_exit_code(
    run: Run, command_that: Callable[..., None], returned: int | None, code: int
) -> None:
    command_that(lambda: returned)
    assert run("probe") == (code, "", "")


def test_an_error_of_ours_is_a_line_for_each_problem(run: Run, command_that: Callable[..., None]) -> None:
    command_that(raising(RecipeError(["one", "two"])))
    assert run("probe") == (2, "", "error: one\nerror: two\n")


def test_an_error_of_ours_shows_its_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch, command_that: Callable[..., None]
) -> None:
    monkeypatch.setenv("DSTK_TRACEBACK", "1")
    command_that(raising(DataError("no text")))
    with pytest.raises(DataError):
        main(["probe"])


@pytest.mark.parametrize(
    ("error", "printed"), [(RecipeError("the same"), ""), (DataError("only here"), "error: only here\n")]
)
def test_an_error_that_all_ranks_share_is_printed_by_rank_0_alone(
    run: Run,
    command_that: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    printed: str,
) -> None:
    monkeypatch.setenv("RANK", "3")
    command_that(raising(error))
    assert run("probe") == (2, "", printed)


def test_ctrl_c_exits_with_130_and_says_nothing(run: Run, command_that: Callable[..., None]) -> None:
    command_that(lambda: os.kill(os.getpid(), signal.SIGINT))
    # A test run in the background inherits that Ctrl-C is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, out, err = run("probe")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out, err.strip()) == (130, "", "")


def test_a_bug_keeps_its_traceback(command_that: Callable[..., None]) -> None:
    command_that(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["probe"])


PRINTS = """
import sys, types, click
from toolkit.cli.main import COMMANDS, main
module = sys.modules["probe_command"] = types.ModuleType("probe_command")
module.command = click.Command("probe", callback=lambda: print("waits for a flush"))
COMMANDS["probe"] = ("probe_command:command", "A test.")
main(["probe"])
"""


@pytest.mark.parametrize("arguments", [["-m", "toolkit", "schema"], ["-m", "toolkit", "--version"], ["-c", PRINTS]])
def test_a_reader_that_has_gone_leaves_no_traceback(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=buffered, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0", "0 is not in the range 1 to 2147483647"),
        ("2147483648", "2147483648 is not in the range 1 to 2147483647"),
        ("9" * 5000, "9999999999…9999999999 (5000 characters) is not in the range 1 to 2147483647"),
        ("-" + "9" * 5000, "-999999999…9999999999 (5001 characters) is not in the range 1 to 2147483647"),
        ("1e3", "'1e3' is not a whole number"),
    ],
)
def test_an_option_that_counts_has_bounds(text: str, shown: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        Count().convert(text, None, None)
    assert refused.value.message == f"{shown}."


def test_the_largest_count_is_taken() -> None:
    assert Count(min=0).convert("0", None, None) == 0
    assert Count().convert(" 2_147_483_647", None, None) == LARGEST_COUNT
