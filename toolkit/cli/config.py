"""`dstk config`: the DeepSpeed JSON of a recipe or of flags, for DeepSpeed, accelerate or the Trainer, explained."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from toolkit.cli import config_flags
from toolkit.cli.config_job import flag_overrides, is_guess, job_of
from toolkit.dsconfig.job import ConfigJob
from toolkit.dsconfig.launch import Launch, Launcher
from toolkit.dsconfig.options import PLAIN
from toolkit.errors import ConfigError

_FORMAT = click.Choice(["json", "accelerate", "hf-trainer", "all"])
_JSON, _TRAINER, _ACCELERATE = "ds_config.json", "ds_config_auto.json", "accelerate.yaml"


@click.command()
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [SECTION.KEY=VALUE]...")
@click.option("--recipe", metavar="RECIPE", help="The same as the argument.")
@click.option("--format", "kind", type=_FORMAT, default="json", help="See above [json].")
@click.option("--launcher", type=click.Choice(get_args(Launcher)), help="Print the script that starts the job instead.")
@click.option("--script", metavar="TEXT", help="What it starts [train.py, or recipes/train.py with a recipe].")
@click.option("--explain", is_flag=True, help="Print every key, what it does, its default and why it has its value.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write files there.")
@config_flags.trained
@config_flags.added
@config_flags.placed
def command(
    arguments: tuple[str, ...],
    recipe: str | None,
    kind: str,
    launcher: Launcher | None,
    script: str | None,
    explain: bool,
    output: Path | None,
    **flags: Any,
) -> None:
    """Print the DeepSpeed JSON of a recipe, or of a model and a layout.

    With RECIPE it is what a run of the recipe on GPUs (or, with --device cpu, on CPUs) would use; flags override its
    fields. Without one, --model, --layout, --global-batch and --micro say what is needed.

    \b
    Formats: json         every value that matters, written out
             accelerate   the YAML for `accelerate launch --config_file`, which names ds_config.json
             hf-trainer   `auto` where the Trainer's arguments or the model decide
             all          the three of them, into --output DIR

    \b
    Examples:
      dstk config recipes/gpt2/z3.yaml --world-size 8 > ds_config.json
      dstk config --model gpt2-xl --layout dp8-z2 --global-batch 512 --micro 8 --precision bf16 --explain
      dstk config recipes/gpt2/z3.yaml --nodes 2 --gpus-per-node 8 --launcher slurm > job.sbatch
    """
    path, overrides = _split(arguments, recipe)
    job = job_of(path, overrides, flags)
    if is_guess(job, flags):
        ranks = job.layout.world_size
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        click.echo(f"note: for {many}, as neither --world-size nor parallel.dp says how many.", err=True)
    if "optimizer" not in job.config:
        click.echo("note: there is no optimizer section: the program passes its own to deepspeed.initialize.", err=True)
    _refuse_contradictions(kind, launcher, explain=explain, output=output, hosts=flags["hosts"], job=job)
    launch = _launch(job, path, overrides, script, kind, flags)
    if explain:
        from toolkit.cli.config_table import show

        show(_config(job, kind), job)
    elif output is not None:
        _write(output, job, kind, launch, launcher)
    elif launcher is not None:
        click.echo(launch.script(launcher), nl=False)
    elif kind == "accelerate":
        click.echo(_accelerate(launch), nl=False)
    else:
        click.echo(json.dumps(_config(job, kind), indent=2))


def _split(arguments: tuple[str, ...], recipe: str | None) -> tuple[str | None, tuple[str, ...]]:
    """The recipe and its overrides."""
    overrides = tuple(argument for argument in arguments if "=" in argument)
    paths = [argument for argument in arguments if "=" not in argument] + ([recipe] if recipe else [])
    if len(paths) > 1:
        raise click.UsageError(f"{' and '.join(paths)} are {len(paths)} recipes; give one.")
    if overrides and not paths:
        raise click.UsageError(f"{overrides[0]} overrides a recipe, and none is given.")
    return (paths[0] if paths else None), overrides


def _refuse_contradictions(
    kind: str, launcher: str | None, *, explain: bool, output: Path | None, hosts: tuple[str, ...], job: ConfigJob
) -> None:
    if kind == "all" and output is None:
        raise ConfigError("--format all makes several files. Say where with --output DIR.")
    if explain and (output is not None or launcher is not None or kind in ("accelerate", "all")):
        raise ConfigError("--explain prints a table of one JSON. Leave out --output and --launcher, and choose json.")
    if hosts and len(hosts) != job.nodes:
        raise ConfigError(f"{len(hosts)} names of hosts for {job.nodes} nodes. Give --host once for each node.")


def _launch(
    job: ConfigJob, path: str | None, overrides: tuple[str, ...], script: str | None, kind: str, flags: dict[str, Any]
) -> Launch:
    import shlex

    from toolkit.dsconfig.trainer import trainer_arguments

    if script is not None:
        program = shlex.split(script)
    elif kind == "hf-trainer":
        program = ["train.py", "--deepspeed", _TRAINER, *trainer_arguments(job)]
    elif path is not None:
        program = ["recipes/train.py", "--config", path, *overrides, *flag_overrides(flags)]
        if job.config != replace(job, options=PLAIN).config:
            program += ["--deepspeed_config", _JSON]
    elif kind == "accelerate":
        program = ["train.py"]  # Accelerator reads the JSON that the YAML names
    else:
        program = ["train.py", "--deepspeed_config", _JSON]
    return Launch(
        job=job,
        program=program,
        name=flags["run_name"],
        hosts=flags["hosts"],
        port=flags["port"],
        accelerate_config=_ACCELERATE if kind == "accelerate" else None,
    )


def _config(job: ConfigJob, kind: str) -> dict[str, Any]:
    from toolkit.dsconfig.trainer import trainer_config

    return trainer_config(job) if kind == "hf-trainer" else job.config


def _accelerate(launch: Launch) -> str:
    from toolkit.dsconfig.accelerate import accelerate_yaml

    return accelerate_yaml(launch.job, config_file=_JSON, main_address=launch.nodes[0], main_port=launch.port)


def _write(folder: Path, job: ConfigJob, kind: str, launch: Launch, launcher: Launcher | None) -> None:
    files: dict[str, str] = {}
    if kind in ("json", "accelerate", "all"):
        files[_JSON] = json.dumps(job.config, indent=2) + "\n"
    if kind in ("accelerate", "all"):
        files[_ACCELERATE] = _accelerate(launch)
    if kind in ("hf-trainer", "all"):
        files[_TRAINER] = json.dumps(_config(job, "hf-trainer"), indent=2) + "\n"
    if launcher is not None:
        files["job.sbatch" if launcher == "slurm" else "launch.sh"] = launch.script(launcher)
        if launcher == "deepspeed" and job.nodes > 1:
            files["hostfile"] = launch.hostfile()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}). Choose another directory.") from error
    for name in files:
        click.echo(folder / name)
