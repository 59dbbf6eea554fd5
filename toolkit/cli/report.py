"""`dstk report`: a page about training runs."""

import shlex

import click

from toolkit.cli import directories_only
from toolkit.errors import ReportError
from toolkit.files import expanded

_EVERY_SECONDS = 10


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", callback=directories_only)
@click.option("-o", "--output", metavar="DIR", help="Folder of the page. For one run the default is RUN/report.")
@click.option("--gpu", metavar="NAME", help="The GPU it ran on, to compute MFU: H100-SXM-80GB, A100-SXM-80GB, …")
@click.option("--watch", "watches", is_flag=True, help="Show the state of all runs in folders, until Ctrl-C.")
@click.option(
    "--every",
    "every_seconds",
    type=click.IntRange(1, 86400),
    metavar="SECONDS",
    help="With --watch: time between two looks [10].",
)
def command(
    runs: tuple[str, ...], output: str | None, gpu: str | None, watches: bool, every_seconds: int | None
) -> None:
    """Write a page of plots and numbers about finished or running training runs.

    RUN is a run directory or a metrics.jsonl. Several runs share the same plots. The page is one self-contained HTML
    file that loads nothing from the network.

    \b
    dstk report runs/demo
    dstk report runs/demo runs/four-layers -o comparison
    dstk report --watch runs
    dstk report --watch runs /shared/runs -o fleet

    With --watch, RUN may also be a folder of runs. Each is a row of a table in the terminal, or with -o of a page that
    loads itself again: state, step, loss, tokens/s, predicted end, last incident, hosts. Without a terminal the
    table is printed once.
    """
    if watches:
        if gpu is not None:
            raise click.UsageError("--gpu with --watch, which shows no MFU. Remove one of them.")
        from toolkit.cli.watch import watch

        watch(runs, None if output is None else expanded(output), every_seconds=every_seconds or _EVERY_SECONDS)
        return
    if every_seconds is not None:
        raise click.UsageError("--every without --watch: a page of plots is written once. Add --watch, or remove it.")
    if output is None and len(runs) > 1:
        raise ReportError(f"{len(runs)} runs, and no folder for their page. Add -o DIR.")
    from toolkit import hardware
    from toolkit.report.page import check_replaceable
    from toolkit.report.recorded_run import read_runs
    from toolkit.report.runs_page import FILES, write_runs

    recorded_runs = read_runs(runs, gpu=None if gpu is None else hardware.gpu(gpu))
    if note := hardware.variant_note(gpu):
        click.echo(f"note: {note}", err=True)
    folder = expanded(output) if output is not None else recorded_runs[0].folder / "report"
    check_replaceable(folder, FILES)
    words = ["dstk", "report", *runs]
    if output:
        words += ["-o", output]
    if gpu:
        words += ["--gpu", gpu]
    click.echo(str(write_runs(folder, recorded_runs, command=shlex.join(words))))
