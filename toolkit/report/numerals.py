"""Numbers as a page prints them. What is not known, or was not finite, has its own words and is never a zero."""

from toolkit.units import format_duration

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


def difference(value: float | None) -> str:
    """A relative difference with two digits, all of them printed so that columns line up: '1.0e-7'."""
    if value is None:
        return NOT_FINITE
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def fixed(value: float | None, digits: int) -> str:
    """'0.500000'; numbers too large for that in scientific form."""
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


def english_list(items: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> '1 to 3, 7'; the numbers are ascending."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    shown = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    if len(shown) > 12:
        shown = [*shown[:8], "…", *shown[-3:]]
    return ", ".join(shown)
