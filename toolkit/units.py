"""Counts, bytes and durations as people read them. Formatting happens here and nowhere else. And the largest count."""

import math
from collections.abc import Sequence

LARGEST_COUNT = 2**31 - 1
"""Limit of whatever is counted: layers, tokens of a sample, samples of a step, steps, ranks. It is far above any real
count, and small enough that what is computed from several of them can be stored and printed."""
LARGEST_SEED = 2**63 - 1
"""PyTorch's generators take no larger one."""


def divisors(number: int, most: int | None = None) -> list[int]:
    """Every divisor up to `most`, the smallest first; in the time of a square root."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    high = [number // size for size in reversed(low)]
    return [size for size in dict.fromkeys([*low, *high]) if most is None or size <= most]


def format_count(n: float) -> str:
    """1_234 -> '1.23k', 124_439_808 -> '124M': three significant digits, powers of 1000."""
    value = float(n)
    suffixes = ["", "k", "M", "B", "T", "P"]
    while abs(value) >= 999.5 and len(suffixes) > 1:
        value /= 1000
        suffixes = suffixes[1:]
    return f"{value:.3g}{suffixes[0]}" if suffixes[0] or value != int(value) else str(int(value))


def three_digits(value: float) -> str:
    """0.0123 -> '0.0123', 21.66 -> '21.7', 2_684.2 -> '2,684': three significant digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def format_bytes(n: float) -> str:
    """1536 -> '1.50 KiB': powers of 1024."""
    value = float(n)
    suffixes = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(value) >= 1024 and len(suffixes) > 1:
        value /= 1024
        suffixes = suffixes[1:]
    return f"{int(value)} B" if suffixes[0] == "B" else f"{value:.2f} {suffixes[0]}"


def format_duration(seconds: float) -> str:
    """75 -> '1m15s', 3_720 -> '1h02m': two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{s:02d}s"
    hours, m = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{m:02d}m"
    days, h = divmod(hours, 24)
    return f"{days}d{h:02d}h"


def some(names: Sequence[object], limit: int = 3) -> str:
    """Format names as 'a, b, c and 7 more'."""
    shown = ", ".join(map(str, names[:limit]))
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


UNKNOWN = "–"
NOT_FINITE = "not finite"


def scientific(value: float, digits: int = 1) -> str:
    """1.23e-07 -> '1.2e-7', 1e-3 -> '1e-3', 0 -> '0': no padding in the exponent, no trailing zeros before it."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def format_loss(value: float) -> str:
    """2.34567 -> '2.3457', 1e308 -> '1e+308': a loss that explodes has hundreds of digits without an exponent."""
    if not math.isfinite(value):
        return NOT_FINITE
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def difference(value: float | None) -> str:
    """Format a relative difference with two digits, both of them printed so that columns line up: '1.0e-7'."""
    if value is None:
        return NOT_FINITE
    text = scientific(value)
    return text if value == 0 or "." in text else text.replace("e", ".0e")


def fixed(value: float | None, digits: int) -> str:
    """Format a number with that many digits after the point, '0.500000'; one of 1e6 or more in scientific form."""
    if value is None:
        return NOT_FINITE
    return f"{value:.{digits}f}" if abs(value) < 1e6 else scientific(value, 2)


def seconds(value: float | None) -> str:
    """12.34 -> '12 s', 0.42 -> '0.4 s', 75 -> '1m15s'."""
    if value is None:
        return UNKNOWN
    if value >= 60:
        return format_duration(value)
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """'1 strategy', '2 strategies'."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def with_article(noun: str) -> str:
    """'a list', 'an int'."""
    return f"{'an' if noun[:1].lower() in tuple('aeio') else 'a'} {noun}"


def english_list(items: list[str], last: str = "and") -> str:
    """Join words as 'a', 'a and b', 'a, b and c'; empty for none."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> '1 to 3, 7'; the numbers are ascending."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    shown = []
    for first, last in runs:
        if first == last:
            shown.append(f"{first}")
        elif last == first + 1:
            shown.append(f"{first}, {last}")
        else:
            shown.append(f"{first} to {last}")
    if len(shown) > 12:
        shown = [*shown[:8], "…", *shown[-3:]]
    return ", ".join(shown)
