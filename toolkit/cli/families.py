"""`dstk families`: which Hugging Face families are supported for pipeline, tensor and sequence parallelism."""

import json
import shutil
import sys
from collections.abc import Sequence

import click

from toolkit.errors import ModelError, nearest
from toolkit.models.families.registry import find_spec
from toolkit.models.support import KINDS, Support, all_families, checked_version
from toolkit.units import plural

_FILE_WIDTH = 300
"""Columns where the output is not a terminal: enough that every row is one line."""


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(names: tuple[str, ...], as_json: bool) -> None:
    """Print which families of Hugging Face causal LMs are supported for pipeline and tensor parallelism.

    The column sequence is for sequence parallelism on top of tensor parallelism, ulysses for DeepSpeed-Ulysses.

    NAME is the model_type of a config.json; without one, all families are listed. A yes was tested: a tiny model of
    the family has the same loss and gradients when it is partitioned as when it is whole.

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
    """Return the families of these names, or all. Raises ModelError for an unknown one."""
    known = all_families()
    for name in names:
        if name not in known:
            hint = nearest(name, known) or " See dstk families for all."
            raise ModelError(f"{name} is no causal-LM family of transformers {checked_version()}.{hint}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


def facts(family: Support) -> dict[str, object]:
    """Return what --json prints about a family."""
    supported: dict[str, object] = {kind: family.supports(kind) for kind in KINDS}
    refusals = {f"{kind}_refusal": family.refusal(kind) for kind in KINDS}
    return supported | {"ulysses": find_spec(family.model_type).ulysses_verified} | refusals


def why_not(family: Support) -> str:
    """Return the refusals of a family on one line, each with the first kind of parallelism that it applies to."""
    reasons: dict[str, str] = {}
    for kind in KINDS:
        reason = family.refusal(kind)
        if reason is not None:
            reasons.setdefault(reason, f"{kind}: " if reasons else "")
    return "; ".join(kind + reason for reason, kind in reasons.items())


def show(families: Sequence[Support]) -> None:
    """Print the table, and under it how many families are supported."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("family", *KINDS, "ulysses"):
        table.add_column(heading, no_wrap=True)
    table.add_column("why not", style="dim", overflow="fold")
    for family in families:
        found = [*map(family.supports, KINDS), find_spec(family.model_type).ulysses_verified]
        marks = [Text("yes", style="green") if supported else Text("no", style="red") for supported in found]
        table.add_row(family.model_type, *marks, Text(why_not(family)))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _FILE_WIDTH
    console = Console(width=width, highlight=False)
    console.print(table)
    pipeline, tensor, sequence = (sum(family.supports(kind) for family in families) for kind in KINDS)
    console.print(
        f"\n{plural(len(families), 'family', 'families')}: {pipeline} supported for pipeline parallelism, "
        f"{tensor} for tensor parallelism, {sequence} for sequence parallelism, tested with "
        f"transformers {checked_version()}.",
        soft_wrap=True,
    )
