"""Counts, bytes and durations as people read them. Formatting happens here and nowhere else."""


def format_count(n: float) -> str:
    """1_234 -> '1.23k', 124_439_808 -> '124M': three significant digits, powers of 1000."""
    value = float(n)
    for suffix in ("", "k", "M", "B", "T", "P"):
        if abs(value) < 999.5 or suffix == "P":
            digits = f"{value:.3g}" if suffix or value != int(value) else str(int(value))
            return f"{digits}{suffix}"
        value /= 1000
    raise AssertionError("unreachable")


def format_bytes(n: float) -> str:
    """1536 -> '1.50 KiB': powers of 1024."""
    value = float(n)
    for suffix in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or suffix == "PiB":
            return f"{int(value)} B" if suffix == "B" else f"{value:.2f} {suffix}"
        value /= 1024
    raise AssertionError("unreachable")


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
