"""The command line: one module per command, heavy imports inside the command. Here: what commands share."""

import math
import re
from pathlib import Path
from typing import Any

import click

from toolkit.errors import nearest
from toolkit.files import place
from toolkit.remote_files import is_url, without_query
from toolkit.units import LARGEST_COUNT, plural

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_INTEGER = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*")
_LONGEST_INTEGER = 40
"""Characters of an option that is read as a number; longer ones are out of any range."""
_LARGEST_SIZE = 2**60
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


def option_of(parameter: str) -> str:
    """Return the option of a parameter of a command: `--pure-bf16` of `pure_bf16`."""
    return f"--{parameter.replace('_', '-')}"


def guess_note(ranks: int) -> str:
    """Say for how many ranks an answer is, where nothing gave their number."""
    return f"for {plural(ranks, 'rank')}, as neither --world-size nor parallel.dp says how many."


class CommandGroup(click.Group):
    """A group that refuses an unknown command with the nearest name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            advice = nearest(args[0], known) or f" Commands: {', '.join(known)}."
            raise click.UsageError(f"{args[0]} is not a command.{advice}", ctx)
        return super().resolve_command(ctx, args)


class Count(click.ParamType[int]):
    """A whole number of things, from `min` to at most `LARGEST_COUNT`."""

    name = "count"

    def __init__(self, *, min: int = 1, max: int = LARGEST_COUNT) -> None:
        self.min = min
        self.max = max

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the text of an option."""
        text = str(value).strip()
        if not _INTEGER.fullmatch(text):
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        is_long = len(text) > _LONGEST_INTEGER  # Python's int() refuses thousands of digits
        if is_long or not self.min <= int(text) <= self.max:
            shown = f"{text[:10]}…{text[-10:]} ({len(text)} characters)" if is_long else text
            self.fail(f"{shown} is not in the range {self.min} to {self.max}.", param, ctx)
        return int(text)


class Place(click.ParamType[Path]):
    """A directory, here or behind a URL."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Parse the text of an argument."""
        return place(value)


def directories_only(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Refuse a URL where an argument names directories; a callback of click."""
    for name in map(str, value if isinstance(value, tuple) else (value,)):
        if is_url(name):
            advice = "Copy what is there to a directory, a model with dstk export URL -o DIR, and name that."
            raise click.UsageError(f"{without_query(name)}: this command reads directories, not URLs. {advice}", ctx)
    return value


LOCAL_RANKS = Count(max=4096)
"""Ranks on one machine: more than any has GPUs or cores."""


class FiniteRange(click.FloatRange):
    """A range of numbers without `nan`, which compares as within every range, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text of an option."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class ByteSize(click.ParamType[int]):
    """A number of bytes, with the units that Hugging Face uses: GB is 10^9, GiB is 2^30."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the text of an option."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        size = float(match[1]) * _UNITS[match[2].upper()] if match and match[2].upper() in _UNITS else 0.0
        if not 1 <= size <= _LARGEST_SIZE:
            self.fail(f"{value!r} is not a size. Give one such as 5GB, 500MB or 2GiB.", param, ctx)
        return round(size)
