"""`dstk compare`: does a parallel run train the same, and when it does not, why?"""

import json
import math
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from toolkit import recipe_file
from toolkit.parity.strategy import Strategy

if TYPE_CHECKING:
    from toolkit.parity.comparison import Comparison
    from toolkit.recipe import Recipe

_LARGE = 2e13
"""FLOPs that a laptop's core does in about ten minutes."""
_OF_RECIPES = ("baseline", "steps", "nproc", "reruns", "shrink", "dropout", "timeout")
_OF_RUNS = ("rerun", "tolerance")
"""Options that mean something for one of the two only."""


@click.command
@click.argument("arguments", nargs=-1, metavar="[RUN RUN...] [SECTION.KEY=VALUE...]")
@click.option("--recipe", metavar="FILE", help="The recipe to train under every strategy.")
@click.option("--against", metavar="LIST", help="Strategies: z1,z2,z3,tp2,pp2,tp2-pp2-dp2-z1,ddp,fsdp, …")
@click.option(
    "--baseline", metavar="STRATEGY", help="What they are held against.  [default: reference; in bf16 and fp16 dp1-z1]"
)
@click.option("--steps", type=click.IntRange(min=2), default=30, show_default=True, help="Optimizer steps.")
@click.option("--nproc", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks where dp is left open.")
@click.option(
    "--reruns", type=click.IntRange(min=1), default=3, show_default=True, help="Baselines with other rounding."
)
@click.option("--shrink", is_flag=True, help="Take a tiny model of the same family, and little text.")
@click.option("--dropout", is_flag=True, help="Leave dropout on; layouts draw other masks.")
@click.option("--report", metavar="DIR", help="Write the page index.html there, with its plots and numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON instead of a table.")
@click.option("--timeout", type=click.IntRange(min=1), default=1800, show_default=True, help="Seconds for one run.")
@click.option("--rerun", multiple=True, metavar="RUN", help="For runs: the baseline's run with other rounding.")
@click.option("--tolerance", type=float, metavar="X", help="For runs: a relative bound of your own.")
def command(arguments: tuple[str, ...], recipe: str | None, against: str | None, **options: Any) -> int:
    """Train a recipe under several strategies and hold each against one plain process; or compare finished runs.

    All strategies start from the same weights and see the same samples. Prints for each the largest relative difference
    of loss, gradient norm and trained weights, and for one that differs the likely cause. Exits with 0 if all train the
    same, with 1 if one differs or fails, and with 2 for bad input.

    \b
    dstk compare --recipe recipes/gpt2/3d.yaml --against z1,z3,tp2,pp2,tp2-pp2-dp2-z1,ddp,fsdp --shrink
    dstk compare --recipe my.yaml --against tp2-sp --baseline z1 --steps 100 --report out optimizer.name=sgd
    dstk compare runs/yesterday runs/today

    \b
    Strategies are parts with a - between them: dp2 tp2 pp2 u2 (Ulysses) z0 z1 z2 z3, sp, recompute, selective,
    offload, m4 (micro-batches of 4), and the engines ddp, fsdp and reference.
    """
    from toolkit.cli.comparison_table import print_comparison

    started = time.monotonic()
    _check(arguments, recipe, against, options)
    if options["report"]:
        from toolkit.report.comparison import FILES
        from toolkit.report.folder import check_replaceable

        check_replaceable(Path(options["report"]), FILES)
    if recipe is None:
        comparison = _runs(arguments, options)
    else:
        assert against is not None
        # Whoever ends us (a scheduler, `timeout`, a container) means the ranks as well.
        signal.signal(signal.SIGTERM, _stop)
        comparison = _strategies(arguments, recipe, against, options)
    if options["as_json"]:
        click.echo(json.dumps(comparison.to_dict(), indent=2))
    else:
        print_comparison(comparison, seconds=time.monotonic() - started)
    if options["report"]:
        from toolkit.report.comparison import write_comparison

        page = write_comparison(Path(options["report"]), comparison.to_dict())
        if not options["as_json"]:
            click.echo(f"report  {page}")
    return 0 if comparison.passed else 1


def _check(arguments: tuple[str, ...], recipe: str | None, against: str | None, options: dict[str, Any]) -> None:
    """Raise UsageError for options that do not go together."""
    context = click.get_current_context()
    given = {name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if recipe is not None:
        if against is None:
            raise click.UsageError(
                "--recipe without --against: name the strategies, for instance --against z1,z3,tp2,pp2."
            )
        for name in _OF_RUNS:
            if name in given:
                raise click.UsageError(f"--{name} is for finished runs: with --recipe the baseline is run again here.")
        return
    if against is not None:
        raise click.UsageError("--against without --recipe: name the recipe that is to be trained.")
    if not arguments:
        raise click.UsageError("nothing to compare: give --recipe and --against, or two runs.")
    if any(argument.endswith((".yaml", ".yml")) for argument in arguments):
        raise click.UsageError("a recipe is given where a run was expected: name it with --recipe FILE.")
    if len(arguments) == 1:
        raise click.UsageError(f"only one run is given, {arguments[0]}: name the one to hold it against as well.")
    for name in _OF_RECIPES:
        if name in given:
            raise click.UsageError(f"--{name} is for training a recipe: finished runs are compared as they are.")
    tolerance = options["tolerance"]
    if tolerance is not None and options["rerun"]:
        raise click.UsageError("--tolerance with --rerun: each gives a bound. Choose one of them.")
    if tolerance is not None and not (0 <= tolerance < math.inf):
        raise click.UsageError(f"--tolerance {tolerance:g}: a relative bound is 0 or more, for instance 1e-3.")


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _runs(arguments: tuple[str, ...], options: dict[str, Any]) -> "Comparison":
    from toolkit.parity.runs import compare_runs

    return compare_runs(
        [Path(run) for run in arguments],
        reruns=[Path(run) for run in options["rerun"]],
        tolerance=options["tolerance"],
        command=_command_line(),
    )


def _strategies(overrides: tuple[str, ...], path: str, against: str, options: dict[str, Any]) -> "Comparison":
    strategies = Strategy.parse_list(against)
    asked = None if options["baseline"] is None else Strategy.parse(options["baseline"])
    recipe = recipe_file.load(path, overrides)
    # From here on torch is needed, which takes seconds to import.
    from toolkit.train import comparison as runner
    from toolkit.train.launch import quiet
    from toolkit.train.preload import preload
    from toolkit.train.shrink import shrink

    quiet(debug=False)
    given = recipe
    with tempfile.TemporaryDirectory(prefix="dstk-tiny-") as folder:
        name = recipe.model.name_or_path
        if options["shrink"]:
            recipe = shrink(recipe, Path(folder))
            name = f"{name}, shrunk"
        small = runner.for_comparison(recipe, steps=options["steps"], dropout=options["dropout"])
        baseline = asked or Strategy.parse(runner.default_baseline(small))
        (first,) = runner.plan(small, [baseline], options["nproc"])
        jobs = runner.plan(small, strategies, options["nproc"])
        _warn_if_slow(small, len(jobs) + options["reruns"] + 3)
        preload(small)
        return runner.compare_strategies(
            small,
            jobs,
            first,
            title=f"{name}, {small.precision}, {options['steps']} steps",
            rounding_seeds=options["reruns"],
            timeout_seconds=options["timeout"],
            progress=_say,
            command=_command_line(),
            commands=[_alone(path, overrides, given, strategy, options["nproc"]) for strategy in strategies],
            notes=_notes(recipe, small, options),
        )


def _notes(recipe: "Recipe", small: "Recipe", options: dict[str, Any]) -> list[str]:
    drops = "Dropout is on: masks depend on the micro-batch and on tp, so layouts agree within its noise only."
    notes = [drops if options["dropout"] else "Dropout is off."]
    if small.schedule.warmup_steps != recipe.schedule.warmup_steps:
        notes.append(f"Warm-up is shortened to {small.schedule.warmup_steps} of {options['steps']} steps.")
    if options["shrink"]:
        notes.append(
            "The model is a tiny one of the same family (4 layers, 4 heads, samples of 32 tokens of a synthetic text); "
            "model.overrides are left out, and the commands of the report train the recipe's own model."
        )
    return notes


def _alone(path: str, overrides: tuple[str, ...], recipe: "Recipe", strategy: Strategy, nproc: int) -> str:
    """What trains the recipe under this strategy alone."""
    changes, ranks = strategy.overrides(recipe, nproc), strategy.world_size(nproc)
    return shlex.join(["dstk", "train", path, *overrides, *changes, "--nproc", str(ranks)])


def _warn_if_slow(recipe: "Recipe", runs: int) -> None:
    import torch

    from toolkit.estimate.flops import train_flops_per_token
    from toolkit.train.model import load_config
    from toolkit.train.preflight import find_shape

    shape = find_shape(load_config(recipe.model))
    if shape is None:
        return
    tokens = recipe.batch.global_size * recipe.data.seq_len * recipe.train.steps * runs
    flops = train_flops_per_token(shape, recipe.data.seq_len) * tokens
    if flops > _LARGE and not torch.cuda.is_available():
        click.echo(
            f"note: {flops:.0e} FLOPs in {runs} runs take long on a CPU. --shrink takes a tiny model of this family.",
            err=True,
        )


def _say(name: str, outcome: str, seconds: float) -> None:
    if sys.stderr.isatty() or outcome != "done":
        click.echo(f"{seconds:6.1f} s  {name}{'' if outcome == 'done' else f': {outcome}'}", err=True)


def _command_line() -> str:
    return shlex.join(["dstk", *sys.argv[1:]])
