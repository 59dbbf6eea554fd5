"""`dstk import`: what others trained, to begin with or to go on from."""

import shlex
from pathlib import Path

import click

from toolkit import recipe_file
from toolkit.cli.byte_size import ByteSize
from toolkit.units import format_bytes


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("-o", "--output", required=True, metavar="DIR", type=click.Path(path_type=Path), help="A new directory.")
@click.option("--recipe", metavar="FILE", help="Take the optimizer's states along, for this recipe to --resume.")
@click.option(
    "--model", metavar="DIR", type=click.Path(path_type=Path), help="Where config and tokenizer of the model lie."
)
@click.option(
    "--max-shard-size", type=ByteSize(), default="5GB", show_default=True, metavar="SIZE", help="Of one file."
)
def command(
    source: Path,
    overrides: tuple[str, ...],
    output: Path,
    recipe: str | None,
    model: Path | None,
    max_shard_size: int,
) -> None:
    """Write SOURCE as a Hugging Face directory that training can begin with, or as a run to go on from.

    SOURCE is a Hugging Face directory with safetensors, a GGUF file, or a checkpoint of a Hugging Face model that
    DeepSpeed, accelerate or the Trainer wrote with ZeRO 1, 2 or 3, universal ones too. Pickles are looked through
    before they are read, and refused where they hold more than plain data.

    \b
    dstk import ~/models/SmolLM2-135M -o smollm2
    dstk import model.gguf -o smollm2
    dstk import output/checkpoint-500 -o halfway
    dstk import output/checkpoint-500 -o runs/on --recipe my.yaml train.steps=2000
    """
    if recipe is None and overrides:
        raise click.UsageError(f"{overrides[0]} without --recipe: there is no recipe that it would change.")
    if recipe is not None and model is not None:
        raise click.UsageError("--model with --recipe: the recipe names the model. Leave --model out.")
    decoded = None if recipe is None else recipe_file.load(recipe, overrides)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if decoded is None:
        from toolkit.train.imported_weights import import_weights

        done = import_weights(source, output, model=model, max_shard_bytes=max_shard_size)
    else:
        from toolkit.train.imported_run import import_run

        done = import_run(source, output, decoded)
    written = done.written
    files = f"{written.files} file{'' if written.files == 1 else 's'}"
    click.echo(f"{done.title} → {written.path}: {written.tensors} tensors, {format_bytes(written.nbytes)}, {files}")
    for notice in done.notices:
        click.echo(f"note: {notice}", err=True)
    if recipe is None:
        # Without a slash it could be taken for a name of the catalogue.
        place = written.path if written.path.is_absolute() else f"./{written.path}"
        click.echo(f"begin with it: model.name_or_path={place} model.init=pretrained")
    else:
        click.echo(f"go on: {shlex.join(['dstk', 'train', recipe, *overrides, '--resume', str(written.path)])}")
