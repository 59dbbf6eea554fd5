"""The options of `dstk config`, and the ConfigJob that they describe: a recipe with overrides, or options alone."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import ValidationError

from toolkit.cli import Count, FiniteRange
from toolkit.cli.plan.auto_recipe import explicit
from toolkit.config import load_rounded
from toolkit.config.field_errors import explain
from toolkit.config.layout import Layout, Recompute
from toolkit.config.layout_fit import check_layout_fit
from toolkit.config.recipe import OptimizerName, Precision, Recipe, ScheduleName
from toolkit.config.strategy import parse_layout, strategy_text
from toolkit.dsconfig import options as extras
from toolkit.dsconfig.buckets import Buckets, derive, link_of
from toolkit.dsconfig.build import ConfigJob, shape_of
from toolkit.dsconfig.options import PLAIN, REMOVED_OPTIMIZERS, ConfigOptions, check, removed_optimizer
from toolkit.errors import ConfigError, LayoutError, ModelError, RecipeError, spell_setting
from toolkit.hardware import gpu

Flags = dict[str, Any]
"""The values of the options, by their Python names."""
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

OPTIMIZERS = tuple(dict.fromkeys((*get_args(OptimizerName), *get_args(extras.OtherOptimizer), *REMOVED_OPTIMIZERS)))
_POSITIVE = Count()
_FROM_0 = FiniteRange(min=0)
_ABOVE_0 = FiniteRange(min=0, min_open=True)
_FRACTION = FiniteRange(min=0, max=1, max_open=True)
_MONITOR = click.Choice(get_args(extras.MonitorName))
_PORT = Count(min=1024, max=65535)
_DTYPE = click.Choice(["fp32", "bf16", "fp16"])

_OPTIONS: list[Decorator] = [
    # The fields of a recipe.
    click.option("--model", metavar="NAME", help="A known shape (gpt2-xl), or a directory with a config.json."),
    click.option(
        "--layout", metavar="LAYOUT", help="dp8-tp2-z1, for instance, or a name that the recipe lists (8xH100)."
    ),
    click.option("--global-batch", type=_POSITIVE, metavar="N", help="Samples in one optimizer step, over all ranks."),
    click.option("--micro", type=_POSITIVE, metavar="N", help="Samples in one forward pass of a rank."),
    click.option("--precision", type=click.Choice(get_args(Precision)), help="Precision of weights and activations."),
    click.option("--optimizer", type=click.Choice(OPTIMIZERS), metavar="NAME", help=f"{', '.join(OPTIMIZERS[:8])}."),
    click.option("--lr", type=_ABOVE_0, metavar="X", help="Peak learning rate."),
    click.option("--betas", type=(_FRACTION, _FRACTION), metavar="B1 B2", help="Decay rates of the moments."),
    click.option("--weight-decay", type=_FROM_0, metavar="X", help="Weight decay."),
    click.option("--grad-clip", type=_FROM_0, metavar="X", help="Largest gradient norm; 0: no clipping."),
    click.option("--schedule", type=click.Choice(get_args(ScheduleName)), metavar="NAME", help="LR schedule."),
    click.option("--steps", type=_POSITIVE, metavar="N", help="Optimizer steps of the run."),
    click.option("--warmup-steps", type=Count(min=0), metavar="N", help="Steps of linear warm-up."),
    click.option(
        "--recompute",
        type=click.Choice(get_args(Recompute)),
        help="The model's own activation checkpointing; selective: of attention alone, by this toolkit.",
    ),
    click.option(
        "--offload-optimizer", type=click.Choice(["none", "cpu", "nvme"]), help="Where the optimizer states are kept."
    ),
    click.option("--offload-params", type=click.Choice(["none", "cpu", "nvme"]), help="Where parameters are kept."),
    click.option("--nvme-path", metavar="DIR", help="A directory on the NVMe drive of each node."),
    click.option("--hpz", type=_POSITIVE, metavar="N", help="ZeRO++ hpZ: secondary partition over N ranks."),
    click.option("--quantized-weights", is_flag=True, default=None, help="ZeRO++ qwZ: gather parameters in 8 bits."),
    click.option(
        "--quantized-gradients", is_flag=True, default=None, help="ZeRO++ qgZ: send gradients between nodes in 4 bits."
    ),
    # What no recipe has.
    click.option("--grad-accum-dtype", type=_DTYPE, default="fp32", help="Dtype of gradient accumulation [fp32]."),
    click.option("--communication-dtype", type=_DTYPE, default="fp32", help="Dtype of gradient reduction [fp32]."),
    click.option("--activation-checkpointing", is_flag=True, help="DeepSpeed's own, for models that call it."),
    click.option("--cpu-checkpointing", is_flag=True, help="Keep checkpointed activations in host memory."),
    click.option("--scheduler", type=click.Choice(get_args(extras.SchedulerName)), help="DeepSpeed's own schedule."),
    click.option("--monitor", "monitors", type=_MONITOR, multiple=True, help="Where to log."),
    click.option("--log-dir", metavar="DIR", default="logs", help="Directory of TensorBoard and CSV logs [logs]."),
    click.option(
        "--run-name", metavar="NAME", default="run", help="Job or project of a monitor, and of the job [run]."
    ),
    click.option("--profile-step", type=_POSITIVE, metavar="N", help="Let DeepSpeed count FLOPs after N steps."),
    click.option("--wall-clock-breakdown", is_flag=True, help="Let DeepSpeed time the parts of a step."),
    # Machines and ranks.
    click.option("--world-size", type=_POSITIVE, metavar="N", help="Ranks of the job; default: those of the layout."),
    click.option("--nodes", type=_POSITIVE, metavar="N", help="Machines [1]."),
    click.option(
        "--min-nodes", type=_POSITIVE, metavar="N", help="With torchrun: nodes may go and come, down to so many."
    ),
    click.option("--gpus-per-node", type=_POSITIVE, metavar="N", help="Ranks of each machine."),
    click.option("--host", "hosts", multiple=True, metavar="NAME", help="A node's name, one for each [node1 …]."),
    click.option("--gpu", metavar="NAME", help="Size buckets for its links, for instance H100-SXM-80GB."),
    click.option("--network-gbit", type=_ABOVE_0, default=100.0, metavar="X", help="Network of one GPU [100]."),
    click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="Where it runs [cuda]."),
    click.option(
        "--cpus-per-gpu", type=_POSITIVE, default=8, metavar="N", help="CPU cores of a rank, for schedulers [8]."
    ),
    click.option("--image", metavar="IMAGE", help="Container image in which the toolkit is installed."),
    click.option("--volume", metavar="NAME", help="Volume (or its claim) that the containers of all nodes mount."),
    click.option("--port", type=_PORT, default=29501, metavar="N", help="Port of the rendezvous [29501]."),
]


def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add every option."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_FIELDS: dict[str, str] = json.loads(Path(__file__).with_name("config_flags.json").read_text(encoding="utf-8"))
"""The field of a recipe that each flag sets."""
_NEEDED = ("model", "layout", "global_batch", "micro")
_SHORT = {"gradient_dtype": "--grad-accum-dtype"}
_STEPS = 1000
"""Default length of the run: it shows only in a scheduler's JSON."""
_LEARNING_RATE = 3e-4
_SAME_NAMES = (
    "activation_checkpointing",
    "cpu_checkpointing",
    "scheduler",
    "monitors",
    "log_dir",
    "run_name",
    "profile_step",
    "wall_clock_breakdown",
)
"""Flags that are fields of ConfigOptions."""


@dataclass(frozen=True, kw_only=True)
class ConfigQuery:
    """The job that a command line describes, and its flags as the program that starts the job has to give them."""

    job: ConfigJob
    flags: Flags
    """The flags, with a layout that was planned and a global batch that was rounded in their places."""
    is_planned: bool
    """Whether the layout is not the one that the command line names."""


def query_of(recipe: str | None, overrides: tuple[str, ...], flags: Flags) -> ConfigQuery:
    """Build the job that the command line describes. Raises a ToolkitError if it is not possible."""
    world_size = _world_size(flags["world_size"], flags["nodes"], flags["gpus_per_node"])
    chosen: Flags = {}
    if recipe is None:
        loaded = _recipe_from_flags(flags, _layout_fields(flags) | _fields(flags))
    else:
        all_overrides = (*overrides, *flag_overrides(flags))
        rounds = flags["micro"] is not None and flags["global_batch"] is None
        loaded, note = load_rounded(recipe, all_overrides, world_size=world_size, rounds=rounds, layout=flags["layout"])
        if note is not None:  # what starts the run has to say so too
            chosen["global_batch"] = loaded.batch.global_batch_size
            click.echo(f"note: {note}", err=True)
    if loaded.parallel.is_planned:
        loaded = explicit(loaded, world_size, "cpu" if flags["device"] == "cpu" else flags["gpu"])
        chosen["layout"] = strategy_text(loaded.layout(world_size or 1), loaded.batch.micro_batch_size or 1)
    job = _job(loaded, flags, world_size)
    if recipe is None:
        _check_shape(loaded, job.layout)  # as loading a recipe does
    try:
        check(job.options, loaded, job.layout, nodes=job.nodes)
    except ConfigError as error:
        refusals = error.refusals
        raise ConfigError((refusal.render(_spell_option, verb="use") for refusal in refusals), refusals) from None
    is_planned = chosen.get("layout", flags["layout"]) != flags["layout"]
    return ConfigQuery(job=job, flags=flags | chosen, is_planned=is_planned)


def _job(recipe: Recipe, flags: Flags, world_size: int | None) -> ConfigJob:
    """Build the job of a recipe on the ranks that the flags name, or else on those that it needs."""
    if recipe.train.engine != "deepspeed":
        reason = "this engine takes no DeepSpeed config"
        raise ConfigError.of("train.engine", recipe.train.engine, reason, ("train.engine", "deepspeed"))
    nodes = flags["nodes"]
    per_node = flags["gpus_per_node"]
    ranks = world_size or recipe.world_size or recipe.parallel.least_ranks
    layout = recipe.layout(ranks)
    shape = None
    if layout.offload_params == "nvme":
        shape = shape_of(recipe.model.name_or_path, recipe.model.overrides)
    return ConfigJob(
        recipe=recipe,
        layout=layout,
        batch=recipe.resolve_batch(layout),
        shape=shape,
        nodes=nodes or (ranks // per_node if per_node and ranks % per_node == 0 else 1),
        device=flags["device"],
        options=_options(flags, recipe, layout, gpus_per_node=per_node or ranks // (nodes or 1)),
    )


def _check_shape(recipe: Recipe, layout: Layout) -> None:
    """Raise LayoutError where the model, if it is known here, cannot be split as the layout says."""
    try:
        shape = shape_of(recipe.model.name_or_path, recipe.model.overrides)
    except ModelError:
        return  # the config needs its width at most, and says so itself
    check_layout_fit(shape, layout)


def _spell_option(field: str, value: Any) -> str:
    """A setting as this command spells it: by its option, or as a part of the layout."""
    if field not in vars(PLAIN) and field not in _FIELDS:
        return spell_setting(field, value)
    option = _SHORT.get(field, f"--{field}".replace("_", "-"))
    return f"no {option}" if value is None else spell_setting(option, value)


def flag_overrides(flags: Flags) -> list[str]:
    """Return the flags that set fields of a recipe, as overrides."""
    return [f"{name}={json.dumps(value)}" for name, value in _fields(flags).items()]


def is_guess(job: ConfigJob, flags: Flags) -> bool:
    """Return whether the number of ranks was not given."""
    return not (flags["world_size"] or (flags["nodes"] and flags["gpus_per_node"]) or job.recipe.world_size)


def _world_size(world_size: int | None, nodes: int | None, per_node: int | None) -> int | None:
    ranks = nodes * per_node if nodes and per_node else None
    if world_size and ranks and world_size != ranks:
        reason = f"{nodes} nodes of {per_node} GPUs are {ranks} ranks"
        raise LayoutError.of("--world-size", world_size, reason, "omit one of them")
    return world_size or ranks


def _fields(flags: Flags) -> dict[str, Any]:
    values = {name: flags[name] for name in _FIELDS if flags[name] is not None}
    if values.get("optimizer") in REMOVED_OPTIMIZERS:
        raise removed_optimizer(values["optimizer"])
    if _other_optimizer(flags):
        values.pop("optimizer")
    return {_FIELDS[name]: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _layout_fields(flags: Flags) -> dict[str, Any]:
    """Return the fields that --layout sets where there is no recipe; a missing one is reported later."""
    if flags["layout"] is None:
        return {}
    layout = parse_layout(flags["layout"])
    values = {f"parallel.{field.name}": getattr(layout, field.name) for field in fields(layout)}
    if re.search(r"(^|-)dp", flags["layout"]) is None:
        values["parallel.dp"] = None  # as many as the ranks give
    return values


def _recipe_from_flags(flags: Flags, fields: dict[str, Any]) -> Recipe:
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED if flags[name] is None]
    if missing:
        raise ConfigError(f"without a recipe, {' and '.join(missing)} must be given. Or name a recipe.")
    # What no flag decides: neither data nor length shows in the config, unless a scheduler is requested.
    document: dict[str, Any] = {
        "data": {"seq_len": 1},
        "optimizer": {"lr": _LEARNING_RATE},
        "schedule": {"name": "constant"},
        "train": {"steps": _STEPS},
    }
    for path, value in fields.items():
        section, _, name = path.partition(".")
        if value is not None and name:
            document.setdefault(section, {})[name] = value
        elif value is not None:
            document[section] = value
    try:
        return Recipe.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise RecipeError(explain(problem, {})[1] for problem in error.errors()) from None


def _other_optimizer(flags: Flags) -> str | None:
    name: str | None = flags["optimizer"]
    return name if name in get_args(extras.OtherOptimizer) else None


def _options(flags: Flags, recipe: Recipe, layout: Layout, *, gpus_per_node: int) -> ConfigOptions:
    """Return the options. Only bucket sizes for a link follow from the shape of the model."""
    buckets: Buckets | None = None
    if flags["gpu"] is not None:
        network = flags["network_gbit"] * 1e9 / 8
        link = link_of(gpu(flags["gpu"]), layout, gpus_per_node=gpus_per_node, network_bytes_per_second=network)
        shape = shape_of(recipe.model.name_or_path, recipe.model.overrides)
        gradient_bytes = 4 if flags["communication_dtype"] == "fp32" else 2
        parameter_bytes = 4 if recipe.precision == "fp32" else 2
        buckets = derive(shape, layout, link, gradient_bytes=gradient_bytes, parameter_bytes=parameter_bytes)
    return ConfigOptions(
        buckets=buckets,
        gradient_dtype=flags["grad_accum_dtype"],
        communication_dtype=flags["communication_dtype"],
        optimizer=_other_optimizer(flags),  # type: ignore[arg-type]
        **{name: flags[name] for name in _SAME_NAMES},
    )
