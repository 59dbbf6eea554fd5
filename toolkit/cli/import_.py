"""`dstk import`: models and checkpoints of other programs, to train from or to resume."""

import shlex
from pathlib import Path

import click

from toolkit.cli import directories_only
from toolkit.cli.export import describe, max_shard_size_option, output_option
from toolkit.config import load_recipe
from toolkit.launch.output import quiet


@click.command()
@click.argument("source", type=click.Path(), callback=lambda *given: Path(directories_only(*given)))
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@output_option
@click.option("--recipe", metavar="FILE", help="Also import the optimizer states, for this recipe to --resume.")
@click.option(
    "--model", metavar="DIR", type=click.Path(path_type=Path), help="Directory of the model's config and tokenizer."
)
@max_shard_size_option
def command(
    source: Path, overrides: tuple[str, ...], output: Path, recipe: str | None, model: Path | None, max_shard_size: int
) -> None:
    """Write SOURCE as a Hugging Face directory to train from, or as a run to resume.

    SOURCE is a Hugging Face directory with safetensors, a GGUF file, or a training state of another program: the
    Trainer (also with FSDP), accelerate with FSDP, torchtitan, Megatron-Core (torch_dist), DeepSpeed with ZeRO 1, 2 or
    3, or a universal checkpoint. With --recipe, weights, moments, step and update count go into a checkpoint that any
    layout resumes. Pickles are scanned before they are read, and rejected where they contain more than plain data.

    \b
    dstk import ~/models/SmolLM2-135M -o smollm2
    dstk import model.gguf -o smollm2
    dstk import output/checkpoint-500 -o halfway
    dstk import output/checkpoint-500 -o runs/on --recipe my.yaml train.steps=2000
    dstk import megatron/iter_0000500 -o runs/on --recipe my.yaml
    """
    if recipe is None and overrides:
        raise click.UsageError(f"{overrides[0]} without --recipe: there is no recipe that it could change.")
    if recipe is not None and model is not None:
        raise click.UsageError("--model with --recipe: the recipe names the model. Omit --model.")
    decoded = None if recipe is None else load_recipe(recipe, overrides)
    quiet(debug=False)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if decoded is None:
        from toolkit.convert.import_weights import import_weights

        done = import_weights(source, output, model=model, max_shard_bytes=max_shard_size)
    else:
        from toolkit.convert.import_run import import_run

        done = import_run(source, output, decoded)
    click.echo(f"{done.title} → {describe(done.written)}")
    for notice in done.notices:
        click.echo(f"note: {notice}", err=True)
    if recipe is None:
        # Without a slash it could be mistaken for a name in the catalogue.
        place = done.written.path if done.written.path.is_absolute() else f"./{done.written.path}"
        click.echo(f"train from it: model.name_or_path={place} model.init=pretrained")
    else:
        click.echo(f"resume: {shlex.join(['dstk', 'train', recipe, *overrides, '--resume', str(done.written.path)])}")
