"""`dstk compare`: does a parallel run train the same, and when it does not, why?"""

import math
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from toolkit.cli import LOCAL_RANKS, Count, directories_only
from toolkit.cli.json_output import json_option, print_json
from toolkit.config import load_recipe, overrides_between, recipe_layouts
from toolkit.config.layouts import choose
from toolkit.config.strategy import Strategy
from toolkit.imports import no_garbage_collection
from toolkit.launch.output import quiet

if TYPE_CHECKING:
    from toolkit.config.recipe import Recipe
    from toolkit.parity.comparison import Comparison
    from toolkit.parity.run.compare_strategies import StrategyRun

_POSITIVE = Count()
_LARGE = 2e13
"""FLOPs that one laptop core computes in about ten minutes."""
_EXIT_CODES = {"same": 0, "differs": 1, "cannot tell": 3}
_OF_RECIPES = ("baseline", "shrink", "dropout")
"""Options for recipes only."""
_OF_TRAINING = ("steps", "nproc", "reruns", "timeout")
"""Options for recipes and scripts, which are trained here."""
_OF_RUNS = ("rerun", "tolerance", "loss", "runs")
"""Options for finished runs only."""
_NOT_OF_SCRIPTS = ("recipe", "against", "layout", *_OF_RECIPES, *_OF_RUNS)
"""Options that say nothing about a script."""


@click.command
@click.argument("arguments", nargs=-1, metavar="[RUN RUN...] [SECTION.KEY=VALUE...] [-- ARGS...]")
@click.option("--recipe", metavar="FILE", help="The recipe to train under every strategy.")
@click.option("--against", metavar="LIST", help="Strategies: z1,z2,z3,tp2,pp2,tp2-pp2-dp2-z1,ddp,fsdp, …")
@click.option(
    "--layout", help="A layout that the recipe lists (8xH100); with --shrink on two ranks for each of its axes."
)
@click.option(
    "--baseline",
    metavar="STRATEGY",
    help="Strategy that the others are compared with.  [default: reference; in bf16 one rank alike]",
)
@click.option("--script", metavar="FILE", help="A Python file that trains with a Trainer, run with ARGS.")
@click.option("--steps", type=Count(min=2), default=30, show_default=True, help="Optimizer steps.")
@click.option(
    "--nproc",
    type=LOCAL_RANKS,
    default=2,
    show_default=True,
    help="Ranks of a script, and of strategies that do not set dp.",
)
@click.option(
    "--reruns", type=_POSITIVE, default=3, show_default=True, help="Runs of the baseline with other rounding."
)
@click.option("--shrink", is_flag=True, help="Train a tiny model of the same family on little text.")
@click.option("--dropout", is_flag=True, help="Keep dropout on; layouts draw other masks.")
@click.option("--report", metavar="DIR", help="Write a page (index.html), its plots and numbers.")
@json_option("Print the numbers as JSON instead of a table.")
@click.option("--timeout", type=_POSITIVE, default=1800, show_default=True, help="Seconds for one run.")
@click.option("--rerun", multiple=True, metavar="RUN", help="For runs: the baseline with other rounding.")
@click.option("--runs", is_flag=True, help="The arguments are finished runs, which is the default without --recipe.")
@click.option("--loss", multiple=True, metavar="NAME", help="For runs: the tag, column or key of the loss.")
@click.option("--tolerance", type=float, metavar="X", help="For runs: the largest relative difference to accept.")
def command(
    arguments: tuple[str, ...],
    recipe: str | None,
    against: str | None,
    layout: str | None,
    script: str | None,
    **options: Any,
) -> int:
    """Train a recipe under several strategies and compare each with one process; or a script, or finished runs.

    All strategies start from the same weights and read the same samples. Prints the largest relative difference of
    loss, gradient norm and trained weights of each strategy, and the likely cause if it differs. Exits with 0 if all
    train the same, with 1 if one differs or fails, with 3 if growth of rounding explains every difference, so that it
    cannot tell, and with 2 for bad input.

    \b
    dstk compare --recipe gpt2-pretrain --against z1,z3,tp2,pp2,tp2-pp2-dp2-z1,ddp,fsdp --shrink
    dstk compare --recipe my.yaml --against tp2-sp --baseline z1 --steps 100 --report out optimizer.name=sgd
    dstk compare --recipe gpt2-pretrain --layout 8xH100 --shrink precision=fp32
    dstk compare --script train.py --nproc 2 -- --learning_rate 1e-4
    dstk compare runs/yesterday runs/today
    dstk compare --runs runs/demo trainer_output/checkpoint-500 tensorboard/run1 curve.csv --tolerance 1e-2

    A script makes a transformers.Trainer and calls its train(); it is run on --nproc ranks and on one.

    Finished runs are directories or files: metrics.jsonl, the Trainer's trainer_state.json, TensorBoard events, a table
    (CSV or TSV), or JSON lines with step and loss.

    \b
    Strategies are parts joined by -: dp2 ep2 cp2 tp2 pp2 u2 (Ulysses) z0 z1 z2 z3; the pipeline schedules pp2x2
    (interleaved), gpipe, zbh1, zbv; sp, inner, recompute, every2, selective, offload, nvme, offacts, tiled, hpz2
    (ZeRO++), m4 (micro-batches of 4); and the engines ddp, fsdp and reference. After trainer: stand
    those of Hugging Face's Trainer: trainer:ddp, trainer:fsdp2, trainer:tp2, trainer:fsdp2-tp2, trainer:ep2.
    """
    from toolkit.report.comparison_table import print_comparison

    started = time.monotonic()
    _check(arguments, recipe, against or layout, script, options)
    if options["report"]:
        from toolkit.report.comparison_page import FILES
        from toolkit.report.page import check_replaceable

        check_replaceable(Path(options["report"]), FILES)
    if recipe is not None or script is not None:
        # A scheduler, `timeout` or container that ends this process must end the ranks too.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if script is not None:
        comparison = _script(Path(script), arguments, options)
    elif recipe is None:
        comparison = _runs(arguments, options)
    else:
        strategies = Strategy.parse_list(against) if against else []
        if layout is not None:
            strategies += _of_layout(recipe, layout, is_small=options["shrink"])
        comparison = _strategies(arguments, recipe, strategies, options)
    if options["as_json"]:
        print_json(comparison.to_dict())
    else:
        print_comparison(comparison, seconds=time.monotonic() - started)
    if options["report"]:
        from toolkit.report.comparison_page import write_comparison

        page = write_comparison(Path(options["report"]), comparison.to_dict())
        if not options["as_json"]:
            click.echo(f"report  {page}")
    return _EXIT_CODES[comparison.outcome]


def _check(
    arguments: tuple[str, ...], recipe: str | None, against: str | None, script: str | None, options: dict[str, Any]
) -> None:
    context = click.get_current_context()
    written = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if script is not None:
        _refuse(written, _NOT_OF_SCRIPTS, "with --script: a script says itself what it trains, and how")
        return
    directories_only(context, context.command.params[0], arguments)
    if recipe is not None:
        if against is None:
            example = "for instance --against z1,z3,tp2,pp2"
            raise click.UsageError(f"--recipe without --against: give the strategies, {example}, or a --layout.")
        _refuse(written, _OF_RUNS, "is for finished runs: with --recipe the baseline is trained here")
        return
    if against is not None:
        raise click.UsageError("--against without --recipe: give the recipe to train.")
    if not arguments:
        raise click.UsageError("nothing to compare: give --recipe and --against, or --script, or two runs.")
    if any(argument.endswith((".yaml", ".yml")) for argument in arguments):
        raise click.UsageError("a recipe is given instead of a run. Give it with --recipe FILE.")
    if len(arguments) == 1:
        raise click.UsageError(f"only one run is given, {arguments[0]}. Give the run to compare it with.")
    _refuse(written, _OF_RECIPES, "is for training a recipe: finished runs are compared as they are")
    _refuse(written, _OF_TRAINING, "is for training a recipe or a script: finished runs are compared as they are")
    tolerance = options["tolerance"]
    if tolerance is not None and options["rerun"]:
        raise click.UsageError("--tolerance with --rerun: each gives a bound. Choose one of them.")
    if tolerance is not None and not (0 <= tolerance < math.inf):
        raise click.UsageError(f"--tolerance {tolerance:g}: a relative bound is 0 or more, for instance 1e-3.")


def _refuse(written: set[str], names: tuple[str, ...], reason: str) -> None:
    """Refuse the first option of `names` that was written."""
    refused = next((name for name in names if name in written), None)
    if refused is not None:
        raise click.UsageError(f"--{refused} {reason}.")


def _runs(arguments: tuple[str, ...], options: dict[str, Any]) -> "Comparison":
    from toolkit.parity.finished_runs import compare_runs

    runs = [Path(run) for run in arguments]
    reruns = [Path(run) for run in options["rerun"]]
    return compare_runs(
        runs, reruns=reruns, tolerance=options["tolerance"], loss_names=options["loss"], command=_command_line()
    )


def _script(script: Path, arguments: tuple[str, ...], options: dict[str, Any]) -> "Comparison":
    quiet(debug=False)
    with no_garbage_collection():  # these import torch, which takes seconds
        from toolkit.launch.local_ranks import preload
        from toolkit.parity.run.compare_script import compare_script

    preload()
    return compare_script(
        script,
        arguments,
        ranks=options["nproc"],
        steps=options["steps"],
        rounding_seeds=options["reruns"],
        timeout_seconds=options["timeout"],
        progress=_print_progress,
        command=_command_line(),
    )


def _of_layout(path: str, layout: str, *, is_small: bool) -> list[Strategy]:
    entries = [entry for entry in recipe_layouts(path) if entry.name == layout]
    if not entries:
        choose({entry.name: [entry.text] for entry in recipe_layouts(path)}, layout, None)  # raises for a wrong name
        return [Strategy.parse(layout).shrunk() if is_small else Strategy.parse(layout)]
    return [entry.strategy.shrunk() if is_small else entry.strategy for entry in entries]


def _strategies(
    overrides: tuple[str, ...], path: str, strategies: list[Strategy], options: dict[str, Any]
) -> "Comparison":
    requested = None if options["baseline"] is None else Strategy.parse(options["baseline"])
    recipe = load_recipe(path, overrides)
    quiet(debug=False)
    with no_garbage_collection():  # these import torch, which takes seconds
        from toolkit.launch.local_ranks import preload
        from toolkit.model_init.build_model import load_config
        from toolkit.parity.run import compare_strategies as runner
        from toolkit.parity.run.shrink import shrink

    small = recipe
    name = recipe.model.name_or_path
    if options["shrink"]:
        small = shrink(recipe)
        name = f"{name}, shrunk"
    small = runner.for_comparison(small, steps=options["steps"], dropout=options["dropout"])
    jobs = runner.plan(small, strategies, options["nproc"])
    baseline_strategies = [requested or Strategy.parse(strategy.baseline(small.precision)) for strategy in strategies]
    baselines = runner.plan(small, baseline_strategies, options["nproc"])
    kinds = len({job.name for job in baselines})
    _warn_if_slow(small, len(jobs) + kinds * (options["reruns"] + 3))
    preload(load_config(small.model).model_type)
    return runner.compare_strategies(
        small,
        jobs,
        baselines,
        title=f"{name}, {small.precision}, {options['steps']} steps",
        rounding_seeds=options["reruns"],
        timeout_seconds=options["timeout"],
        progress=_print_progress,
        command=_command_line(),
        commands=[_train_command(path, overrides, recipe, job) for job in jobs],
        notes=_notes(recipe, small, options),
    )


def _notes(recipe: "Recipe", small: "Recipe", options: dict[str, Any]) -> list[str]:
    drops = "Dropout is on: masks depend on the micro-batch and on tp, so layouts agree only within its noise."
    notes = [drops if options["dropout"] else "Dropout is off."]
    if recipe.precision == "fp16":
        from toolkit.parity.run.observe import FIRST_LOSS_SCALE

        notes.append(
            f"The loss scale begins at {FIRST_LOSS_SCALE:,.0f} at most, so that no layout skips its first steps."
        )
    if small.optimizer.name == "adamw8bit":
        notes.append("Moments of 8 bits round in blocks, which layouts cut differently. adamw proves one more sharply.")
    if small.schedule.warmup_steps != recipe.schedule.warmup_steps:
        notes.append(f"Warm-up is shortened to {small.schedule.warmup_steps} of {options['steps']} steps.")
    if options["shrink"]:
        notes.append("The model is a tiny one of the same family (4 layers, 4 heads).")
        notes.append("Samples are up to 32 tokens of a synthetic text, with unequal numbers of targets.")
    return notes


def _train_command(path: str, overrides: tuple[str, ...], recipe: "Recipe", job: "StrategyRun") -> str:
    """Return the command that trains what was compared under this strategy alone, to the bit where runs repeat.

    On a CPU the number of threads decides in which order sums are taken.
    """
    from toolkit.launch.environment import local_device

    if job.trainer is not None:
        return f"{_command_line()}  (the Trainer of transformers, in the process of dstk compare)"
    words = ["dstk", "train", path, *overrides, *overrides_between(recipe, job.recipe), "--nproc", str(job.ranks)]
    command = shlex.join(words)
    return f"OMP_NUM_THREADS=1 {command}" if local_device().type == "cpu" else command


def _warn_if_slow(recipe: "Recipe", runs: int) -> None:
    import torch

    from toolkit.estimate.flops import train_flops_per_token
    from toolkit.model_init.build_model import load_config
    from toolkit.training.preflight import find_shape

    shape = find_shape(load_config(recipe.model))
    if shape is None:
        return
    tokens = recipe.batch.global_batch_size * recipe.data.seq_len * recipe.train.steps * runs
    flops = train_flops_per_token(shape, recipe.data.seq_len) * tokens
    if flops > _LARGE and not torch.cuda.is_available():
        note = f"note: {flops:.0e} FLOPs in {runs} runs take long on a CPU."
        click.echo(f"{note} --shrink trains a tiny model of this family.", err=True)


def _print_progress(name: str, outcome: str, seconds: float) -> None:
    if sys.stderr.isatty() or outcome != "done":
        click.echo(f"{seconds:6.1f} s  {name}{'' if outcome == 'done' else f': {outcome}'}", err=True)


def _command_line() -> str:
    return shlex.join(["dstk", *sys.argv[1:]])
