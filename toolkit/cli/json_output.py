"""The standard output of commands that print JSON: the answer and nothing else, whatever a library prints there.

While such a command runs, file descriptor 1 is standard error: for `print`, for C++ code, and for processes that are
started or forked meanwhile. The answer goes to a copy of the real one.
"""

import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

import click

_STDOUT = 1
_STDERR = 2
_answers: list[TextIO] = []
"""The real stdout while a command runs whose answer is JSON; empty otherwise."""


def json_option(help_line: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds `--json` to a command, as its argument `as_json`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        option = click.option("--json", "as_json", is_flag=True, help=help_line)
        return option(stdout_is_json(lambda options: bool(options["as_json"]))(function))

    return decorate


def stdout_is_json(
    when: Callable[[Mapping[str, Any]], bool],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a command that prints nothing but JSON `when` its options say so."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            if not when(options):
                return function(*arguments, **options)
            with _reserved_stdout():
                return function(*arguments, **options)

        return run

    return decorate


def print_json(value: Any) -> None:
    """Print the answer of a command."""
    print_json_text(json.dumps(value, indent=2))


def print_json_text(text: str) -> None:
    """Print an answer that is JSON already."""
    answers = _answers[-1]
    answers.write(f"{text}\n")
    answers.flush()


@contextmanager
def _reserved_stdout() -> Iterator[None]:
    shown = sys.stdout
    if shown is None:  # closed, so that nobody reads the answer
        with open(os.devnull, "w", encoding="utf-8") as nowhere, _answering(nowhere):
            yield
        return
    shown.flush()
    real = os.dup(_STDOUT)
    try:
        _point_to_stderr()
        with redirect_stdout(sys.stderr):
            # A stream that is not file descriptor 1 is what a test captures.
            answers = os.fdopen(os.dup(real), "w", encoding="utf-8") if _is_real(shown) else shown
            try:
                with _answering(answers):
                    yield
            finally:
                if answers is not shown:
                    with suppress(BrokenPipeError):  # which `print_json` has raised
                        answers.close()
    finally:
        with suppress(OSError):
            shown.flush()
        _flush_c_streams()
        os.dup2(real, _STDOUT)
        os.close(real)


@contextmanager
def _answering(stream: TextIO) -> Iterator[None]:
    _answers.append(stream)
    try:
        yield
    finally:
        _answers.pop()


def _point_to_stderr() -> None:
    try:
        os.dup2(_STDERR, _STDOUT)
    except OSError:  # closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDOUT)
        os.close(nowhere)


def _flush_c_streams() -> None:
    """Write what C code has printed and not written yet."""
    import ctypes

    ctypes.CDLL(None).fflush(None)


def _is_real(stream: TextIO) -> bool:
    try:
        return stream.fileno() == _STDOUT
    except (io.UnsupportedOperation, AttributeError):
        return False
