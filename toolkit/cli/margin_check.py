"""The check of `dstk demo --dpo` of what its run wrote: did the margins of pairs grow, and are their signs right?"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

_NEEDED_ACCURACY = 0.9
"""Share of the pairs of the last steps whose chosen answer has the larger reward."""


@dataclass(frozen=True, kw_only=True)
class MarginResult:
    """Margins of rewards in the first and in the last tenth of a run, and accuracies in the last one."""

    first_margin: float
    last_margin: float
    last_accuracy: float

    @property
    def passed(self) -> bool:
        """Say whether margins grew and enough pairs are in order."""
        return self.last_margin > self.first_margin and self.last_accuracy >= _NEEDED_ACCURACY

    @property
    def sentence(self) -> str:
        """The result on one line."""
        margins = f"rewards: margins of pairs grew from {self.first_margin:.2f} to {self.last_margin:.2f} nats"
        if self.last_margin <= self.first_margin:
            margins = f"rewards: margins of pairs went from {self.first_margin:.2f} to {self.last_margin:.2f} nats"
        counted = f"the chosen answer has the larger reward in {self.last_accuracy:.0%} of the last pairs"
        verdict = "passed" if self.passed else "FAILED"
        return f"{margins}, and {counted}; growth and {_NEEDED_ACCURACY:.0%} needed: {verdict}"


def margin_results(metrics: Path) -> tuple[MarginResult, ...]:
    """Return the result of a run with its metrics.jsonl; none of a run without pairs."""
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    objectives = [step["objective"] for step in steps if "rewards/margins" in (step.get("objective") or {})]
    if not objectives:
        return ()
    tenth = math.ceil(len(objectives) / 10)
    first = objectives[:tenth]
    last = objectives[-tenth:]
    return (
        MarginResult(
            first_margin=_mean(first, "rewards/margins"),
            last_margin=_mean(last, "rewards/margins"),
            last_accuracy=_mean(last, "rewards/accuracies"),
        ),
    )


def _mean(objectives: Sequence[dict[str, float]], name: str) -> float:
    return fmean(step[name] for step in objectives)
