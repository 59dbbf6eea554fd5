"""`dstk train`: start the ranks of this machine on recipes/train.py."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click

from toolkit.checkpoint.names import step_of
from toolkit.cli import LOCAL_RANKS, Count
from toolkit.cli.json_output import stdout_is_json
from toolkit.config import load_recipe
from toolkit.config.gallery import find_recipes
from toolkit.config.recipe import Recipe
from toolkit.errors import RecipeError
from toolkit.files import expanded
from toolkit.launch.spawn import AUTO, Machine, Restart, run_local_ranks, run_with_restarts
from toolkit.remote_files import is_url
from toolkit.training.arguments import run_name, unused_run_directory
from toolkit.training.preload import preload_training

_MAX_RANKS_PER_NODE = 8
"""GPUs of a usual node, at most."""


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option(
    "--layout", help="A layout that the recipe lists (8xH100), or any (dp8-z3-recompute); without --nproc its ranks."
)
@click.option(
    "--nproc",
    type=LOCAL_RANKS,
    help="Ranks on this machine.  [default: 1, or the layout's, or with parallel: auto the GPUs]",
)
@click.option("--deepspeed-config", metavar="JSON", help="DeepSpeed settings that the recipe does not decide.")
@click.option("--trust-remote-code", is_flag=True, help="Run the Python code that a model directory brings.")
@click.option("--overwrite", is_flag=True, help="Replace the run in run_dir.")
@click.option(
    "--resume", metavar="auto|PATH", help="Resume from a run or a checkpoint; auto: from run_dir, if it has one."
)
@click.option("--strict", is_flag=True, help="Fail on a damaged newest checkpoint, instead of taking the one before.")
@click.option("--nnodes", type=Count(max=65536), default=1, metavar="N", help="Machines; each runs this command.")
@click.option("--node-rank", type=Count(min=0), metavar="K", help="Number of this machine, from 0.")
@click.option("--master-addr", metavar="HOST", help="Machine 0, by a name or address that all machines reach.")
@click.option(
    "--master-port",
    type=Count(min=1024, max=65535),
    default=29501,
    help="Port of machine 0 for the rendezvous [29501].",
)
@click.option("--restarts", type=Count(min=0), default=0, metavar="N", help="Restart at most N times after crashes.")
@click.option("--rehearse", is_flag=True, help="Train nothing: run a step of each kind of rank without memory, here.")
@click.option(
    "--rehearse-layers",
    "layers",
    type=Count(min=1),
    metavar="N",
    help="With --rehearse: N decoder layers for each pipeline stage, seconds instead of minutes.",
)
@click.option("--json", "as_json", is_flag=True, help="With --rehearse: print the result as JSON.")
@stdout_is_json(lambda options: bool(options["as_json"] and options["rehearse"]))
def command(
    recipe: str,
    overrides: tuple[str, ...],
    layout: str | None,
    nproc: int | None,
    deepspeed_config: str | None,
    trust_remote_code: bool,
    overwrite: bool,
    resume: str | None,
    strict: bool,
    nnodes: int,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int,
    restarts: int,
    rehearse: bool,
    layers: int | None,
    as_json: bool,
) -> int:
    """Train RECIPE, a file or a name of the gallery (dstk ls), on this machine's ranks.

    With --nnodes each machine runs this command with its --node-rank, and --nproc ranks.

    With --restarts, a rank that dies of a signal or an unexpected error ends the others, and all restart from the
    newest complete checkpoint. Bad input (exit code 2) and a request to stop (75) end the run.

    \b
    dstk train recipes/demo.yaml --nproc 2
    dstk train recipes/demo.yaml --nproc 2 parallel.zero_stage=3 train.steps=50
    dstk train gpt2-pretrain --layout 8xH100
    dstk train recipes/demo.yaml --nproc 4 --resume auto --restarts 3 checkpoint.every=100
    dstk train gpt2-pretrain --layout z3 --nproc 8 --nnodes 2 --node-rank 0 --master-addr node1
    dstk train llama-3.1-405b-pretrain --layout 1024xH100 --rehearse
    dstk train llama-3.1-405b-pretrain --layout 1024xH100 --rehearse --rehearse-layers 2
    """
    if rehearse:
        _refuse_beside_rehearsal(
            {
                "--deepspeed-config": deepspeed_config,
                "--trust-remote-code": trust_remote_code,
                "--overwrite": overwrite,
                "--resume": resume,
                "--strict": strict,
                "--restarts": restarts,
            }
        )
        from toolkit.cli.rehearse import rehearse_layout  # and with it torch

        return rehearse_layout(recipe, overrides, layout, nproc, layers=layers, as_json=as_json)
    _refuse_without_rehearsal(layers=layers, as_json=as_json)
    if strict and resume is None and not restarts:
        raise click.UsageError("--strict without --resume: no checkpoint is read. Remove it.")
    machine = _machine(nnodes, node_rank, master_addr, master_port)
    if machine is not None and (restarts or nproc is None):
        wrong = "--restarts" if restarts else "no --nproc"
        raise click.UsageError(
            f"--nnodes {nnodes} with {wrong}: say --nproc, and leave restarts to what starts machines."
        )
    # Report a mistake in the recipe now, not after the seconds in which N ranks import torch.
    if nproc is None:
        nproc = _ranks_here(recipe, overrides) if layout is None else _ranks_of(recipe, overrides, layout)
    decoded = load_recipe(recipe, overrides, world_size=nproc * nnodes, layout=layout)
    if resume == AUTO and decoded.run_dir is None and decoded.checkpoint.url is None:
        raise click.UsageError("--resume auto without a run_dir: nothing says which run. Set run_dir=….")
    arguments = _script_arguments(recipe, overrides, layout, deepspeed_config)
    if trust_remote_code:
        arguments.append("--trust-remote-code")
    if strict:
        arguments.append("--strict")
    script = find_recipes() / "train.py"
    preload = partial(preload_training, decoded)
    if restarts:
        run_dir = _run_directory(decoded, recipe, resume)
        url = decoded.checkpoint.url
        again = Restart(run_dir=run_dir, arguments=arguments, resume=resume, overwrite=overwrite, url=url)
        return run_with_restarts(script, again.arguments, nproc, restarts, preload=preload)
    if overwrite:
        arguments.append("--overwrite")
    if resume:
        arguments += ["--resume", resume]
    return run_local_ranks(script, arguments, nproc, preload=preload, machine=machine)


def _script_arguments(
    recipe: str, overrides: tuple[str, ...], layout: str | None, deepspeed_config: str | None
) -> list[str]:
    """Return the arguments of recipes/train.py that say what is trained."""
    arguments = ["--config", recipe]
    if layout is not None:
        arguments += ["--layout", layout]
    arguments += overrides
    if deepspeed_config is not None:
        arguments += ["--deepspeed_config", deepspeed_config]
    return arguments


def _refuse_without_rehearsal(*, layers: int | None, as_json: bool) -> None:
    """Raise UsageError for an option that only a rehearsal has."""
    if layers is not None:
        raise click.UsageError("--rehearse-layers without --rehearse: a run trains the whole model. Add --rehearse.")
    if as_json:
        raise click.UsageError("--json without --rehearse: a run prints its progress. Remove it.")


def _machine(nnodes: int, node_rank: int | None, master_addr: str | None, master_port: int) -> Machine | None:
    """This machine of several; None where there is one."""
    if nnodes == 1:
        if node_rank or master_addr:
            raise click.UsageError("--node-rank and --master-addr need --nnodes: the number of machines. Add it.")
        return None
    if node_rank is None or master_addr is None:
        raise click.UsageError(f"--nnodes {nnodes} needs --node-rank and --master-addr. Add them.")
    if node_rank >= nnodes:
        raise click.UsageError(f"--node-rank {node_rank} of {nnodes} machines: they count from 0 to {nnodes - 1}.")
    return Machine(number=node_rank, machines=nnodes, master_addr=master_addr, master_port=master_port)


def _refuse_beside_rehearsal(options: Mapping[str, object]) -> None:
    """Raise UsageError for an option of a run that is there."""
    for name, value in options.items():
        if value:
            raise click.UsageError(f"{name} with --rehearse: a rehearsal trains nothing and writes nothing. Remove it.")


def _ranks_here(recipe: str, overrides: tuple[str, ...]) -> int:
    """The ranks to start here: 1, or for a recipe that is planned the number of GPUs that this process may use."""
    if not load_recipe(recipe, overrides).parallel.auto or os.environ.get("DS_ACCELERATOR") == "cpu":
        return 1
    from toolkit.doctor.collect import ask

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([device for device in visible.split(",") if device.strip() not in ("", "-1")]))
    listed = ask(("nvidia-smi", "--list-gpus"), os.environ, 20).text.splitlines()
    return max(1, sum(line.startswith("GPU ") for line in listed))


def _ranks_of(recipe: str, overrides: tuple[str, ...], layout: str) -> int:
    """The ranks of a layout, which must be those of one machine; 1 replica where it does not say how many."""
    decoded = load_recipe(recipe, overrides, layout=layout)
    ranks = decoded.world_size or decoded.parallel.least_ranks
    if ranks > _MAX_RANKS_PER_NODE:
        reason = f"it has {ranks} ranks, and this command starts those of one machine"
        advice = f"start all with `dstk config {recipe} --layout {layout} --nodes … --gpus-per-node 8 --launcher slurm`"
        raise RecipeError.of("--layout", layout, reason, advice, f"say --nproc {ranks} if they are here")
    return ranks


def _run_directory(decoded: Recipe, recipe: str, resume: str | None) -> Path:
    """The directory of this run and all its restarts, chosen once."""
    if decoded.run_dir is not None:
        return expanded(decoded.run_dir)
    if resume not in (None, AUTO) and not is_url(resume):
        path = expanded(resume)
        return path.parent if step_of(path.resolve().name) is not None else path
    return unused_run_directory(run_name(recipe))
