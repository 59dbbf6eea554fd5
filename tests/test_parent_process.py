"""A process that is tied to its parent ends with it, whatever state it is in."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import os, subprocess, sys, time
from functools import partial
from toolkit.parent_process import end_with

child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], preexec_fn=partial(end_with, os.getpid()))
print(child.pid, flush=True)
time.sleep(600)
"""
IN_NATIVE_CODE = "import ctypes; ctypes.PyDLL(None).sleep(600)"  # which keeps the interpreter's lock


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.parametrize("state", ["waiting", "stopped", "in native code"])
def test_a_child_ends_with_its_parent(state: str) -> None:
    code = IN_NATIVE_CODE if state == "in native code" else "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        if state == "stopped":
            os.kill(child, signal.SIGSTOP)
        parent.kill()
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


def test_a_child_whose_parent_ended_before_it_was_tied_ends_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from toolkit.parent_process import end_with; end_with(1 << 30); print('alive')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
