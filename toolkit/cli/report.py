"""`dstk report`: a page about training runs."""

import shlex
from pathlib import Path

import click

from toolkit.errors import ReportError


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("-o", "--output", metavar="DIR", help="Where the page goes; for one run the default is RUN/report.")
@click.option("--gpu", metavar="NAME", help="The GPU it ran on, for the MFU: H100-SXM-80GB, A100-SXM-80GB, …")
def command(runs: tuple[str, ...], output: str | None, gpu: str | None) -> None:
    """Write a page of plots and numbers about training runs, finished or still going.

    RUN is a run directory or a metrics.jsonl. Several runs lie over each other in the same plots. The page is one
    HTML file without any link to the network: it can be sent as it is.

    \b
    dstk report runs/demo
    dstk report runs/demo runs/four-layers -o comparison
    """
    if output is None and len(runs) > 1:
        raise ReportError(f"{len(runs)} runs, and no folder for their page. Add -o DIR.")
    from toolkit import hardware
    from toolkit.report.folder import check_replaceable
    from toolkit.report.runs import FILES, write_runs
    from toolkit.report.training_run import read_runs

    found = read_runs(runs, gpu=None if gpu is None else hardware.gpu(gpu))
    folder = Path(output).expanduser() if output is not None else found[0].folder / "report"
    check_replaceable(folder, FILES)
    words = ["dstk", "report", *runs, *(["-o", output] if output else []), *(["--gpu", gpu] if gpu else [])]
    click.echo(str(write_runs(folder, found, command=shlex.join(words))))
