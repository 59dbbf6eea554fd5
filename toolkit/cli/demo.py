"""`dstk demo`: train a small GPT-2 on this machine in a few minutes, and look at it."""

import os

import click

from toolkit.cli.sample import sample
from toolkit.train.run_names import unused_run_directory
from toolkit.train.spawn import find_recipes, run_local_ranks


@click.command()
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks on this machine.")
def command(overrides: tuple[str, ...], nproc: int) -> int:
    """Train a small GPT-2 on the standard library's source code, and let it write."""
    recipes = find_recipes()
    run_dir = unused_run_directory("demo")
    arguments = ["--config", str(recipes / "demo.yaml"), f"run_dir={run_dir}", *overrides]
    code = run_local_ranks(recipes / "train.py", arguments, nproc)
    if code != 0:
        return code
    text = sample(str(run_dir), prompt="def ", tokens=120, temperature=0.8, seed=1)
    click.echo(click.style("What it writes after `def `:", bold=True))
    click.echo("".join(f"    {line}\n" for line in text.splitlines()))
    click.echo(click.style("Try next:", bold=True))
    here = os.path.relpath(recipes)
    for command_line, meaning in (
        (f"dstk train {here}/demo.yaml --nproc {nproc} parallel.zero_stage=3", "the same loss under ZeRO-3"),
        (f"dstk sample {run_dir} --prompt 'class '", "more of its writing"),
        (f"dstk config {here}/gpt2/z2.yaml --world-size 8", "the DeepSpeed JSON of a run on 8 GPUs"),
    ):
        click.echo(f"    {command_line}\n        {meaning}")
    return 0
