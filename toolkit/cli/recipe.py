"""`dstk recipe`: the recipe that trains what another program was set up to train."""

import shlex

import click

from toolkit.cli import Count
from toolkit.files import expanded, is_there


@click.command()
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--from-trainer", "source", required=True, metavar="FILE", help="The arguments: .bin, JSON or YAML.")
@click.option("--deepspeed", metavar="FILE", help="The DeepSpeed JSON, where the arguments do not name it.")
@click.option("--model", metavar="DIR", help="Directory or hub name of the model, where the arguments do not name it.")
@click.option("--gpus", type=Count(), metavar="N", help="GPUs of the run: its global batch is a multiple of them.")
@click.option("-o", "--output", metavar="FILE", help="The recipe to write.  [default: print it]")
def command(
    overrides: tuple[str, ...],
    source: str,
    deepspeed: str | None,
    model: str | None,
    gpus: int | None,
    output: str | None,
) -> None:
    """Write the recipe that trains what the Trainer, axolotl or LLaMA-Factory was set up to train.

    FILE is the training_args.bin that the Trainer saves beside a model, TrainingArguments as JSON or YAML (also with
    the arguments of run_clm.py or TRL), or the YAML of axolotl or LLaMA-Factory. What has no counterpart, or what the
    toolkit does otherwise, is a line on stderr and a comment in the recipe. Fields of the recipe may be given as well.

    \b
    Examples:
      dstk recipe --from-trainer training_args.bin --model ~/models/SmolLM2-135M data.source=a.jsonl data.seq_len=512
      dstk recipe --from-trainer args.json --deepspeed ds.json --gpus 8 -o my.yaml
      dstk recipe --from-trainer axolotl.yaml --gpus 8 train.steps=1000 -o my.yaml
    """
    wrong = next((word for word in overrides if "=" not in word), None)
    if wrong is not None:
        raise click.UsageError(f"{wrong} is not a field with a value. Write SECTION.KEY=VALUE.")
    path = None if output is None else expanded(output)
    if path is not None and is_there(path):
        raise click.UsageError(f"--output {output}: there is a file already. Choose another name.")
    from toolkit.convert.setups.recipe_of_setup import recipe_of_setup

    done = recipe_of_setup(
        expanded(source),
        deepspeed=None if deepspeed is None else expanded(deepspeed),
        model=model,
        gpus=gpus,
        overrides=overrides,
    )
    for note in done.notes:
        click.echo(f"note: {note}", err=True)
    if path is None:
        click.echo(done.text, nl=False)
        return
    path.write_text(done.text, encoding="utf-8")
    ranks = f" --nproc {gpus}" if gpus else ""
    click.echo(f"train: {shlex.join(['dstk', 'train', output or ''])}{ranks}")
