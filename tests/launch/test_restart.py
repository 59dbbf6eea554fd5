"""`dstk train --restarts`: what is restarted after a crash, with which arguments, and what is not."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_checkpoint import save_tiny

from toolkit.cli.main import main
from toolkit.launch.spawn import Restart, run_with_restarts
from toolkit.launch.stop_requests import STOP_SIGNALS

Script = Callable[[str], Path]


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The handlers that a launcher sets for the rest of its process end with the test."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """A script in which `rank` and `attempt` (from 0) are defined, and which records them."""

    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(
            textwrap.dedent(
                """
                import os, signal, sys, time
                rank, attempt = int(os.environ["RANK"]), int(sys.argv[1])
                signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
                print(f"{rank} {attempt}", file=open(os.environ["TRAIL"], "a"), flush=True)
                """
            )
            + textwrap.dedent(body)
        )
        return path

    return write


@pytest.fixture
def trail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which scripts record rank and attempt."""
    path = tmp_path / "trail"
    path.touch()
    monkeypatch.setenv("TRAIL", str(path))
    return path


def start(path: Path, *, nproc: int = 2, restarts: int = 3) -> int:
    return run_with_restarts(path, lambda attempt: ([str(attempt)], "here"), nproc, restarts)


def attempts(trail: Path) -> list[str]:
    return sorted({line.split()[1] for line in trail.read_text().splitlines()})


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("if rank == 1 and attempt < 2: os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("if rank == 0 and attempt < 2: os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("if rank == 1 and attempt < 2: raise RuntimeError", ""),
    ],
)
def test_ranks_are_restarted_after_a_crash_and_a_line_reports_each_restart(
    script: Script, trail: Path, capfd: pytest.CaptureFixture[str], body: str, name: str
) -> None:
    assert start(script(body)) == 0
    assert attempts(trail) == ["0", "1", "2"]
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("restart")] == ["restart 1 of 3: here", "restart 2 of 3: here"]
    assert sum(f"was ended by {name}." in line for line in lines) == (2 if name else 0)


@pytest.mark.parametrize("code", [2, 75])
def test_bad_input_and_preemption_end_the_run(script: Script, trail: Path, code: int) -> None:
    # The other rank fails because of it, and may be seen first.
    body = f"""
        started = os.environ["TRAIL"] + ".started"
        if rank:
            open(started, "w").close()
            time.sleep(0.2)
            sys.exit({code})
        while not os.path.exists(started):
            time.sleep(0.01)
        sys.exit(1)
    """
    assert start(script(body)) == code
    assert attempts(trail) == ["0"]


def test_a_run_that_crashes_again_ends_with_its_exit_code(script: Script, trail: Path) -> None:
    assert start(script("os.kill(os.getpid(), signal.SIGKILL)"), nproc=1, restarts=1) == 137
    assert attempts(trail) == ["0", "1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_run_that_is_asked_to_stop_is_not_restarted(script: Script, trail: Path, number: signal.Signals) -> None:
    path = script("time.sleep(60)")
    code = (
        "import signal, sys; from pathlib import Path; from toolkit.launch.spawn import run_with_restarts\n"
        # Tests started in the background of a shell ignore Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.exit(run_with_restarts(Path({str(path)!r}), lambda n: ([str(n)], ''), 2, 3))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TRAIL": str(trail)})
    deadline = time.monotonic() + 60
    while len(trail.read_text().splitlines()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert attempts(trail) == ["0"]


def restart(run_dir: Path, *, resume: str | None = None, overwrite: bool = False) -> Restart:
    return Restart(run_dir=run_dir, arguments=["--config", "r.yaml"], resume=resume, overwrite=overwrite)


def tail(found: Restart, attempt: int) -> list[str]:
    arguments, _ = found.arguments(attempt)
    assert arguments[:2] == ["--config", "r.yaml"]
    assert arguments[2] == f'run_dir="{found.run_dir}"'
    return arguments[3:]


def test_a_restart_resumes_from_the_newest_checkpoint_of_the_run(tmp_path: Path) -> None:
    found = restart(tmp_path)
    assert tail(found, 0) == []
    save_tiny(tmp_path, 5)
    save_tiny(tmp_path, 10)
    assert tail(found, 1) == ["--resume", "auto"]
    assert found.arguments(1)[1] == f"resuming from step-00000010 in {tmp_path}"


def test_before_the_first_checkpoint_a_restart_overwrites_the_first_attempt(tmp_path: Path) -> None:
    found = restart(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    assert tail(found, 1) == ["--overwrite"]
    assert found.arguments(1)[1].startswith("from the beginning")


def test_an_earlier_run_in_the_directory_is_never_overwritten_by_a_restart(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    save_tiny(tmp_path, 5)
    assert tail(restart(tmp_path), 1) == []


def test_a_run_that_is_to_be_overwritten_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    save_tiny(tmp_path, 5)
    found = restart(tmp_path, overwrite=True)
    assert tail(found, 0) == tail(found, 1) == ["--overwrite"]
    save_tiny(tmp_path, 5)
    assert tail(found, 1) == ["--resume", "auto"]


def test_a_given_checkpoint_is_used_again_until_the_run_has_saved_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    save_tiny(tmp_path, 5)
    save_tiny(tmp_path, 10)
    named = str(tmp_path / "step-00000005")
    found = restart(tmp_path, resume=named)
    assert tail(found, 0) == tail(found, 1) == ["--resume", named]
    save_tiny(tmp_path, 6)
    assert tail(found, 1) == ["--resume", "auto"]
    assert "step-00000006" in found.arguments(1)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strict",), "--strict without --resume"),
        (("--resume", "auto"), "--resume auto without a run_dir"),
        (("--restarts", "-1"), "--restarts"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "gpt2" / "gpt2-pretrain.yaml"
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(recipe), "run_dir=null", "parallel.dp=1", *arguments])
    assert stopped.value.code == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
