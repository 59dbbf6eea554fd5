"""Fork ranks from a process that has imported what they need: N ranks then import torch once instead of N times."""

import atexit
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from toolkit.launch.stop_requests import STOP_SIGNALS
from toolkit.parent_process import end_with


class ForkedScript:
    """`python script arguments…` in a fork of this process, with the interface of subprocess.Popen that ranks need.

    This process must have a single thread, and must not have initialized CUDA.
    """

    def __init__(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        self._code: int | None = None
        if self.pid == 0:
            _run(script, arguments, environment, parent)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        code = self._wait(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send the process SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _run(script: Path, arguments: Sequence[str], environment: Mapping[str, str], parent: int) -> NoReturn:
    """Be the process that `python script arguments…` would be; never return to the caller's frames."""
    code = 1
    try:
        end_with(parent)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(environment.get("OMP_NUM_THREADS") or 1))
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as request:
        code = _exit_code(request)
    except BaseException:
        traceback.print_exc()
    finally:
        # As when Python exits: other threads end, then what is registered runs.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(request: SystemExit) -> int:
    if request.code is None or isinstance(request.code, int):
        return request.code or 0
    print(request.code, file=sys.stderr)
    return 1


def can_fork() -> bool:
    """Whether forks of this process can use the GPUs that there are, and no other thread of it holds a lock."""
    return threading.active_count() == 1 and forks_have_gpus()


def forks_have_gpus() -> bool:
    """Whether forks of this process can use the GPUs that there are: a library may have initialized CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or (torch.version.cuda is None and torch.version.hip is None):
        return True
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return True  # they will not use them
    return not torch.cuda.is_initialized() and _fork_has_gpus()


def _fork_has_gpus() -> bool:
    """Try it, every time: nothing else tells what a library has asked of the driver in this process by now."""
    torch = sys.modules["torch"]
    pid = os.fork()
    if pid == 0:
        try:
            if torch.cuda.is_available():
                torch.cuda.init()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
