"""The process that records, for one that has no torch: started by the first question, it answers all others."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import IO, Any

from toolkit.errors import RunError
from toolkit.files import reason_of
from toolkit.parent_process import end_with

_PACKAGE = Path(__file__).parents[2]
PATIENCE = {True: 0.5, False: 10.0}
"""Seconds until a line says what takes so long, on a terminal and elsewhere."""


def answer(question: str, doing: str) -> dict[str, Any]:
    """Ask the recorder. `doing` goes to stderr where the answer takes long. Raises RunError where it fails."""
    notice = f"{doing}: some seconds for most models, minutes for thousands of layers; cached afterwards"
    slow = threading.Timer(PATIENCE[sys.stderr.isatty()], lambda: print(notice, file=sys.stderr, flush=True))
    slow.daemon = True
    slow.start()
    try:
        return _ask(os.getpid(), question)
    finally:
        slow.cancel()


_LOCK = threading.Lock()


@lru_cache(maxsize=1024)
def _ask(pid: int, question: str) -> dict[str, Any]:
    """Answers are remembered, refusals too. `pid`: a forked process must not share its parent's recorder.

    An answer that was not read would be taken for that of the next question: an interrupted recorder ends.
    """
    with _LOCK:
        process, errors = recorder(pid)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(question, file=process.stdin, flush=True)
            reply: dict[str, Any] = json.loads(process.stdout.readline())
        except BaseException as error:
            process.kill()
            recorder.cache_clear()
            if isinstance(error, OSError | ValueError):
                code = process.wait()
                errors.seek(0)
                last = next((line for line in reversed(errors.read().splitlines()) if line.strip()), "no message")
                reason = f"the process that records activations ended with code {code} ({reason_of(ValueError(last))})"
                raise RunError(f"{reason}. Try again, with more memory or another environment.") from None
            raise
        return reply


@cache
def recorder(pid: int) -> "tuple[subprocess.Popen[str], IO[str]]":
    """The process that has torch, and what it prints to stderr. It ends with this one."""
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    # -P: a transformers.py in the current directory is not the library. The toolkit comes last on the path: its folder
    # may have all that is installed.
    run = (
        "import runpy, sys; sys.path.append(sys.argv.pop()); runpy.run_module('toolkit.recorder', run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", run, str(_PACKAGE.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ
        | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        preexec_fn=partial(end_with, pid),
    )
    return process, errors
