"""The report of one or several training runs: index.html.

write_runs(Path("report"), read_runs(["runs/demo"]), command="dstk report runs/demo")
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from toolkit.report.folder import replace_folder
from toolkit.report.numerals import NOT_FINITE, UNKNOWN, english_list, plural
from toolkit.report.page import figure, readouts, render
from toolkit.report.run_charts import dash, run_charts, tone
from toolkit.report.run_events import run_events
from toolkit.report.training_run import TrainingRun
from toolkit.units import format_bytes, format_count, format_duration

FILES = ("index.html",)
_WARM_UP = 2
"""Steps that do not count for the speed, where there are more: they compile, allocate and warm caches."""


def write_runs(folder: Path, runs: Sequence[TrainingRun], *, command: str) -> Path:
    """Write the report into `folder` and return the path of its page. Raises ReportError where that is not allowed."""
    page = runs_page(runs, command=command)
    return replace_folder(folder, FILES, lambda place: _write(place, page))


def runs_page(runs: Sequence[TrainingRun], *, command: str) -> str:
    """The page as HTML."""
    charts = run_charts(runs)
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
        command=command,
        readouts={"charts": readouts(charts)},
    )


def figures(run: TrainingRun) -> dict[str, tuple[str, str]]:
    """The numbers one asks for first, each with what it is of."""
    steps = run.log.steps
    held_out = [(step.eval_loss, step.step) for step in steps if step.eval_loss is not None]
    best = min(held_out, default=None)
    speed = tokens_per_second(run)
    share = None if speed is None else run.mfu(speed)
    peak = max((step.memory_bytes for step in steps if step.memory_bytes is not None), default=None)
    seconds = sum(step.seconds or 0.0 for step in steps)
    last = run.log.last
    total = f" of {run.recipe.train.steps}" if run.recipe is not None else ""
    return {
        "steps": (f"{last.step}{total}", "finished" if run.finished else ""),
        "loss": (NOT_FINITE if last.loss is None else f"{last.loss:.4f}", f"at step {last.step}"),
        "held-out loss": (f"{best[0]:.4f}", f"best, at step {best[1]}") if best else (UNKNOWN, ""),
        "tokens/s": (UNKNOWN, "") if speed is None else (format_count(speed), "all ranks"),
        "MFU": (UNKNOWN, "")
        if share is None or run.gpu is None
        else (f"{share:.1%}" if share >= 0.0995 else f"{share:.2%}", f"of {run.gpu.name}"),
        "peak memory": (UNKNOWN, "") if peak is None else (format_bytes(peak), "on rank 0"),
        "training time": (format_duration(seconds), f"{format_count(sum(step.tokens for step in steps))} tokens"),
    }


def tokens_per_second(run: TrainingRun) -> float | None:
    """Of the whole run but its first steps."""
    timed = [step for step in run.log.steps if step.seconds and step.tokens]
    timed = timed[_WARM_UP:] if len(timed) > 5 * _WARM_UP else timed
    seconds = sum(step.seconds or 0.0 for step in timed)
    return sum(step.tokens for step in timed) / seconds if seconds else None


def facts(run: TrainingRun) -> list[tuple[str, str]]:
    """What was trained, on what."""
    found: list[tuple[str, str]] = []
    recipe = run.recipe
    if recipe is not None:
        found.append(("model", f"{recipe.model.name_or_path}, {recipe.model.init} weights"))
        found.append(("data", f"{recipe.data.source}, samples of {recipe.data.seq_len} tokens"))
        if run.layout is not None:
            ranks = plural(run.layout.world_size, "rank")
            found.append(("parallel", f"{recipe.strategy(run.layout)}, {ranks}"))
        else:
            found.append(("parallel", f"{recipe.train.engine}, number of ranks not known"))
        found.append(("precision", recipe.precision))
        found.append(("batch", f"{recipe.batch.global_size} samples a step"))
        found.append(("optimizer", f"{recipe.optimizer.name}, lr {recipe.optimizer.lr:g}, {recipe.schedule.name}"))
    found += list(run.environment.items())
    found.append(("run directory", str(run.folder)))
    return found


def _state(runs: Sequence[TrainingRun]) -> str:
    """Whether they are done, in words."""
    if len(runs) == 1:
        run = runs[0]
        when = f"{run.written:%Y-%m-%d %H:%M} UTC"
        if run.finished:
            return f"Finished {when}."
        return f"At step {run.log.last.step}; the last one was reported {when}."
    done = sum(run.finished for run in runs)
    return "All of them finished." if done == len(runs) else f"{done} of {len(runs)} finished."


def _train_command(run: TrainingRun) -> str:
    if not run.recipe_text:
        return ""
    command = f"dstk train {shlex.quote(str(run.folder / 'recipe.yaml'))}"
    if run.layout is not None and run.layout.world_size > 1:
        command += f" --nproc {run.layout.world_size}"
    return f"{command} run_dir=null"


def _write(folder: Path, page: str) -> None:
    (folder / "index.html").write_text(page, encoding="utf-8")
