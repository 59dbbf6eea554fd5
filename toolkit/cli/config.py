"""`dstk config`: the DeepSpeed JSON of a recipe or of flags, for DeepSpeed, accelerate or the Trainer, explained."""

import glob
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from toolkit.cli import guess_note
from toolkit.cli.config_options import add_options, flag_overrides, is_guess, query_of
from toolkit.config.gallery import find_recipe
from toolkit.config.recipe import Recipe
from toolkit.dsconfig.build import ConfigJob
from toolkit.dsconfig.container_launch import RECIPE, ContainerLaunch
from toolkit.dsconfig.kubernetes import jobset
from toolkit.dsconfig.launch_scripts import TRAIN, Launch, LaunchFile, beside
from toolkit.dsconfig.options import PLAIN
from toolkit.dsconfig.skypilot import task
from toolkit.errors import ConfigError
from toolkit.hardware import variant_note
from toolkit.models.shape import find_name

_FORMAT = click.Choice(["json", "accelerate", "hf-trainer", "all"])
_JSON = "ds_config.json"
_TRAINER = "ds_config_auto.json"
_YAML = "accelerate.yaml"
_PREPARED = "ds_config_accelerate.json"
_LAUNCH_FILES = {"slurm": "job.sbatch", "hostfile": "hostfile", "k8s": "jobset.yaml", "skypilot": "task.yaml"}
"""Names of what starts a job, where it is not launch.sh."""
_CONTAINERS = {"k8s": jobset, "skypilot": task}


@click.command()
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [SECTION.KEY=VALUE]...")
@click.option("--recipe", metavar="RECIPE", help="The same as the argument.")
@click.option("--format", "kind", type=_FORMAT, default="json", help="See above [json].")
@click.option("--launcher", type=click.Choice(get_args(LaunchFile)), help="Print the file that starts the job instead.")
@click.option("--script", metavar="TEXT", help="Script that it starts [recipes/train.py; without a recipe train.py].")
@click.option("--explain", is_flag=True, help="Print every key, what it does, its default and why it has its value.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write files there.")
@add_options
def command(
    arguments: tuple[str, ...],
    recipe: str | None,
    kind: str,
    launcher: LaunchFile | None,
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
             accelerate   the YAML for `accelerate launch --config_file`, and the JSON that it names
             hf-trainer   `auto` where the Trainer's arguments or the model decide
             all          all of them, into --output DIR

    \b
    Examples:
      dstk config gpt2-xl-pretrain --layout 8xH100 > ds_config.json
      dstk config --model gpt2-xl --layout dp8-z2 --global-batch 512 --micro 8 --precision bf16 --explain
      dstk config gpt2-xl-pretrain --layout z3 --nodes 2 --gpus-per-node 8 --launcher slurm > job.sbatch
      dstk config gpt2-xl-pretrain parallel=auto --nodes 4 --min-nodes 1 --gpus-per-node 8 --launcher torchrun
    """
    path, overrides = _split(arguments, recipe)
    path = path and str(find_recipe(path))
    query = query_of(path, overrides, flags)
    job = query.job
    flags = query.flags
    is_elastic = flags["min_nodes"] is not None
    if is_elastic:
        job = replace(job, options=replace(job.options, buckets=None))  # those of one layout
        _check_elastic(flags["min_nodes"], launcher, script, job, is_planned=query.is_planned)
    elif query.is_planned:
        overrides = _without_layout(overrides)
    _check_flags(kind, launcher, explain=explain, output=output, hosts=flags["hosts"], job=job)
    settings: list[str] = []
    train: list[str] = []
    if path is not None:
        layout = ["--layout", flags["layout"]] if flags["layout"] and not is_elastic else []
        settings = [*layout, *overrides, *flag_overrides(flags)]
        train = _train_command(job, path, settings, output)
        if is_elastic:
            train += ["--resume", "auto"]
            train += [] if job.recipe.run_dir else [f"run_dir=runs/{flags['run_name']}"]
    launch = _launch(job, _program(job, script, kind, train), kind, flags, output)
    launch_text = None
    if launcher is not None:
        launch_text = _launch_file(launcher, launch, path, script, settings, flags)
    if explain:
        _print_table(_config(job, kind), job)
    elif output is not None:
        _write(output, _files(job, path, kind, launch, launcher, launch_text))
    elif launch_text is not None:
        _print_launch_file(launch_text)
    elif kind == "accelerate":
        click.echo(launch.accelerate_yaml(_PREPARED), nl=False)
    else:
        click.echo(json.dumps(_config(job, kind), indent=2))
    guess = guess_note(job.layout.world_size) if is_guess(job, flags) else None
    for note in filter(None, (guess, variant_note(flags["gpu"]))):
        click.echo(f"note: {note}", err=True)


def _without_layout(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return the overrides that do not replace what was planned."""
    return tuple(override for override in overrides if not re.match(r"parallel\b|batch\.micro_batch_size=", override))


def _train_command(job: ConfigJob, path: str, settings: list[str], output: Path | None) -> list[str]:
    """Return the words that start this toolkit's program with a recipe, a layout and overrides.

    With an `output` directory the recipe is copied there, beside the script.
    """
    recipe = os.path.abspath(path) if output is None else beside(Path(path).name)
    return [*TRAIN, "--config", recipe, *settings, *_located_data(job.recipe)]


def _print_launch_file(text: str) -> None:
    """Print what starts the job, and name the files that it needs."""
    click.echo(text, nl=False)
    names = set(re.findall(r'"\$here"/(\S+\.(?:json|yaml))', text))
    if names:
        files = " and ".join(sorted(names))
        click.echo(f"note: it reads {files} beside itself; --output DIR writes script and files.", err=True)


def _split(arguments: tuple[str, ...], recipe: str | None) -> tuple[str | None, tuple[str, ...]]:
    overrides = tuple(argument for argument in arguments if "=" in argument)
    paths = [argument for argument in arguments if "=" not in argument] + ([recipe] if recipe else [])
    if len(paths) > 1:
        raise click.UsageError(f"{' and '.join(paths)} are {len(paths)} recipes; give one.")
    if overrides and not paths:
        raise click.UsageError(f"{overrides[0]} overrides a recipe, and none is given.")
    return (paths[0] if paths else None), overrides


def _check_flags(
    kind: str, launcher: str | None, *, explain: bool, output: Path | None, hosts: tuple[str, ...], job: ConfigJob
) -> None:
    if kind == "all" and output is None:
        raise ConfigError.of("--format", "all", "it writes several files", "give a directory with --output DIR")
    if explain and (output is not None or launcher is not None or kind in ("accelerate", "all")):
        advice = "omit --output and --launcher, and choose json"
        raise ConfigError.of("--explain", True, "it prints a table of one JSON", advice)
    if hosts and len(hosts) != job.nodes:
        reason = f"{len(hosts)} host names for {job.nodes} nodes"
        raise ConfigError.of("--host", " ".join(hosts), reason, "give --host once for each node")


def _check_elastic(
    min_nodes: int, launcher: str | None, script: str | None, job: ConfigJob, *, is_planned: bool
) -> None:
    """Raise ConfigError where a launch whose nodes go and come cannot plan a layout for those that are there."""
    if launcher != "torchrun" or script is not None:
        reason = "only torchrun starts this toolkit's program again with other nodes"
        raise ConfigError.of("--min-nodes", min_nodes, reason, "give --launcher torchrun, and no --script")
    if min_nodes > job.nodes:
        reason = f"there are {job.nodes} nodes at most"
        raise ConfigError.of("--min-nodes", min_nodes, reason, f"give {job.nodes} or less, or more --nodes")
    if not is_planned:
        reason = "each number of nodes needs a layout of its own"
        raise ConfigError.of("--min-nodes", min_nodes, reason, "add parallel=auto, and omit --layout")
    if _changes_json(job):
        reason = "flags that no recipe has need a JSON, which is that of one layout"
        raise ConfigError.of("--min-nodes", min_nodes, reason, "omit them")


def _program(job: ConfigJob, script: str | None, kind: str, train: list[str]) -> list[str]:
    """Return what the script starts, with every file by a name that holds in any directory.

    `train` is the command of this toolkit's own program; empty without a recipe.
    """
    from toolkit.dsconfig.trainer import trainer_arguments

    if script is not None:
        try:
            return [_located(word) for word in shlex.split(script)]
        except ValueError as error:
            raise click.UsageError(f"--script {script}: {error}. Quote it as for a shell.") from None
    default = _located("train.py") if Path("train.py").is_file() else beside("train.py")
    if kind == "hf-trainer":
        return [default, "--deepspeed", beside(_TRAINER), *trainer_arguments(job)]
    # Under accelerate both programs read the JSON that the YAML names.
    named = kind != "accelerate" and (_changes_json(job) or not train)
    program = train or [default]
    return [*program, "--deepspeed_config", beside(_JSON)] if named else program


def _changes_json(job: ConfigJob) -> bool:
    """Return whether options that no recipe has change the JSON."""
    return replace(job.options, run_name=PLAIN.run_name, log_dir=PLAIN.log_dir) != PLAIN


def _launch_file(
    launcher: LaunchFile,
    launch: Launch,
    path: str | None,
    script: str | None,
    settings: list[str],
    flags: dict[str, Any],
) -> str:
    """Return the text of what starts the job. `settings`: the layout and the overrides of its recipe."""
    if launcher == "hostfile":
        return launch.hostfile()
    if launcher != "k8s" and launcher != "skypilot":
        return launch.script(launcher)
    if path is None or script is not None:
        raise ConfigError(f"--launcher {launcher} without a recipe: its containers run `dstk train`. Name a recipe.")
    missing = [option for option in ("image", "volume") if flags[option] is None]
    if missing:
        needed = " and ".join(f"--{option}" for option in missing)
        raise ConfigError(f"--launcher {launcher} without {needed}: an image with the toolkit and a volume. Add them.")
    job = launch.job
    files = {RECIPE: Path(path).read_text(encoding="utf-8")}
    if _changes_json(job):
        files[_JSON] = json.dumps(job.config, indent=2) + "\n"
    container = ContainerLaunch(
        job=job,
        name=launch.name,
        image=flags["image"],
        volume=flags["volume"],
        files=files,
        arguments=settings,
        deepspeed_config=_JSON if _JSON in files else None,
        gpu=flags["gpu"],
        cpus_per_gpu=launch.cpus_per_gpu,
        port=launch.port,
    )
    return _CONTAINERS[launcher](container)


def _located(word: str) -> str:
    path = Path(word)
    return os.path.abspath(path) if path.suffix and path.is_file() else word


def _located_data(recipe: Recipe) -> list[str]:
    """Return overrides that make the paths of a recipe absolute: its run may start in any directory."""
    names = {
        "model.name_or_path": recipe.model.name_or_path,
        "data.source": recipe.data.source,
        "data.tokenizer": recipe.data.tokenizer,
    }
    paths = {field: _located_name(name) for field, name in names.items()}
    changed: dict[str, Any] = {field: path for field, path in paths.items() if path != names[field]}
    for field in ("sources", "validation"):
        texts = [text.model_dump(mode="json", exclude_none=True) for text in getattr(recipe.data, field) or ()]
        located = [text | {"path": _located_name(text["path"])} for text in texts]
        if located != texts:
            changed[f"data.{field}"] = located
    return [f"{field}={json.dumps(value)}" for field, value in changed.items()]


def _located_name(value: str) -> str:
    """Make a path absolute; a name that is not a path here stays as it is."""
    if Path(value).is_absolute() or value in ("stdlib", "markov") or find_name(value):
        return value
    is_here = Path(value).exists() or glob.has_magic(value)
    return os.path.abspath(os.path.expanduser(value)) if is_here else value


def _launch(job: ConfigJob, program: list[str], kind: str, flags: dict[str, Any], output: Path | None) -> Launch:
    activate = Path(sys.prefix, "bin", "activate")
    return Launch(
        job=job,
        program=program,
        folder=os.path.abspath(output or "."),
        accelerate_files=(_YAML, _PREPARED) if kind in ("accelerate", "all") else None,
        name=flags["run_name"],
        hosts=flags["hosts"],
        port=flags["port"],
        min_nodes=flags["min_nodes"],
        cpus_per_gpu=flags["cpus_per_gpu"],
        activate=str(activate) if activate.is_file() else None,
    )


def _config(job: ConfigJob, kind: str) -> dict[str, Any]:
    from toolkit.dsconfig.trainer import trainer_config

    if kind == "hf-trainer":
        return trainer_config(job)
    for note in _notes(job):
        click.echo(f"note: {note}", err=True)
    return job.config


def _notes(job: ConfigJob) -> Iterator[str]:
    precision = job.recipe.precision
    if "optimizer" not in job.config:
        yield "there is no optimizer section: the program passes its own to deepspeed.initialize."
    if job.options.optimizer == "muon" and job.layout.zero_stage and job.recipe.train.grad_clip:
        yield "gradient_clipping is 0: under ZeRO, DeepSpeed would clip Muon's updates instead of the gradient."
    if job.config.get("communication_data_type") == "fp32" and precision != "fp32":
        yield f"fp32 doubles the bytes of the gradients' reduction; --communication-dtype {precision} halves them."
    if "aio" in job.config:
        yield f"ds_nvme_tune --nvme_dir {job.recipe.parallel.nvme_path} measures the aio values that suit this drive."


def _files(
    job: ConfigJob,
    path: str | None,
    kind: str,
    launch: Launch,
    launcher: LaunchFile | None,
    launch_text: str | None,
) -> dict[str, str]:
    """Return the text of every file of the job, by name."""
    from toolkit.dsconfig.trainer import accelerate_config

    files: dict[str, str] = {}
    if kind in ("json", "all"):
        files[_JSON] = json.dumps(_config(job, kind), indent=2) + "\n"
    if kind in ("accelerate", "all"):
        files[_YAML] = launch.accelerate_yaml(os.path.join(launch.folder, _PREPARED))
        files[_PREPARED] = json.dumps(accelerate_config(job), indent=2) + "\n"
    if kind in ("hf-trainer", "all"):
        files[_TRAINER] = json.dumps(_config(job, "hf-trainer"), indent=2) + "\n"
    if launcher is None or launch_text is None:
        return files
    files[_LAUNCH_FILES.get(launcher, "launch.sh")] = launch_text
    if launcher == "deepspeed" and job.nodes > 1:
        files["hostfile"] = launch.hostfile()
    if launcher not in _CONTAINERS and path is not None:
        recipe = Path(path).name
        is_read = beside(recipe) in launch.program
        if is_read and recipe in files:
            raise ConfigError(f"{path}: a file of this name is written beside its copy. Rename the recipe.")
        if is_read and os.path.abspath(path) != os.path.join(launch.folder, recipe):
            files[recipe] = Path(path).read_text(encoding="utf-8")
    return files


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write files into a directory, scripts as executables, and print their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                (folder / name).chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}). Choose another directory.") from error
    for name in files:
        click.echo(folder / name)


def _print_table(config: dict[str, Any], job: ConfigJob) -> None:
    """Print every key, its value, DeepSpeed's default, what it does and why it has its value."""
    from rich.table import Table
    from rich.text import Text

    from toolkit.dsconfig.explain import explain
    from toolkit.report.terminal import table_console

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, style in (("key", ""), ("value", ""), ("default", "dim")):
        table.add_column(name, overflow="fold", style=style)
    table.add_column("what it does, and why it has this value", overflow="fold", ratio=1)
    for row in explain(config, job):
        is_default = row.value == row.default and isinstance(row.value, bool) == isinstance(row.default, bool)
        value = Text(_shown(row.value), style="" if is_default else "bold")
        reason = f"{row.why[0].upper()}{row.why[1:]}."
        description = Text(f"{row.purpose} ").append(reason, style="cyan")
        table.add_row(row.path, value, _shown(row.default), description)
    console = table_console()
    console.print(table)
    note = "defaults of DeepSpeed 0.19.8; bold where they differ."
    console.print(f"\n{job.recipe.model.name_or_path}, {job.layout}, {note}", soft_wrap=True)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value)
