"""What a rank does when it is asked to stop, by signals or by the end of its launcher, on a run without a model."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from toolkit.launch.stop_requests import PASSED_ON, REPEAT_SECONDS

SCRIPT = """
import signal, sys, time
from toolkit.errors import PreemptedError
from toolkit.launch.output import reported_errors
from toolkit.launch.stop_requests import end_if_waiting, stoppable

class Run:
    cause, has_stepped = "", "stepped" in sys.argv
    def request_stop(self, cause):
        self.cause = cause
    def describe_saved(self):
        return "saved run/step-1. Resume with --resume run"

def train(run):
    print("training", flush=True)
    while not run.cause or "busy" in sys.argv:
        time.sleep(0.01)
        if "alone" in sys.argv:
            end_if_waiting()
    raise PreemptedError(f"stopped by {run.cause}; {run.describe_saved()}.")

with reported_errors():
    print("starting", flush=True)
    sys.stdin.readline()
    run = Run()
    with stoppable(run):
        train(run)
"""
RESUME = "saved run/step-1. Resume with --resume run."
LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]])
"""
DSTK = """
import sys
from pathlib import Path
from toolkit.launch.spawn import run_local_ranks
sys.exit(run_local_ranks(Path(sys.argv[1]), sys.argv[2:], 1))
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the script as a rank; with `launcher`, under a program of that name. It is `starting` when this returns."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    started: list[subprocess.Popen[str]] = []

    def begin(*flags: str, rank: int = 0, launcher: str = "", ignored: str = "") -> subprocess.Popen[str]:
        command = [str(tmp_path / "script.py"), *flags]
        if launcher:
            (tmp_path / launcher).write_text(DSTK if launcher == "dstk" else LAUNCHER)
            command = [str(tmp_path / launcher), *command]
        default = "--default-signal=INT,TERM,USR1"  # a shell ignores Ctrl-C in what it runs in the background
        process = subprocess.Popen(
            ["env", default, *([f"--ignore-signal={ignored}"] if ignored else []), sys.executable, *command],
            env=environment | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def train(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "training\n"
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.wait(timeout=60)  # with its standard input open: the script begins to train when that closes
    return process.returncode, process.communicate()[1]


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_training_stops_the_run(start: Start, number: signal.Signals) -> None:
    process = train(start())
    process.send_signal(number)
    assert ended(process) == (75, f"error: stopped by {number.name}; {RESUME}\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_dstk_is_the_one_that_the_rank_names(start: Start, number: signal.Signals) -> None:
    process = train(start(launcher="dstk"))
    process.send_signal(number)
    assert ended(process) == (75, f"error: stopped by {number.name}; {RESUME}\n")


def test_what_dstk_passes_on_never_ends_a_rank_that_saves(start: Start) -> None:
    process = train(start("busy"))
    process.send_signal(signal.SIGINT)  # Ctrl-C reaches the rank itself,
    time.sleep(1.5 * REPEAT_SECONDS)
    process.send_signal(PASSED_ON[signal.SIGINT])  # and a busy launcher passes it on late
    time.sleep(REPEAT_SECONDS / 2)
    assert process.poll() is None


STORE = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
print(store.port, flush=True)
sys.stdin.read()
"""
CLIENT = """
import sys
from toolkit.launch.output import reported_errors
with reported_errors():
    assert "torch" not in sys.modules
    from datetime import timedelta
    from torch.distributed import TCPStore
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=60))
    print("connected", flush=True)
    sys.stdin.readline()
    try:
        for _ in range(9):
            store.set("key", "value")
    except RuntimeError:
        print("the store is gone")
"""


def test_the_end_of_a_launcher_that_holds_the_store_prints_no_stack() -> None:
    """As torchrun does."""
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_CPP_LOG_LEVEL"}

    def begin(code: str, *arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    with begin(STORE) as launcher:
        assert launcher.stdout is not None
        with begin(CLIENT, launcher.stdout.readline().strip()) as rank:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "connected\n"
            launcher.kill()
            launcher.wait()
            assert rank.communicate("\n", timeout=60) == ("the store is gone\n", "")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_training_ends_the_rank_in_one_line(start: Start, number: signal.Signals) -> None:
    process = start()
    process.send_signal(number)
    line = f"error: stopped by {number.name} before training began; nothing was saved yet.\n"
    assert ended(process) == (128 + number, line)


def test_only_rank_0_prints_the_line(start: Start) -> None:
    waiting, training = start(rank=1), train(start(rank=1))
    for process, code in ((waiting, 143), (training, 75)):
        process.terminate()
        assert ended(process) == (code, "")


def test_the_same_request_may_come_several_times(start: Start) -> None:
    process = train(start("busy"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        process.send_signal(number)
    time.sleep(REPEAT_SECONDS / 2)
    assert process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_rank_at_once(start: Start, number: signal.Signals) -> None:
    process = train(start("busy"))
    process.send_signal(number)
    time.sleep(1.5 * REPEAT_SECONDS)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)  # which schedulers repeat
    process.send_signal(number)
    line = f"error: ended at once by a second signal, {number.name}; {RESUME}\n"
    assert ended(process) == (128 + number, line)


def test_a_signal_that_was_ignored_before_stays_ignored(start: Start) -> None:
    process = train(start(ignored="INT"))
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (75, f"error: stopped by SIGTERM; {RESUME}\n")


def test_a_rank_whose_peers_ended_before_the_first_step_says_what_is_saved(start: Start) -> None:
    process = train(start("busy", "alone"))
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, f"error: stopped by SIGINT before the first step was complete; {RESUME}\n")


def test_a_rank_that_has_stepped_waits_for_its_checkpoint(start: Start) -> None:
    process = train(start("busy", "alone", "stepped"))
    process.send_signal(signal.SIGINT)
    time.sleep(REPEAT_SECONDS / 2)
    assert process.poll() is None


@pytest.mark.parametrize("name", ["torchrun", "deepspeed", "accelerate"])
def test_the_end_of_a_launcher_stops_the_run(start: Start, name: str) -> None:
    launcher = train(start(launcher=name))
    launcher.kill()
    _, errors = launcher.communicate(timeout=60)  # the rank holds the pipe
    assert errors == f"error: stopped by the end of its launcher, {name} (process {launcher.pid}); {RESUME}\n"


def test_the_end_of_a_shell_stops_nothing(start: Start) -> None:
    shell = train(start(launcher="run_deepspeed_job"))
    (rank,) = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
    shell.kill()
    shell.wait()
    time.sleep(REPEAT_SECONDS / 2)
    os.kill(int(rank), signal.SIGTERM)
    assert shell.communicate(timeout=60)[1] == f"error: stopped by SIGTERM; {RESUME}\n"
