"""The fleet: the state of many runs at a glance, as a table for a terminal and as a page that refreshes itself.

Of each run only the end of metrics.jsonl and of events.jsonl is read, so that a look costs the same at any step.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from toolkit.config import load_recipe
from toolkit.errors import ReportError, ToolkitError
from toolkit.files import expanded, open_regular, read_json_object
from toolkit.report.page import check_replaceable, render
from toolkit.report.recorded_run import incident_of
from toolkit.step_metrics import StepMetrics
from toolkit.units import UNKNOWN, format_count, format_duration, format_loss, plural

if TYPE_CHECKING:  # rich is imported by the commands that print a table
    from rich.console import Group

_PAGE = "index.html"
_UNFINISHED_PAGE = ".index.html.tmp"
FILES = (_PAGE, _UNFINISHED_PAGE)
_DEPTH = 3
"""Levels of folders below one that is given: runs/PROJECT/NAME."""
_TAIL_BYTES = 1 << 17
_RECENT_STEPS = 50
"""Steps whose mean is the speed."""

RunState = Literal["starting", "training", "finished", "stopped", "lost"]
STATE_MEANINGS: dict[RunState, str] = {
    "training": "a job trains there now",
    "starting": "a job holds the directory, and has not finished a step yet",
    "finished": "all steps are done",
    "stopped": "it ended before its last step, by an error or a request to stop",
    "lost": "its process has died without releasing the directory, or its heartbeat has stopped",
}


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run at one moment. None means unknown."""

    name: str
    state: RunState
    step: int
    """The last finished step; 0 where there is none."""
    steps: int | None
    """Steps of the whole run."""
    loss: float | None
    tokens_per_second: float | None
    """Mean of the last steps, over all ranks."""
    seconds_left: float | None
    """Predicted time to the last step, at the speed of the last steps; of runs that train."""
    incident: str
    """The last skipped step, rollback or restart; empty where there was none."""
    hosts: str

    @property
    def loss_text(self) -> str:
        if self.loss is None:
            return UNKNOWN
        return format_loss(self.loss)

    @property
    def speed_text(self) -> str:
        return UNKNOWN if self.tokens_per_second is None else format_count(self.tokens_per_second)

    def end(self, now: datetime) -> str:
        """Return when it will end: `17:05 (in 2h10m)`; with the day where that is not today."""
        if self.seconds_left is None:
            return UNKNOWN
        end = now + timedelta(seconds=self.seconds_left)
        day = "" if end.date() == now.date() else f"{end:%a %d %b} "
        return f"{day}{end:%H:%M} (in {format_duration(self.seconds_left)})"

    def cells(self, now: datetime) -> tuple[str, ...]:
        """The cells of its row, in the order of COLUMNS."""
        done = "" if not self.steps else f" of {self.steps} ({self.step / self.steps:.0%})"
        return (
            self.name,
            self.state,
            f"{self.step}{done}",
            self.loss_text,
            self.speed_text,
            self.end(now),
            self.incident or UNKNOWN,
            self.hosts or UNKNOWN,
        )


COLUMNS = ("run", "state", "step", "loss", "tokens/s", "ends", "last incident", "hosts")


def find_runs(names: Sequence[str]) -> dict[Path, str]:
    """Find the runs in run directories and in folders of them; return path -> name, in order of names.

    Raises ReportError for a name that is no folder.
    """
    runs: dict[Path, str] = {}
    for name in names:
        folder = expanded(name)
        if not folder.is_dir():
            raise ReportError(f"{name}: no such folder. Give run directories, or a folder of them such as runs.")
        for path in _runs_below(folder, _DEPTH):
            relative = path.relative_to(folder).as_posix()
            label = relative if relative != "." else path.resolve().name
            runs.setdefault(path, label if len(names) == 1 or relative == "." else f"{folder.name}/{label}")
    return runs


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    if "metrics.jsonl" in names or any(name.startswith(".lock-") for name in names):
        yield folder
        return
    for name in names:
        path = folder / name
        if depth and not name.startswith(".") and path.is_dir():
            yield from _runs_below(path, depth - 1)


def read_status(folder: Path, name: str, *, is_held: bool, is_abandoned: bool, host: str = "") -> RunStatus:
    """Read the state of a run from its directory.

    `is_held`: whether a job trains there now; `is_abandoned`: whether one held the directory and has not released it.
    `host`: of the job's first rank. Malformed lines are skipped: this only looks.
    """
    recent, restart = _recent_steps(folder / "metrics.jsonl")
    last = recent[-1] if recent else None
    step = 0 if last is None else last.step
    seconds = [entry.seconds for entry in recent if math.isfinite(entry.seconds) and entry.seconds > 0]
    tokens = sum(entry.tokens for entry in recent if math.isfinite(entry.seconds) and entry.seconds > 0)
    steps = _planned_steps(folder)
    state: RunState = "stopped"
    if (folder / "loss.png").exists():
        state = "finished"
    elif is_held:
        state = "training" if recent else "starting"
    elif is_abandoned:
        state = "lost"
    elif steps is not None and step >= steps:
        state = "finished"
    seconds_left = None
    if state == "training" and steps is not None and seconds:
        seconds_left = max(0, steps - step) * sum(seconds) / len(seconds)
    return RunStatus(
        name=name,
        state=state,
        step=step,
        steps=steps,
        loss=None if last is None else last.loss,
        tokens_per_second=tokens / sum(seconds) if tokens else None,
        seconds_left=seconds_left,
        incident=_last_event(folder / "events.jsonl") or restart,
        hosts=_hosts(folder) or host,
    )


def _tail(path: Path) -> list[str]:
    """Return the last complete lines of a file; none where it cannot be read."""
    try:
        with open_regular(path, follow=True) as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = text.split("\n")[:-1]
    return lines[1:] if start else lines


def _recent_steps(path: Path) -> tuple[list[StepMetrics], str]:
    """Return the last steps, and a restart among them in words."""
    steps: list[StepMetrics] = []
    restart = ""
    for line in _tail(path):
        try:
            step = StepMetrics.from_json(line)
        except ReportError:
            continue
        if steps and step.step <= steps[-1].step:
            restart = f"resumed at step {step.step}, after step {steps[-1].step}"
            steps = [earlier for earlier in steps if earlier.step < step.step]
        steps.append(step)
    return steps[-_RECENT_STEPS:], restart


def _last_event(path: Path) -> str:
    incidents = (incident_of(line) for line in reversed(_tail(path)))
    last = next((incident for incident in incidents if incident is not None), None)
    if last is None:
        return ""
    outcomes = {"rollback": f" rolled back to {last.to}", "slow": ""}
    return f"step {last.step}{outcomes.get(last.kind, ' skipped')}: {last.reason}"


def _planned_steps(folder: Path) -> int | None:
    try:
        return load_recipe(folder / "recipe.yaml", stored=True).train.steps
    except (ToolkitError, OSError):
        return None


def _hosts(folder: Path) -> str:
    try:
        return str(read_json_object(folder / "environment.json", follow=True).get("hosts", ""))
    except (OSError, ValueError):
        return ""


def summary(statuses: Sequence[RunStatus]) -> str:
    """Count the runs by state: `7 runs: 4 training, 2 finished, 1 lost`."""
    counts = {state: sum(status.state == state for status in statuses) for state in STATE_MEANINGS}
    parts = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{plural(len(statuses), 'run')}: {parts}" if parts else "no runs yet"


_STYLES: dict[RunState, str] = {
    "starting": "cyan",
    "training": "green",
    "finished": "bold green",
    "stopped": "yellow",
    "lost": "bold red",
}


def fleet_table(statuses: Sequence[RunStatus], now: datetime) -> "Group":
    """Make the table of a terminal, and below it a line for the last incident of each run that had one.

    It fits into 80 columns: the time that is left instead of the end, and the first host of several.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "step"):
        table.add_column(column, overflow="fold")
    for column in ("loss", "tokens/s", "left"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("hosts", overflow="fold")
    lines = []
    for status in statuses:
        state = Text(status.state, style=_STYLES[status.state])
        step = f"{status.step}/{status.steps}" if status.steps else str(status.step)
        left = UNKNOWN if status.seconds_left is None else format_duration(status.seconds_left)
        first_host, *other_hosts = status.hosts.split(", ")
        hosts = f"{first_host}, …" if other_hosts else first_host or UNKNOWN
        table.add_row(status.name, state, step, status.loss_text, status.speed_text, left, hosts)
        if status.incident:
            lines.append(Text.assemble((status.name, "bold"), f": {status.incident}"))
    heading = Text(f"{summary(statuses)} ({now:%H:%M:%S})", style="bold")
    return Group(heading, table, *lines)


def write_fleet(folder: Path, statuses: Sequence[RunStatus], now: datetime, *, every_seconds: int) -> Path:
    """Write the page, which loads itself again every `every_seconds`, and return its path.

    The file is replaced at once: a browser that loads it meanwhile gets the former or the new page. Raises ReportError
    where the folder has anything but a report, or cannot be written.
    """
    check_replaceable(folder, FILES)
    page = fleet_page(statuses, now, every_seconds=every_seconds)
    path = folder / _PAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _UNFINISHED_PAGE).write_text(page, encoding="utf-8")
        (folder / _UNFINISHED_PAGE).replace(path)
    except OSError as error:
        reason = error.strerror or error
        raise ReportError(f"{folder}: the page cannot be written ({reason}). Choose another folder.") from error
    return path


def fleet_page(statuses: Sequence[RunStatus], now: datetime, *, every_seconds: int) -> str:
    """Render the page as HTML."""
    return render(
        "fleet.html",
        summary=summary(statuses),
        when=f"{now:%Y-%m-%d %H:%M:%S}",
        every=every_seconds,
        columns=COLUMNS,
        rows=[
            {
                "state": status.state,
                "cells": status.cells(now),
                "share": min(1.0, status.step / status.steps) if status.steps else None,
            }
            for status in statuses
        ],
        meanings={state: STATE_MEANINGS[state] for state in dict.fromkeys(status.state for status in statuses)},
        readouts={"charts": {}},
    )
