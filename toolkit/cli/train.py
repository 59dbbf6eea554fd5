"""`dstk train`: start the ranks of this machine on recipes/train.py."""

import click

from toolkit import recipe_file
from toolkit.train.spawn import find_recipes, run_local_ranks


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on this machine.")
@click.option("--deepspeed-config", metavar="JSON", help="DeepSpeed settings that the recipe does not decide.")
@click.option("--trust-remote-code", is_flag=True, help="Run the Python code that a model directory brings.")
@click.option("--overwrite", is_flag=True, help="Replace the run that run_dir holds.")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    nproc: int,
    deepspeed_config: str | None,
    trust_remote_code: bool,
    overwrite: bool,
) -> int:
    """Train RECIPE on this machine's ranks.

    \b
    dstk train recipes/demo.yaml --nproc 2
    dstk train recipes/demo.yaml --nproc 2 parallel.zero_stage=3 train.steps=50
    """
    # A mistake in the recipe shows at once, not after the seconds in which N ranks import torch.
    recipe_file.load(recipe, overrides, world_size=nproc)
    arguments = ["--config", recipe, *overrides]
    if deepspeed_config is not None:
        arguments += ["--deepspeed_config", deepspeed_config]
    arguments += ["--trust-remote-code"] * trust_remote_code + ["--overwrite"] * overwrite
    return run_local_ranks(find_recipes() / "train.py", arguments, nproc)
