"""Sizes on the command line: 5GB, 500MB, 2GiB."""

import re
from typing import Any

import click

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


class ByteSize(click.ParamType[int]):
    """A number of bytes, with the units that Hugging Face uses: GB is 10^9, GiB is 2^30."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See click."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        nbytes = round(float(match[1]) * _UNITS[match[2].upper()]) if match and match[2].upper() in _UNITS else 0
        if nbytes < 1:
            self.fail(f"{value!r} is not a size. Give one such as 5GB, 500MB or 2GiB.", param, ctx)
        return nbytes
