"""`dstk calibrate`: this machine's own constants for `dstk plan`."""

from pathlib import Path

import click


@click.command()
@click.option("--output", type=click.Path(dir_okay=False), metavar="FILE", help="Write here instead of the cache.")
def command(output: str | None) -> None:
    """Measure this machine's constants for dstk plan: less than a minute, on an idle machine.

    Rates of matrix products, attention and memory, and what a kernel takes at least. On CPUs, whose ranks have one
    thread each, or as many as OMP_NUM_THREADS says, also: layers in Python, DeepSpeed's engines, and the links between
    ranks. Of a GPU, the link to its host.

    \b
    dstk calibrate
    dstk plan --model gpt2 --gpus 2xcpu --precision fp32 --seq 128 --global-batch 16
    dstk calibrate --output a.json; dstk plan --cluster a.json --gpus 4xcpu …
    """
    from toolkit.calibrate.measure import calibrate
    from toolkit.files import expanded
    from toolkit.launch.output import quiet
    from toolkit.planner.calibration.file import calibration_path

    path = calibration_path() if output is None else expanded(output)
    quiet(debug=False)
    calibration = calibrate(say=lambda subject: click.echo(f"measuring: {subject} …", err=True))
    calibration.write(Path(path))
    click.echo(f"{calibration.hardware}: {calibration.summary}")
    if calibration.others > 0.1:
        click.echo(
            f"note: other programs kept {calibration.others:.1f} cores busy meanwhile; calibrate again later.", err=True
        )
    click.echo(f"written to {path}")
