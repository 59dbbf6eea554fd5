"""ProgressLine: one line a step while training, redrawn in a terminal and printed line by line elsewhere."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from toolkit.step_metrics import StepMetrics
from toolkit.units import format_count, format_duration

_BAR = 12


class ProgressLine:
    """One line a step: step, loss, what the objective measures, learning rate, grad norm, tokens/s, MFU, ETA.

    Disabled on ranks other than 0 and at log.level=warning.
    """

    def __init__(self, total_steps: int, *, every: int, enabled: bool, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._total = total_steps
        self._every = every
        self._enabled = enabled
        self.mfu: Callable[[float], float] | None = None
        """Tokens/s of all ranks -> model FLOPs utilization, where it is known."""
        # The rate over the last steps: the first one compiles, allocates and warms caches.
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)
        self._live: Progress | None = None
        self._eval_loss: float | None = None

    def __enter__(self) -> Self:
        if self._enabled and self.console.is_terminal:
            self._live = Progress(
                TextColumn("[bold]step {task.completed}/{task.total}"),
                BarColumn(bar_width=_BAR),
                _Details(),
                console=self.console,
                # Each refresh takes the interpreter away from the step for a third of a millisecond; rich does ten.
                refresh_per_second=4,
            )
            self._live.add_task("train", total=self._total, details="")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, metrics: StepMetrics) -> None:
        self._recent.append((metrics.tokens, metrics.seconds))
        if metrics.eval_loss is not None:
            self._eval_loss = metrics.eval_loss
        if not self._enabled:
            return
        if self._live is not None:
            room = self.console.width - len(f"step {metrics.step}/{self._total}") - _BAR - 3
            details = "  ".join(_fitting(self._details(metrics), room))
            self._live.update(self._live.task_ids[0], completed=metrics.step, details=details)
        elif metrics.step % self._every == 0 or metrics.step == self._total or metrics.eval_loss is not None:
            # soft_wrap: a log is read by tools as well, and a line of it is never shortened or broken.
            self._eval_loss = metrics.eval_loss  # a line that stays shows what was measured at its step
            details = "  ".join(self._details(metrics).values())
            self.console.print(f"step {metrics.step}/{self._total}  {details}", soft_wrap=True)

    def say(self, line: str) -> None:
        """Print a line above the progress line."""
        if self._enabled:
            (self._live.console if self._live else self.console).print(line, soft_wrap=True)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names and values in two columns."""
        if not self._enabled:
            return
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.console.print(Text(f"{name:>{width}}  ", style="bold"), Text(value), sep="", soft_wrap=True)
        self.console.print()

    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second, over the last steps."""
        seconds = sum(duration for _, duration in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds else 0.0

    def _details(self, metrics: StepMetrics) -> dict[str, str]:
        rate = self.tokens_per_second()
        mean_seconds = sum(duration for _, duration in self._recent) / len(self._recent)
        why = "fp16 overflow" if math.isfinite(metrics.loss) else "not finite"
        norm = f"skipped ({why})" if metrics.skipped else f"grad norm {metrics.grad_norm:.3f}"
        details = {
            "loss": f"loss {metrics.loss:.4f}",
            "held-out": f"held-out {self._eval_loss:.4f}" if self._eval_loss is not None else "",
            "margin": _margin(metrics.objective or {}),
            "divergence": _divergence(metrics.objective or {}),
            "logps": _logps(metrics.objective or {}),
            "lr": f"lr {metrics.lr:.2e}",
            "norm": norm,
            "slow": _slow(metrics.slow_ranks),
            "speed": f"{format_count(rate)} tok/s",
            "mfu": f"MFU {self.mfu(rate):.1%}" if self.mfu is not None else "",
            "eta": f"ETA {format_duration(mean_seconds * (self._total - metrics.step))}",
        }
        return {name: text for name, text in details.items() if text}


def _slow(slow_ranks: dict[str, float] | None) -> str:
    """The rank that holds the others up most."""
    if not slow_ranks:
        return ""
    slowest = max(slow_ranks, key=lambda name: slow_ranks[name])
    more = f" and {len(slow_ranks) - 1} more" if len(slow_ranks) > 1 else ""
    return f"slow: {slowest} {slow_ranks[slowest]:.1f}x{more}"


def _margin(objective: dict[str, float]) -> str:
    """The margin of rewards, and the share of pairs that have it on the right side."""
    margin = f"margin {objective['rewards/margins']:.4f}" if "rewards/margins" in objective else ""
    accuracy = f"accuracy {objective['rewards/accuracies']:.0%}" if "rewards/accuracies" in objective else ""
    return "  ".join(text for text in (margin, accuracy) if text)


def _divergence(objective: dict[str, float]) -> str:
    """The divergence from the reference or the teacher, and the mean of rewards that takes its place in BCO."""
    names = {"kl": "KL", "delta": "delta", "divergence": "KL"}
    return "  ".join(f"{label} {objective[name]:.4f}" for name, label in names.items() if name in objective)


def _logps(objective: dict[str, float]) -> str:
    """The log-probabilities of chosen and rejected completions."""
    kinds = [kind for kind in ("chosen", "rejected") if f"logps/{kind}" in objective]
    return " ".join(["logps", *(f"{kind} {objective[f'logps/{kind}']:.2f}" for kind in kinds)]) if kinds else ""


def _fitting(details: dict[str, str], width: int) -> list[str]:
    """The details that fit on one line of a narrow terminal: the least interesting ones are left out first."""
    shown = dict(details)
    for name in ("lr", "logps", "held-out", "norm", "mfu", "divergence", "eta", "speed", "margin", "slow"):
        if len("  ".join(shown.values())) > width:
            shown.pop(name, None)
    return list(shown.values())


class _Details(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["details"]))


class Stopwatch:
    """Seconds since the last lap."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call (or the start)."""
        now = time.perf_counter()
        seconds = now - self._started
        self._started = now
        return seconds
