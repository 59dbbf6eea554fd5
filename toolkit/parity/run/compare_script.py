"""Run a user's own script, which trains with Hugging Face's Trainer, on several ranks and on one, and compare the two.

The ranks come first: they say how many samples an update takes. One process then takes the same in more micro-batches,
and again with other rounding, to see how far rounding alone goes.
"""

import datetime
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from toolkit.errors import RunError, ToolkitError
from toolkit.launch.environment import describe_environment, local_device
from toolkit.launch.local_ranks import in_one_line, run_jobs
from toolkit.parity import Bounds, ParityResult
from toolkit.parity.comparison import Baseline, Comparison, StrategyResult
from toolkit.parity.run.compare_strategies import Progress
from toolkit.parity.run.script_run import ScriptOutcome, ScriptRun, train_script
from toolkit.parity.tolerance import UNIT_ROUNDOFF
from toolkit.units import plural


def compare_script(
    script: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    steps: int,
    rounding_seeds: int = 3,
    timeout_seconds: float = 1800,
    progress: Progress = lambda name, outcome, seconds: None,
    command: str = "",
) -> Comparison:
    """Compare the training of `python script arguments…` on `ranks` ranks with that of one process.

    Raises RunError where the script is missing or fails. Tensors are kept in a temporary directory.
    """
    if not script.is_file():
        problem = "it is a directory" if script.is_dir() else "there is no such file"
        raise RunError.of("--script", str(script), problem, "give a Python file that calls train()")
    device = local_device()
    several = ScriptRun(name=plural(ranks, "rank"), script=script, arguments=tuple(arguments), ranks=ranks, steps=steps)
    with tempfile.TemporaryDirectory(prefix="dstk-compare-") as folder:
        run = partial(_run, folder=Path(folder), timeout_seconds=timeout_seconds, progress=progress)
        ((outcome, seconds),) = run([several])
        alone = replace(several, name="one process", ranks=1, global_batch_size=outcome.global_batch_size)
        seeds = [
            replace(alone, name=f"rounding seed {seed}", rounding_seed=seed) for seed in range(1, rounding_seeds + 1)
        ]
        (first, _), (again, _), *reruns = run([alone, replace(alone, name="once more"), *seeds])
        baseline = first.run
        rerun_runs = [rerun.run for rerun, _ in reruns]
        bounds = Bounds.measured(baseline, rerun_runs, unit=UNIT_ROUNDOFF[outcome.precision])
        repeats = ParityResult.of(again.run, baseline, bounds).agreement == "bitwise"
        result = ParityResult.of(outcome.run, baseline, bounds).with_diagnosis()
    taken = f"An update takes {plural(outcome.global_batch_size, 'sample')}"
    return Comparison(
        title=f"{script.name} on {plural(ranks, 'rank')}, {outcome.precision}, {len(outcome.run.curve)} steps",
        baselines=[
            Baseline(run=baseline.without_values(), bounds=bounds, reruns=[rerun.curve for rerun in rerun_runs])
        ],
        results=[StrategyResult(name=several.name, result=result, seconds=seconds)],
        notes=[
            "Dropout is off; nothing is saved, validated or reported.",
            f"{taken}: one process in micro-batches of {baseline.micro_batch_size}.",
            "The baseline repeats to the bit." if repeats else "The baseline does not repeat to the bit.",
        ],
        command=command,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        environment=describe_environment(device),
    )


def _run(
    jobs: Sequence[ScriptRun], *, folder: Path, timeout_seconds: float, progress: Progress
) -> list[tuple[ScriptOutcome, float]]:
    """What each job trained, and the seconds it took. Raises RunError for the first that fails."""
    place = Path(tempfile.mkdtemp(dir=folder))
    calls = [(partial(train_script, job, place / str(number)), job.ranks) for number, job in enumerate(jobs)]
    # On GPUs every rank has a device of its own, and concurrent runs would share them.
    cores = len(os.sched_getaffinity(0)) if local_device().type == "cpu" else 1
    outcomes: dict[int, tuple[ScriptOutcome, float]] = {}
    # Closed at once if something is raised here: the ranks must end before the folder is deleted.
    with closing(run_jobs(calls, cores=cores, timeout_seconds=timeout_seconds, joined=False)) as ended:
        for number, outcome, seconds in ended:
            progress(jobs[number].name, "done" if isinstance(outcome, list) else in_one_line(outcome), seconds)
            if isinstance(outcome, ToolkitError):
                raise outcome
            if not isinstance(outcome, list):
                raise RunError(
                    f"{jobs[number].script}: {in_one_line(outcome).rstrip('.')}. Make it run by itself first."
                )
            outcomes[number] = outcome[0], seconds
    return [outcomes[number] for number in range(len(jobs))]
