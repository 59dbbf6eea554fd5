"""`dstk plan --write DIR`: the first choice as a recipe, DeepSpeed's and accelerate's configs, and launch scripts."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from toolkit.config import dump_recipe, load_recipe
from toolkit.config.recipe import Recipe
from toolkit.dsconfig.build import ConfigJob
from toolkit.dsconfig.launch_scripts import TRAIN, Launch, beside
from toolkit.dsconfig.trainer import accelerate_config
from toolkit.errors import ConfigError, RecipeError
from toolkit.files import expanded, published
from toolkit.planner.calibration.file import CPU
from toolkit.planner.request import Plan, PlanRequest
from toolkit.units import three_digits

_JSON = "ds_config.json"
_YAML = "accelerate.yaml"
_PREPARED = "ds_config_accelerate.json"
_SCRIPTS: dict[Literal["deepspeed", "torchrun", "accelerate", "slurm"], str] = {
    "deepspeed": "launch-deepspeed.sh",
    "torchrun": "launch-torchrun.sh",
    "accelerate": "launch-accelerate.sh",
    "slurm": "job.sbatch",
}
_FILES = ("recipe.yaml", "hostfile", _JSON, _YAML, _PREPARED, *_SCRIPTS.values())
_STEPS = 1000
_LEARNING_RATE = 3e-4
_ENTRIES = 4096
_GPUS_PER_TRAY = 4
"""GPUs of a host where one link joins the GPUs of several hosts: GB200 NVL72 has 4 GPUs a host."""


def check_write(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is not written, and for files that would be replaced: before the search."""
    for name, allowed in (("why", (None,)), ("framework", ("toolkit",)), ("precision", ("bf16", "fp16", "fp32"))):
        if options[name] not in allowed:
            reason = "what the toolkit trains is written" if name != "why" else "it compares, and chooses nothing"
            raise ConfigError.of(f"--{name}", options[name], reason, f"leave --{name} or --write out")
    folder = expanded(options["write"])
    try:
        present = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise _unusable(folder, error) from None
    replaced = [name for name in _FILES if name in present]
    if replaced and not options["overwrite"]:
        raise ConfigError.of("--write", options["write"], f"it has {replaced[0]}", "name another", "add --overwrite")


def write_plan(request: PlanRequest, plan: Plan, folder: Path) -> list[Path]:
    """Write the files of a plan into a folder, all or none; return their paths."""
    files = _files(request, plan, Path(os.path.abspath(folder)))
    try:
        if not folder.exists():
            with published(folder) as made:
                _fill(made, files)
        else:
            with published(folder / ".plan", replaces=True) as made:
                _fill(made, files)
            for name in _FILES:
                if name in files:
                    (folder / ".plan" / name).replace(folder / name)
                else:
                    (folder / name).unlink(missing_ok=True)
            (folder / ".plan").rmdir()
    except OSError as error:
        raise _unusable(folder, error) from None
    return [folder / name for name in files]


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder}: cannot be written ({error.strerror or error}). Choose another directory.")


def _fill(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            (folder / name).chmod(0o755)
    try:
        load_recipe(folder / "recipe.yaml")
    except RecipeError as error:  # what training would refuse
        raise RecipeError(problem.replace(f"{folder}{os.sep}", "") for problem in error.problems) from None


def _files(request: PlanRequest, plan: Plan, folder: Path) -> dict[str, str]:
    """The text of every file."""
    recipe = _recipe(request, plan)
    layout = plan.layout
    on_cpus = request.gpu.name == CPU
    gpus_per_host = request.cluster.gpus_per_node
    if gpus_per_host > 8 and not on_cpus:
        gpus_per_host = _GPUS_PER_TRAY
    job = ConfigJob(
        recipe=recipe,
        layout=layout,
        batch=plan.batch,
        shape=request.model.shape,
        nodes=layout.world_size // math.gcd(layout.world_size, gpus_per_host),
        device="cpu" if on_cpus else "cuda",
    )
    activate = Path(sys.prefix, "bin", "activate")
    launch = Launch(
        job=job,
        program=[*TRAIN, "--config", beside("recipe.yaml")],
        folder=str(folder),
        name="planned",
        activate=str(activate) if activate.is_file() else None,
        accelerate_files=(_YAML, _PREPARED),
    )
    files = {"recipe.yaml": _head(request, plan, job.nodes) + dump_recipe(recipe, defaults=False)}
    files[_JSON] = json.dumps(job.config, indent=2) + "\n"
    launchers = dict(_SCRIPTS)
    if layout.pp > 1:
        del launchers["accelerate"]  # it has no pipelines
    else:
        files[_YAML] = launch.accelerate_yaml(str(folder / _PREPARED))
        files[_PREPARED] = json.dumps(accelerate_config(job), indent=2) + "\n"
    if job.nodes > 1:
        files["hostfile"] = launch.hostfile()
    return files | {name: launch.script(launcher) for launcher, name in launchers.items()}


def _recipe(request: PlanRequest, plan: Plan) -> Recipe:
    """Return a recipe that trains the plan at once; its text, learning rate and length are to be replaced."""
    recipe = request.recipe(plan.layout, plan.batch)
    path = expanded(request.name)
    name = str(path.resolve().parent if path.is_file() else path.resolve()) if path.exists() else request.name
    positions = request.model.raised_positions(request.seq_len)
    overrides = {} if positions is None else {"max_position_embeddings": positions}
    return recipe.changed(
        {
            "model": {"name_or_path": name, "attn_implementation": "auto", "overrides": overrides},
            "data": {"tokenizer": f"bpe-{min(_ENTRIES, request.model.shape.vocab)}"},
            "optimizer": {"lr": _LEARNING_RATE},
            "train": {"steps": _STEPS},
        }
    )


def _head(request: PlanRequest, plan: Plan, nodes: int) -> str:
    start = f"dstk train recipe.yaml --nproc {plan.layout.world_size}" if nodes == 1 else "sbatch job.sbatch"
    step = f"{three_digits(plan.step.seconds)} s a step, {plan.step.tokens_per_second_per_gpu:,.0f} tokens/s of a GPU"
    return (
        f"# {start}\n#\n"
        f"# Planned for {plan.layout.world_size} x {request.gpu.name}: {plan.strategy}. Predicted: {step}.\n"
        "# Name your text in data.source, and its tokenizer: as it is, it learns the source code of Python's library.\n"
    )
