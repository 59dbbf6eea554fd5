"""The end of a process from a thread that watches: what it still says, and why it failed."""

import contextlib
import os
import re
import sys
import threading
from typing import NoReturn

import torch.distributed as dist

from toolkit.checkpoint.names import shown
from toolkit.errors import ToolkitError

_FLUSH_SECONDS = 0.25
_LOST_CONNECTION = re.compile(r"\bgloo/|\bNCCL\b|[Cc]onnection (closed|reset|refused)|Broken pipe")


def end_process(code: int) -> NoReturn:
    """As a kill would, but for what is still to be printed."""
    flush = threading.Thread(target=_flush, daemon=True)  # the main thread may hold the lock of a stream
    flush.start()
    flush.join(timeout=_FLUSH_SECONDS)
    os._exit(code)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective call failed because another rank is not there any more."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None
    )


def one_line(error: BaseException) -> str:
    """What went wrong, for other ranks."""
    first = shown(str(error).strip().partition("\n")[0][:500])
    return first if isinstance(error, ToolkitError) else f"{type(error).__name__}: {first}"


def say(text: str) -> None:
    """Print lines on stderr, whatever the main thread is doing."""
    # Past sys.stderr: the main thread may hold its lock.
    with contextlib.suppress(OSError):
        os.write(2, f"{text.rstrip()}\n".encode(errors="replace"))


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
