"""`dstk report --watch`: the state of many runs, refreshed until it is interrupted."""

import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from toolkit.report.fleet import RunStatus, find_runs, fleet_table, read_status, write_fleet
from toolkit.report.terminal import table_console
from toolkit.training.run_lock import look


def watch(names: Sequence[str], output: Path | None, *, every_seconds: int) -> None:
    """Show the runs in a terminal, or write their page to `output`, until Ctrl-C.

    Without a terminal and without `output` the table is printed once. Raises ReportError for a folder that is missing.
    """
    if output is not None:
        print(write_fleet(output, read_fleet(names), datetime.now(), every_seconds=every_seconds), flush=True)
    elif not sys.stdout.isatty():
        table_console().print(fleet_table(read_fleet(names), datetime.now()))
        return
    try:
        if output is not None:
            _keep_writing(names, output, every_seconds)
        else:
            _keep_drawing(names, every_seconds)
    except KeyboardInterrupt:
        return


def read_fleet(names: Sequence[str]) -> list[RunStatus]:
    """Read the state of all runs in these folders, as they are now. Raises ReportError for a folder that is missing."""
    statuses = []
    for folder, name in find_runs(names).items():
        lock = look(folder)
        status = read_status(
            folder,
            name,
            is_held=lock is not None and lock.is_held,
            is_abandoned=lock is not None and not lock.is_held and not lock.is_released,
            host="" if lock is None else lock.holder.host,
        )
        statuses.append(status)
    return statuses


def _keep_writing(names: Sequence[str], output: Path, every_seconds: int) -> None:
    while True:
        time.sleep(every_seconds)
        write_fleet(output, read_fleet(names), datetime.now(), every_seconds=every_seconds)


def _keep_drawing(names: Sequence[str], every_seconds: int) -> None:
    from rich.live import Live

    with Live(console=table_console(), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(fleet_table(read_fleet(names), datetime.now()), refresh=True)
            time.sleep(every_seconds)
