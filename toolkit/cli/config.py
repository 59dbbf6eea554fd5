"""`dstk config`: the DeepSpeed JSON of a recipe, as the engine would get it."""

import json

import click

from toolkit import recipe_file
from toolkit.dsconfig import build
from toolkit.errors import ConfigError, ModelError
from toolkit.shape import ModelShape, find_config, with_overrides


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--world-size", type=click.IntRange(min=1), help="Ranks of the job; default: dp x tp x pp of the recipe.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="Where it runs.")
def command(recipe: str, overrides: tuple[str, ...], world_size: int | None, device: str) -> None:
    """Print the DeepSpeed JSON of RECIPE, as a run on GPUs (or, with --device cpu, on CPUs) would use it.

    \b
    dstk config recipes/gpt2/z3.yaml --world-size 8 > ds_config.json
    """
    loaded = recipe_file.load(recipe, overrides, world_size=world_size)
    if loaded.train.engine != "deepspeed":
        raise ConfigError(
            f"{recipe}: train.engine={loaded.train.engine} takes no DeepSpeed config. Add train.engine=deepspeed."
        )
    ranks = world_size or loaded.world_size
    if ranks is None:
        ranks = loaded.parallel.tp * loaded.parallel.pp
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        click.echo(f"note: for {many}, as neither --world-size nor parallel.dp says how many.", err=True)
    layout = loaded.layout(ranks)
    batch = loaded.resolve_batch(layout)
    facts = find_config(loaded.model.name_or_path)
    if facts is None:
        raise ModelError(
            f"model.name_or_path={loaded.model.name_or_path}: not a known shape or local directory, and bucket sizes "
            "follow from the model's width. Give a shape that `dstk config` knows, or a directory with a config.json."
        )
    shape = ModelShape.from_config(with_overrides(facts, loaded.model.overrides))
    config = build(loaded, layout, batch, hidden_size=shape.hidden, device="cuda" if device == "cuda" else "cpu")
    click.echo(json.dumps(config, indent=2))
