"""The recorder: a process with torch that answers the questions of one without. The first question starts it."""

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


def ask(question: str, subject: str) -> dict[str, Any]:
    """Return the recorder's answer to a question in JSON. Where it takes long, a line on stderr names the `subject`.

    Raises RunError where the recorder fails.
    """
    notice = f"recording {subject}: some seconds for most models, minutes for thousands of layers; cached afterwards"
    slow = threading.Timer(PATIENCE[sys.stderr.isatty()], lambda: print(notice, file=sys.stderr, flush=True))
    slow.daemon = True
    slow.start()
    try:
        return _answer(os.getpid(), question)
    finally:
        slow.cancel()


_LOCK = threading.Lock()


@lru_cache(maxsize=1024)
def _answer(pid: int, question: str) -> dict[str, Any]:
    """Return the answer of the recorder of process `pid`: a forked process must not share its parent's.

    Answers are remembered, refusals too. A recorder whose answer was not read is killed: the answer would be taken for
    that of the next question.
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
    """Start the process that has torch, which ends with process `pid`; return it and the file of its stderr."""
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
