"""The report of one or several training runs: index.html.

write_runs(Path("report"), read_runs(["runs/demo"]), command="dstk report runs/demo")
"""

import base64
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from toolkit.config.recipe import Recipe
from toolkit.errors import ReportError
from toolkit.report.load_map import load_map
from toolkit.report.margin_histogram import margin_histogram
from toolkit.report.measured_timeline import timelines_of
from toolkit.report.page import figure, readouts, render, replace_folder
from toolkit.report.prediction import compare_with_plan, state_difference
from toolkit.report.recorded_run import RecordedRun
from toolkit.report.run_charts import dash, run_charts, tone
from toolkit.report.schedule_picture import schedule_picture
from toolkit.units import (
    UNKNOWN,
    english_list,
    format_bytes,
    format_count,
    format_duration,
    format_loss,
    plural,
    ranges,
)

FILES = ("index.html",)


def write_runs(folder: Path, runs: Sequence[RecordedRun], *, command: str) -> Path:
    """Write the report into `folder` and return the path of its page. Raises ReportError if that is not allowed."""
    page = runs_page(runs, command=command)

    def write(place: Path) -> None:
        (place / "index.html").write_text(page, encoding="utf-8")

    return replace_folder(folder, FILES, write)


def runs_page(runs: Sequence[RecordedRun], *, command: str) -> str:
    """Render the page as HTML."""
    beside = [compare_with_plan(run) for run in runs]
    charts = run_charts(runs, [comparison.estimated_bytes for comparison in beside])
    return render(
        "runs.html",
        title=english_list([run.label for run in runs]) if len(runs) <= 4 else plural(len(runs), "run"),
        state=_state(runs),
        runs=[
            {
                "run": run,
                "key": f"k{index}",
                "tone": tone(index),
                "dash": dash(index),
                "figures": figures(run),
                "facts": facts(run),
                "events": run_events(run),
                "train": _train_command(run),
            }
            for index, run in enumerate(runs)
        ],
        drawings=[figure(chart) for chart in charts],
        timelines=list(_timelines(runs)),
        margins=[histogram for run in runs if (histogram := margin_histogram(run)) is not None],
        load_maps=[drawn for run in runs if (drawn := load_map(run)) is not None],
        beside=beside,
        difference=state_difference(beside),
        command=command,
        readouts={"charts": readouts(charts)},
    )


def _timelines(runs: Sequence[RecordedRun]) -> Iterator[dict[str, str]]:
    """Yield the measured timeline of each run that traced a pipeline schedule, above its simulation, as a picture."""
    for run in runs:
        try:
            both = timelines_of(run)
        except ReportError:
            continue
        picture = schedule_picture(both, names=("measured", "simulated"))
        measured, simulated = (f"{100 * timeline.bubble:.1f} %" for timeline in both)
        yield {
            "label": run.label,
            "source": f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}",
            "description": f"bubble measured {measured}, simulated {simulated}",
        }


def figures(run: RecordedRun) -> dict[str, tuple[str, str]]:
    """Return the key numbers, each with a qualifier."""
    steps = run.log.steps
    validated = [(step.eval_loss, step.step) for step in steps if step.eval_loss is not None]
    held_out = [(loss, step) for loss, step in validated if math.isfinite(loss)]
    best = min(held_out, default=None)
    speed = _tokens_per_second(run)
    share = None if speed is None else run.mfu(speed)
    peak = max((step.memory_bytes for step in steps if step.memory_bytes is not None), default=None)
    seconds = sum(step.seconds for step in steps if math.isfinite(step.seconds))
    utilization = (UNKNOWN, "")
    if share is not None and run.gpu is not None:
        digits = 1 if share >= 0.0995 else 2
        utilization = (f"{share:.{digits}%}", f"of {run.gpu.name}")
    last = run.log.last
    total = f" of {run.recipe.train.steps}" if run.recipe is not None else ""
    return {
        "steps": (f"{last.step}{total}", "finished" if run.finished else ""),
        "loss": (format_loss(last.loss), f"at step {last.step}"),
        "held-out loss": (format_loss(best[0]), f"best, at step {best[1]}") if best else (UNKNOWN, ""),
        "tokens/s": (UNKNOWN, "") if speed is None else (format_count(speed), "all ranks"),
        "MFU": utilization,
        "peak memory": (UNKNOWN, "") if peak is None else (format_bytes(peak), "on rank 0"),
        "training time": (format_duration(seconds), f"{format_count(sum(step.tokens for step in steps))} tokens"),
    }


def _tokens_per_second(run: RecordedRun) -> float | None:
    """Return the throughput of the run without its first steps."""
    seconds = sum(step.seconds for step in run.timed_steps)
    return sum(step.tokens for step in run.timed_steps) / seconds if seconds else None


def facts(run: RecordedRun) -> list[tuple[str, str]]:
    """Return what was trained, and on what."""
    facts: list[tuple[str, str]] = []
    recipe = run.recipe
    if recipe is not None:
        parallel = f"{recipe.train.engine}, number of ranks unknown"
        if run.layout is not None:
            parallel = f"{recipe.strategy(run.layout)}, {plural(run.layout.world_size, 'rank')}"
        facts += [
            ("model", f"{recipe.model.name_or_path}, {recipe.model.init} weights"),
            ("data", f"{_sources(recipe)}, samples of {recipe.data.seq_len} tokens"),
            ("parallel", parallel),
            ("precision", recipe.precision),
            ("batch", f"{recipe.batch.global_batch_size} samples a step"),
            ("optimizer", f"{recipe.optimizer.name}, lr {recipe.optimizer.lr:g}, {recipe.schedule.name}"),
        ]
    return [*facts, *run.environment.items(), ("run directory", str(run.folder))]


def _sources(recipe: Recipe) -> str:
    return english_list(list(recipe.data.labels)) or recipe.data.source


def _state(runs: Sequence[RecordedRun]) -> str:
    if len(runs) == 1:
        when = f"{runs[0].written:%Y-%m-%d %H:%M} UTC"
        return f"Finished {when}." if runs[0].finished else f"At step {runs[0].log.last.step}, reported {when}."
    done = sum(run.finished for run in runs)
    return "All runs have finished." if done == len(runs) else f"{done} of {len(runs)} finished."


def _train_command(run: RecordedRun) -> str:
    if not run.recipe_text:
        return ""
    command = f"dstk train {shlex.quote(str(run.folder / 'recipe.yaml'))}"
    if run.layout is not None and run.layout.world_size > 1:
        command += f" --nproc {run.layout.world_size}"
    return f"{command} run_dir=null"


_NAMES = {"loss": "loss", "grad_norm": "gradient norm", "eval_loss": "validation loss"}


@dataclass(frozen=True)
class RunEvent:
    """An event and its steps: checkpoints, skipped and non-finite steps, restarts, an incomplete last line."""

    kind: str
    """Severity: plain, warning or differs."""
    description: str
    steps: str


def run_events(run: RecordedRun) -> list[RunEvent]:
    """Return all events of one run, the most severe first."""
    events = [
        RunEvent("differs", f"{name} not finite", ranges(steps))
        for field, name in _NAMES.items()
        if (steps := [step.step for step in run.log.steps if field in step.not_finite and not step.skipped])
    ]
    for reason, skipped in _skipped_steps(run).items():
        events.append(RunEvent("warning", f"update skipped ({reason})", ranges(sorted(skipped))))
    for incident in run.incidents:
        if incident.to is not None:
            description = f"rolled back to step {incident.to}: {incident.reason}"
            events.append(RunEvent("warning", description, str(incident.step)))
        elif incident.kind == "slow":
            events.append(RunEvent("plain", incident.reason, str(incident.step)))
    for restart in run.log.restarts:
        again = plural(restart.after - restart.at + 1, "step")
        events.append(RunEvent("warning", f"restart: {again} trained again", f"{restart.at}, after {restart.after}"))
    numbers = [step.step for step in run.log.steps]
    holes = [(a + 1, b - 1) for a, b in pairwise(numbers) if b > a + 1]
    if holes:
        missing = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in holes[:8]) + (", …" if holes[8:] else "")
        events.append(RunEvent("warning", "no line in metrics.jsonl", missing))
    if run.log.is_truncated:
        description = "the last line of metrics.jsonl is incomplete and skipped"
        events.append(RunEvent("plain", description, f"after {run.log.last.step}"))
    return events + _checkpoints(run)


def _skipped_steps(run: RecordedRun) -> dict[str, set[int]]:
    """Return the steps that changed no weight, by reason: the recorded one, or what follows from the line of a step."""
    recorded = {incident.step: incident.reason for incident in run.incidents if incident.kind == "skip"}
    by_reason: dict[str, set[int]] = {}
    for step, reason in recorded.items():
        by_reason.setdefault(reason, set()).add(step)
    for metrics in run.log.steps:
        if metrics.skipped and metrics.step not in recorded:
            reason = "not finite" if "loss" in metrics.not_finite else "fp16 overflow"
            by_reason.setdefault(reason, set()).add(metrics.step)
    return by_reason


def _checkpoints(run: RecordedRun) -> list[RunEvent]:
    events = []
    every = run.recipe.checkpoint.every if run.recipe is not None else 0
    due = list(range(every, run.log.last.step + 1, every)) if every else []
    if due:
        shown = f"{', '.join(map(str, due))}" if len(due) <= 6 else f"{due[0]}, {due[1]}, … {due[-1]}"
        events.append(RunEvent("plain", f"checkpoint every {every} steps", shown))
    if run.checkpoints:
        events.append(RunEvent("plain", "checkpoints on disk", ranges(list(run.checkpoints))))
    if run.has_model:
        events.append(RunEvent("plain", "trained model on disk", ""))
    return events
