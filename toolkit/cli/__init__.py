"""The command line: one module per command, heavy imports inside the command. Here: what commands share."""

import math
import re
from typing import Any

import click

from toolkit.errors import nearest
from toolkit.units import plural

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


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
        nbytes = round(float(match[1]) * _UNITS[match[2].upper()]) if match and match[2].upper() in _UNITS else 0
        if nbytes < 1:
            self.fail(f"{value!r} is not a size. Give one such as 5GB, 500MB or 2GiB.", param, ctx)
        return nbytes
