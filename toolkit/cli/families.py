"""`dstk families`: which Hugging Face families are supported for which kinds of parallelism."""

from collections.abc import Sequence

import click

from toolkit.cli.json_output import json_option, print_json
from toolkit.errors import ModelError, nearest
from toolkit.models.families.registry import find_spec
from toolkit.models.support import EXPERT_KINDS, KINDS, Support, all_families, checked_version
from toolkit.units import plural


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@json_option("Print JSON.")
def command(names: tuple[str, ...], as_json: bool) -> None:
    """Print which families of Hugging Face causal LMs are supported for which kinds of parallelism.

    The column sequence is for sequence parallelism on top of tensor parallelism, cp for context parallelism, ulysses
    for DeepSpeed-Ulysses. Of mixtures of experts, ep is for expert parallelism, and inner for tensor parallelism with a
    part of each expert on every rank; tensor is with whole experts.

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
        print_json({family.model_type: facts(family) for family in families})
    else:
        show(families)


def select(names: Sequence[str]) -> list[Support]:
    """Return the families of these names, or all. Raises ModelError for an unknown one."""
    known = all_families()
    for name in names:
        if name not in known:
            hint = nearest(name, known) or " See dstk families for all."
            raise ModelError(f"{name} is not a causal-LM family of transformers {checked_version()}.{hint}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


def facts(family: Support) -> dict[str, object]:
    """Return what --json prints about a family."""
    supported: dict[str, object] = {kind: family.supports(kind) for kind in family.kinds}
    refusals = {f"{kind}_refusal": family.refusal(kind) for kind in family.kinds}
    sequences = {"ulysses": find_spec(family.model_type).ulysses_verified, "cp": family.supports("context")}
    return supported | sequences | refusals | {"cp_refusal": family.context_refusal}


def why_not(family: Support) -> str:
    """Return the refusals of a family on one line, each with the first kind of parallelism that it applies to."""
    reasons: dict[str, str] = {}
    for kind in family.kinds:
        reason = family.refusal(kind)
        if reason is not None:
            reasons.setdefault(reason, f"{kind}: " if reasons else "")
    plan = find_spec(family.model_type).tensor_plan
    if plan is not None and plan.whole and family.supports("tensor"):
        reasons["attention is not sharded"] = "tensor: "
    if family.context_refusal is not None:
        reasons.setdefault(family.context_refusal, "cp: " if reasons else "")
    return "; ".join(kind + reason for reason, kind in reasons.items())


def show(families: Sequence[Support]) -> None:
    """Print the table, and under it how many families are supported."""
    from rich.table import Table
    from rich.text import Text

    from toolkit.report.terminal import table_console

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("family", *KINDS, *EXPERT_KINDS, "ulysses", "cp"):
        table.add_column(heading, no_wrap=True)
    table.add_column("why not", style="dim", overflow="fold")
    marks = {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text("-", style="dim")}
    for family in families:
        supported = {kind: family.supports(kind) for kind in family.kinds}
        supported["cp"] = family.supports("context")
        supported["ulysses"] = find_spec(family.model_type).ulysses_verified
        columns = (marks[supported.get(kind)] for kind in (*KINDS, *EXPERT_KINDS, "ulysses", "cp"))
        table.add_row(family.model_type, *columns, Text(why_not(family)))
    console = table_console()
    console.print(table)
    pipeline, tensor, sequence, ep, _ = (
        sum(family.supports(kind) for family in families) for kind in (*KINDS, *EXPERT_KINDS)
    )
    console.print(
        f"\n{plural(len(families), 'family', 'families')}: {pipeline} supported for pipeline parallelism, "
        f"{tensor} for tensor parallelism, {sequence} for sequence parallelism, {ep} for expert parallelism, "
        f"tested with transformers {checked_version()}.",
        soft_wrap=True,
    )
