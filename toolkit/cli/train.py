"""`dstk train`: start the ranks of this machine on recipes/train.py."""

from pathlib import Path

import click

from toolkit import recipe_file
from toolkit.checkpoint.names import step_of
from toolkit.recipe import Recipe
from toolkit.train.restart import AUTO, Restart
from toolkit.train.run_names import unused_run_directory
from toolkit.train.spawn import find_recipes, restarted_ranks, run_local_ranks


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on this machine.")
@click.option("--deepspeed-config", metavar="JSON", help="DeepSpeed settings that the recipe does not decide.")
@click.option("--trust-remote-code", is_flag=True, help="Run the Python code that a model directory brings.")
@click.option("--overwrite", is_flag=True, help="Replace the run that run_dir holds.")
@click.option(
    "--resume", metavar="auto|PATH", help="Go on from a run or checkpoint; auto: from run_dir, if it has one."
)
@click.option("--strict", is_flag=True, help="A damaged newest checkpoint is an error; else the one before is taken.")
@click.option(
    "--restarts", type=click.IntRange(min=0), default=0, metavar="N", help="Start again after a crash, N times at most."
)
def command(
    recipe: str,
    overrides: tuple[str, ...],
    nproc: int,
    deepspeed_config: str | None,
    trust_remote_code: bool,
    overwrite: bool,
    resume: str | None,
    strict: bool,
    restarts: int,
) -> int:
    """Train RECIPE on this machine's ranks.

    With --restarts, a rank that dies of a signal or of an unexpected error ends the others, and all start again from
    the newest whole checkpoint. Bad input (exit code 2) and a request to stop (75) end the run.

    \b
    dstk train recipes/demo.yaml --nproc 2
    dstk train recipes/demo.yaml --nproc 2 parallel.zero_stage=3 train.steps=50
    dstk train recipes/demo.yaml --nproc 4 --resume auto --restarts 3 checkpoint.every=100
    """
    if strict and resume is None and not restarts:
        raise click.UsageError("--strict without --resume: nothing is read that could be damaged. Leave it out.")
    # A mistake in the recipe shows at once, not after the seconds in which N ranks import torch.
    decoded = recipe_file.load(recipe, overrides, world_size=nproc)
    arguments = ["--config", recipe, *overrides]
    if deepspeed_config is not None:
        arguments += ["--deepspeed_config", deepspeed_config]
    arguments += ["--trust-remote-code"] * trust_remote_code + ["--strict"] * strict
    if resume == AUTO and decoded.run_dir is None:
        raise click.UsageError("--resume auto without a run_dir: there is no telling which run. Set run_dir=….")
    script = find_recipes() / "train.py"
    if not restarts:
        arguments += ["--overwrite"] * overwrite + (["--resume", resume] if resume else [])
        return run_local_ranks(script, arguments, nproc)
    again = Restart(
        run_dir=_run_directory(decoded, recipe, resume), given=arguments, resume=resume, overwrite=overwrite
    )
    return restarted_ranks(script, again.arguments, nproc, restarts)


def _run_directory(decoded: Recipe, recipe: str, resume: str | None) -> Path:
    """Where all starts of this run write: chosen here once, as the first of them would choose."""
    if decoded.run_dir is not None:
        return Path(decoded.run_dir).expanduser()
    if resume is not None:
        path = Path(resume).expanduser()
        return path.parent if step_of(path.resolve().name) is not None else path
    return unused_run_directory(Path(recipe).stem)
