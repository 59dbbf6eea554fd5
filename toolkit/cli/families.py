"""`dstk families`: which Hugging Face families can be cut, and why the others cannot."""

import json
import shutil
import sys
from collections.abc import Sequence

import click

from toolkit.errors import ModelError, nearest
from toolkit.families.support import Support, all_families, checked_version

_CUTS = ("pipeline", "tensor", "sequence")
_WIDTH_OF_A_FILE = 300
"""Columns where the output is no terminal: enough that every row is one line."""


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(names: tuple[str, ...], as_json: bool) -> None:
    """Print which families of Hugging Face causal LMs can be cut into pipeline stages or by tensor parallelism.

    The column sequence is for sequence parallelism on top of tensor parallelism.

    NAME is the model_type of a config.json; without one, all families are listed. A yes is a proof: a tiny model of
    the family, cut, has the loss and every gradient of the whole one.

    \b
    Examples:
      dstk families
      dstk families gpt2 qwen3 mixtral
      dstk families --json | jq 'map_values(.pipeline)'
    """
    families = select(names)
    if as_json:
        click.echo(json.dumps({family.model_type: facts(family) for family in families}, indent=2))
    else:
        show(families)


def select(names: Sequence[str]) -> list[Support]:
    """The families of these names, or all. Raises ModelError for an unknown one."""
    known = all_families()
    for name in names:
        if name not in known:
            hint = nearest(name, known) or " See dstk families for all."
            raise ModelError(f"{name} is no causal-LM family of transformers {checked_version()}.{hint}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


def facts(family: Support) -> dict[str, object]:
    """What --json prints about a family."""
    return {
        "pipeline": family.pipeline,
        "tensor": family.tensor,
        "sequence": family.sequence,
        "pipeline_refusal": family.pipeline_refusal,
        "tensor_refusal": family.tensor_refusal,
        "sequence_refusal": family.sequence_refusal,
    }


def why_not(family: Support) -> str:
    """The refusals of a family on one line, each with the first of the cuts that it holds for."""
    reasons: dict[str, str] = {}
    for cut, reason in (
        ("", family.pipeline_refusal),
        ("tensor: ", family.tensor_refusal),
        ("sequence: ", family.sequence_refusal),
    ):
        if reason is not None:
            reasons.setdefault(reason, cut if reasons else "")
    return "; ".join(cut + reason for reason, cut in reasons.items())


def show(families: Sequence[Support]) -> None:
    """Print the table, and under it how many can be cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("family", *_CUTS):
        table.add_column(heading, no_wrap=True)
    table.add_column("why not", style="dim", overflow="fold")
    for family in families:
        marks = [Text("yes", style="green") if getattr(family, cut) else Text("no", style="red") for cut in _CUTS]
        table.add_row(family.model_type, *marks, Text(why_not(family)))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    console = Console(width=width, highlight=False)
    console.print(table)
    pipeline, tensor, sequence = (sum(getattr(family, cut) for family in families) for cut in _CUTS)
    console.print(
        f"\n{_count(len(families))}: {pipeline} with pipeline stages, {tensor} with tensor parallelism, "
        f"{sequence} with sequence parallelism, proven with transformers {checked_version()}.",
        soft_wrap=True,
    )


def _count(families: int) -> str:
    return "1 family" if families == 1 else f"{families} families"
