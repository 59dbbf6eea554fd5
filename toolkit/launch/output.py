"""Output of a rank: each error once in one line, and no start-up noise of libraries. Imports no torch."""

import errno
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toolkit.errors import FinishedError, PreemptedError, SpareError, ToolkitError, printed_lines, unusable
from toolkit.files import remove_temporary
from toolkit.launch.stop_requests import end_if_waiting, listen

_REPORTER_SECONDS = 5
_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""The environment variable that torch reads when it is imported."""
_NOISY_IMPORTS = ("torchao", "torch.utils._pytree", "bitsandbytes")
"""Loggers that warn when transformers imports torchao and bitsandbytes, which it does wherever they are installed.

bitsandbytes does on CPUs with bf16 instructions alone, where it looks for a package of kernels.
"""
_NOISY = (
    *_NOISY_IMPORTS,
    "DeepSpeed",
    "deepspeed",
    "torch.distributed",
    "transformers",
    "accelerate",
    "datasets",
    "huggingface_hub",
)
exit_hooks: list[Callable[[], None]] = []
"""Called after an error was printed, before the process exits."""


def quiet(*, debug: bool) -> None:
    """Silence the start-up messages of DeepSpeed and other libraries; with `debug`, show all."""
    level = logging.INFO if debug else logging.ERROR
    for name in _NOISY:
        logging.getLogger(name).setLevel(level)
    if debug:
        return
    warnings.filterwarnings("ignore")
    os.environ.setdefault(_CPP_LOG_LEVEL, "ERROR")


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn an error, or a request to stop, into one line on stderr (by one of the ranks) and an exit code.

    A failing rank exits at once: destroying a process group while others use it aborts or hangs. Enter this before
    torch is imported, which then prints no C++ stack for a connection that the end of a launcher or rank breaks,
    and before transformers is, whose import of other packages then prints no warnings.
    """
    os.environ.setdefault(_CPP_LOG_LEVEL, "ERROR")
    for name in _NOISY_IMPORTS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        listen()
        yield
        return
    except ToolkitError as error:
        if os.environ.get("DSTK_TRACEBACK") == "1":
            raise
        end_if_waiting()
        code = error.exit_code
        if not (is_reporter := error.is_reported_by(os.environ)) and code:
            # The rank that reports it exits first, and the launcher then ends this one. If not, none has reported it.
            time.sleep(_REPORTER_SECONDS)
        # Rank 0 is sure to report the end of a run, and has named the spares at its start.
        is_reported_elsewhere = isinstance(error, PreemptedError | FinishedError) and not is_reporter
        if not is_reported_elsewhere and not isinstance(error, SpareError):
            _print_error(str(error), code)
    except SystemExit:
        raise
    except BaseException as error:
        end_if_waiting()
        code = 1
        if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # nothing to retry
            _print_error(unusable(error), ToolkitError.exit_code)
            code = ToolkitError.exit_code
        else:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    for hook in exit_hooks:
        hook()
    remove_temporary()
    os._exit(code)


def _print_error(message: str, code: int) -> None:
    for line in printed_lines(message, sys.argv[1:]):
        print(f"error: {line}" if code else line, file=sys.stderr if code else sys.stdout)
