"""metrics.jsonl as a run left it, or as it stands while the run still writes."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ReportError

_LOST_AS_NULL = ("loss", "grad_norm", "eval_loss")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line. None is what the line lacks, or what was not finite."""

    step: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    tokens: int
    seconds: float | None
    memory_bytes: int | None
    eval_loss: float | None
    skipped: bool
    not_finite: tuple[str, ...]
    """Fields that the line has, as null."""

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Where step numbers go back: a run that went on from an earlier step."""

    after: int
    at: int


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """The steps that count: of a step that was trained twice, the later one."""

    steps: tuple[Step, ...]
    restarts: tuple[Restart, ...]
    torn: bool
    """The last line is not whole: it is being written, or the run ended in the middle of it."""

    @property
    def last(self) -> Step:
        """The last step that was reported."""
        return self.steps[-1]


def read_log(path: Path) -> TrainingLog:
    """Read a metrics.jsonl. Raises ReportError with the number of a line that is not a step."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise ReportError(
            f"{path}: cannot be read ({error.strerror or error}). Give a run directory or a metrics.jsonl."
        ) from error
    lines = text.split("\n")
    unfinished = lines.pop()  # '' where the last line ends as it should
    steps = [_step(path, number, line) for number, line in enumerate(lines, start=1)]
    torn = False
    if unfinished.strip():
        try:
            steps.append(_step(path, len(lines) + 1, unfinished))
        except ReportError:
            torn = True
    if not steps:
        what = "its only line is not whole yet" if torn else "it has no line yet"
        raise ReportError(f"{path}: no finished step, {what}. Wait for the first step, or give another run.")
    kept: dict[int, Step] = {}
    restarts = []
    previous = None
    for step in steps:
        if previous is not None and step.step <= previous:
            restarts.append(Restart(after=previous, at=step.step))
            kept = {number: old for number, old in kept.items() if number < step.step}
        kept[step.step] = step
        previous = step.step
    return TrainingLog(steps=tuple(kept.values()), restarts=tuple(restarts), torn=torn)


def _step(path: Path, number: int, line: str) -> Step:
    try:
        record = json.loads(line)
        return _decode(record)
    except (ValueError, KeyError, TypeError) as error:
        reason = "not JSON" if isinstance(error, json.JSONDecodeError) else error.args[0]
        raise ReportError(
            f"{path}:{number}: not a step ({reason}). A line of metrics.jsonl is an object with step and loss; "
            "remove or repair the line."
        ) from None


def _decode(record: Any) -> Step:
    if not isinstance(record, dict):
        raise TypeError("not an object")
    for name in ("step", "loss"):
        if name not in record:
            raise KeyError(f"no {name}")
    numbers = {name: _number(record, name) for name in ("loss", "lr", "grad_norm", "seconds", "eval_loss")}
    step, tokens, memory = (_number(record, name) for name in ("step", "tokens", "memory_bytes"))
    if step is None or step < 0 or step != int(step):
        raise ValueError(f"step is {record['step']!r}")
    return Step(
        step=int(step),
        loss=numbers["loss"],
        lr=numbers["lr"],
        grad_norm=numbers["grad_norm"],
        tokens=int(tokens or 0),
        seconds=numbers["seconds"],
        memory_bytes=None if memory is None else int(memory),
        eval_loss=numbers["eval_loss"],
        skipped=record.get("skipped") is True,
        not_finite=tuple(name for name in _LOST_AS_NULL if name in record and numbers[name] is None),
    )


def _number(record: dict[str, Any], name: str) -> float | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}")
    return float(value) if math.isfinite(value) else None
