"""`dstk doctor`: what this machine lacks for training, and how to fix it."""

import sys
from collections import Counter
from collections.abc import Sequence

import click

from toolkit.cli import FiniteRange
from toolkit.cli.json_output import json_option, print_json
from toolkit.doctor import CheckState, MachineCheck, MachineFacts, examine
from toolkit.doctor.collect import gather
from toolkit.units import plural

_STYLES: dict[CheckState, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}
_TIMEOUT = "Time limit for one program, or for the import of torch or DeepSpeed.  [default: 90]"


@click.command()
@json_option("Print JSON.")
@click.option("--only-problems", is_flag=True, help="Print problems and notes only.")
@click.option("--timeout", type=FiniteRange(min=1, max=86400), default=90, metavar="SECONDS", help=_TIMEOUT)
def command(as_json: bool, only_problems: bool, timeout: float) -> int:
    """Check this machine: versions, GPUs and links, compilers, memory, disks, limits, environment.

    Takes some seconds, most of them to import torch and DeepSpeed in separate processes. A `problem` makes runs fail;
    a `note` makes them slower, or concerns only some runs. Each comes with its fix.

    Exits with 1 if there is a problem, else with 0.

    \b
    Examples:
      dstk doctor
      dstk doctor --only-problems
      dstk doctor --json | jq '.checks[] | select(.state == "problem")'
    """
    if not as_json and sys.stderr.isatty():
        click.echo("checking (torch and DeepSpeed take a few seconds to import) …", err=True)
    facts = gather(timeout_seconds=timeout)
    checks = examine(facts)
    if as_json:
        print_json(_document(facts, checks))
    else:
        _show(facts, [check for check in checks if check.state != "ok"] if only_problems else checks)
    return 1 if any(check.state == "problem" for check in checks) else 0


def _document(facts: MachineFacts, checks: Sequence[MachineCheck]) -> dict[str, object]:
    states = Counter(check.state for check in checks)
    counts = {"problems": states["problem"], "notes": states["note"]}
    rows = [
        {"topic": check.topic, "name": check.name, "found": check.fact, "state": check.state, "fix": check.fix}
        for check in checks
    ]
    return {"host": facts.host, **counts, "checks": rows}


def _show(facts: MachineFacts, checks: Sequence[MachineCheck]) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from toolkit.report.terminal import table_console

    console = table_console(most=140)
    console.print(Text(f"{facts.host}, {facts.system}, checked in {facts.seconds:.1f} s", style="dim"))
    names = max((len(check.name) for check in checks), default=0)
    for topic in dict.fromkeys(check.topic for check in checks):
        console.print(Text(f"\n{topic}", style="bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=len("problem"))
        table.add_column(width=min(names, 30), overflow="fold")
        table.add_column(overflow="fold")
        for check in (check for check in checks if check.topic == topic):
            fact = Text(check.fact)
            if check.fix:
                fact.append(f"\n→ {check.fix}", style="cyan")
            table.add_row(Text(check.state, style=_STYLES[check.state]), check.name, fact)
        console.print(Padding(table, (0, 0, 0, 2)))
    states = Counter(check.state for check in checks)
    summary = f"{plural(states['problem'], 'problem')}, {plural(states['note'], 'note')}"
    console.print(Text(f"\n{summary}", style="bold red" if states["problem"] else "bold green"))
