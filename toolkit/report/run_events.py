"""What happened in a run besides its steps: snapshots, skipped and broken steps, restarts, a torn last line."""

from dataclasses import dataclass
from itertools import pairwise

from toolkit.report.numerals import plural, ranges
from toolkit.report.training_run import TrainingRun

_NAMES = {"loss": "loss", "grad_norm": "gradient norm", "eval_loss": "validation loss"}


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """What happened, at which steps."""

    kind: str
    """plain, failed or differs: how alarming it is."""
    what: str
    steps: str


def run_events(run: TrainingRun) -> list[RunEvent]:
    """All of one run, the alarming ones first."""
    found = [
        RunEvent(kind="differs", what=f"{_NAMES[field]} not finite", steps=ranges(steps))
        for field in _NAMES
        if (steps := [step.step for step in run.log.steps if field in step.not_finite and not step.skipped])
    ]
    for what, steps in (
        ("fp16 overflow", [step.step for step in run.log.steps if step.skipped and "loss" not in step.not_finite]),
        ("not finite", [step.step for step in run.log.steps if step.skipped and "loss" in step.not_finite]),
    ):
        if steps:
            found.append(RunEvent(kind="failed", what=f"update skipped ({what})", steps=ranges(steps)))
    for incident in run.incidents:
        if incident.to is not None:
            what = f"rolled back to step {incident.to}: {incident.reason}"
            found.append(RunEvent(kind="failed", what=what, steps=str(incident.step)))
    for restart in run.log.restarts:
        again = plural(restart.after - restart.at + 1, "step")
        found.append(
            RunEvent(
                kind="failed", what=f"restart: {again} trained again", steps=f"{restart.at}, after {restart.after}"
            )
        )
    numbers = [step.step for step in run.log.steps]
    holes = [(a + 1, b - 1) for a, b in pairwise(numbers) if b > a + 1]
    if holes:
        missing = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in holes[:8]) + (", …" if holes[8:] else "")
        found.append(RunEvent(kind="failed", what="no line in metrics.jsonl", steps=missing))
    if run.log.torn:
        after = f"after {run.log.last.step}"
        found.append(
            RunEvent(kind="plain", what="the last line of metrics.jsonl is not whole, and left out", steps=after)
        )
    return found + _snapshots(run)


def _snapshots(run: TrainingRun) -> list[RunEvent]:
    found = []
    every = run.recipe.checkpoint.every if run.recipe is not None else 0
    due = list(range(every, run.log.last.step + 1, every)) if every else []
    if due:
        shown = f"{', '.join(map(str, due))}" if len(due) <= 6 else f"{due[0]}, {due[1]}, … {due[-1]}"
        found.append(RunEvent(kind="plain", what=f"snapshot every {every} steps", steps=shown))
    if run.snapshots:
        found.append(RunEvent(kind="plain", what="snapshots on disk", steps=ranges(list(run.snapshots))))
    if run.has_model:
        found.append(RunEvent(kind="plain", what="trained model on disk", steps=""))
    return found
