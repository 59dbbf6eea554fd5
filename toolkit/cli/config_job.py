"""From the flags of `dstk config` to a ConfigJob: a recipe with overrides, or a recipe made of flags alone."""

import json
import re
from typing import Any

from pydantic import ValidationError

from toolkit import recipe_file
from toolkit.dsconfig.buckets import Buckets, derive, largest_partition, link_of
from toolkit.dsconfig.job import ConfigJob
from toolkit.dsconfig.options import REMOVED_OPTIMIZERS, ConfigOptions, removed_optimizer
from toolkit.errors import ConfigError, LayoutError, ModelError, RecipeError
from toolkit.hardware import gpu
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.shape import ModelShape, find_config, with_overrides

Flags = dict[str, Any]

# Flag -> field of a recipe.
_FIELDS = {
    "model": "model.name_or_path",
    "global_batch": "batch.global_size",
    "micro": "batch.micro_size",
    "precision": "precision",
    "optimizer": "optimizer.name",
    "lr": "optimizer.lr",
    "betas": "optimizer.betas",
    "weight_decay": "optimizer.weight_decay",
    "grad_clip": "train.grad_clip",
    "schedule": "schedule.name",
    "steps": "train.steps",
    "warmup_steps": "schedule.warmup_steps",
    "recompute": "parallel.recompute",
    "offload_optimizer": "parallel.offload_optimizer",
    "offload_params": "parallel.offload_params",
}
_NEEDED = ("model", "layout", "global_batch", "micro")
_STEPS = 1000
"""Where nothing says how long the run is: only a scheduler's JSON shows it."""
_LEARNING_RATE = 3e-4


def job_of(recipe: str | None, overrides: tuple[str, ...], flags: Flags) -> ConfigJob:
    """The job that the command line describes. Raises a ToolkitError for what it cannot be."""
    nodes, per_node = flags["nodes"], flags["gpus_per_node"]
    world_size = _world_size(flags["world_size"], nodes, per_node)
    if recipe is None:
        loaded = _made_of_flags(flags, _fields(flags))
    else:
        loaded = recipe_file.load(recipe, (*overrides, *flag_overrides(flags)), world_size=world_size)
    if loaded.train.engine != "deepspeed":
        raise ConfigError(
            f"{recipe}: train.engine={loaded.train.engine} takes no DeepSpeed config. Add train.engine=deepspeed."
        )
    section = loaded.parallel
    ranks = world_size or loaded.world_size or section.tp * section.pp * section.ulysses
    layout = loaded.layout(ranks)
    batch = loaded.resolve_batch(layout)
    shape = _shape(loaded)
    return ConfigJob(
        recipe=loaded,
        layout=layout,
        batch=batch,
        shape=shape,
        nodes=nodes or (ranks // per_node if per_node and ranks % per_node == 0 else 1),
        device=flags["device"],
        options=_options(flags, loaded, layout, shape, gpus_per_node=per_node or ranks // (nodes or 1)),
    )


def flag_overrides(flags: Flags) -> list[str]:
    """What flags set of a recipe, as overrides of it."""
    return [f"{name}={json.dumps(value)}" for name, value in _fields(flags).items()]


def is_guess(job: ConfigJob, flags: Flags) -> bool:
    """Whether nothing said how many ranks there are."""
    known = flags["world_size"] or (flags["nodes"] and flags["gpus_per_node"]) or job.recipe.world_size
    return not known


def _world_size(given: int | None, nodes: int | None, per_node: int | None) -> int | None:
    ranks = nodes * per_node if nodes and per_node else None
    if given and ranks and given != ranks:
        raise LayoutError(
            f"world-size={given} with {nodes} nodes of {per_node} GPUs: those are {ranks} ranks. Leave one of them out."
        )
    return given or ranks


def _fields(flags: Flags) -> dict[str, Any]:
    """The fields of a recipe that flags set."""
    given = {name: flags[name] for name in _FIELDS if flags[name] is not None}
    if given.get("optimizer") in REMOVED_OPTIMIZERS:
        raise removed_optimizer(given["optimizer"])
    if _other_optimizer(flags):
        given.pop("optimizer")
    for place in ("offload_optimizer", "offload_params"):
        if given.get(place) == "nvme":  # no recipe has it
            given[place] = "none"
    fields = {_FIELDS[name]: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    if flags["layout"] is not None:
        layout = Layout.parse(flags["layout"])
        axes = {name: getattr(layout, name) for name in ("tp", "pp", "ulysses", "zero_stage")}
        dp = layout.dp if re.search(r"(^|-)dp", flags["layout"]) else None
        fields |= {f"parallel.{name}": value for name, value in (axes | {"dp": dp}).items()}
    return fields


def _made_of_flags(flags: Flags, fields: dict[str, Any]) -> Recipe:
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED if flags[name] is None]
    if missing:
        raise ConfigError(f"without a recipe, {' and '.join(missing)} must be given. Or name a recipe.")
    # A run that no flag decides: neither text nor length shows in the config, unless a scheduler is asked for.
    document: dict[str, Any] = {
        "data": {"seq_len": 1},
        "optimizer": {"lr": _LEARNING_RATE},
        "schedule": {"name": "constant"},
        "train": {"steps": _STEPS},
    }
    for path, value in fields.items():
        if value is None:
            continue
        section, _, name = path.partition(".")
        if name:
            document.setdefault(section, {})[name] = value
        else:
            document[section] = value
    try:
        return Recipe.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise RecipeError(
            [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}." for problem in error.errors()]
        ) from None


def _shape(recipe: Recipe) -> ModelShape:
    facts = find_config(recipe.model.name_or_path)
    if facts is None:
        raise ModelError(
            f"model.name_or_path={recipe.model.name_or_path}: not a known shape or local directory, and bucket sizes "
            "follow from the model's width. Give a shape that `dstk config` knows, or a directory with a config.json."
        )
    return ModelShape.from_config(with_overrides(facts, recipe.model.overrides))


def _other_optimizer(flags: Flags) -> str | None:
    name: str | None = flags["optimizer"]
    return name if name in ("adagrad", "lamb", "muon", "none") else None


def _options(flags: Flags, recipe: Recipe, layout: Layout, shape: ModelShape, *, gpus_per_node: int) -> ConfigOptions:
    buckets: Buckets | None = None
    if flags["gpu"] is not None:
        link = link_of(
            gpu(flags["gpu"]),
            layout,
            gpus_per_node=gpus_per_node,
            network_bytes_per_second=flags["network_gbit"] * 1e9 / 8,
        )
        buckets = derive(
            shape,
            layout,
            link,
            gradient_bytes=4 if flags["communication_dtype"] == "fp32" else 2,
            parameter_bytes=4 if recipe.precision == "fp32" else 2,
        )
    return ConfigOptions(
        buckets=buckets,
        nvme_path=flags["nvme_path"],
        nvme_optimizer=flags["offload_optimizer"] == "nvme",
        nvme_params=flags["offload_params"] == "nvme",
        nvme_buffer_elements=largest_partition(shape, layout.dp),
        hpz_partition_size=flags["hpz"],
        quantized_weights=flags["quantized_weights"],
        quantized_gradients=flags["quantized_gradients"],
        activation_checkpointing=flags["activation_checkpointing"],
        cpu_checkpointing=flags["cpu_checkpointing"],
        gradient_dtype=flags["grad_accum_dtype"],
        communication_dtype=flags["communication_dtype"],
        optimizer=_other_optimizer(flags),  # type: ignore[arg-type]
        scheduler=flags["scheduler"],
        monitors=flags["monitors"],
        log_dir=flags["log_dir"],
        run_name=flags["run_name"],
        profile_step=flags["profile_step"],
        wall_clock_breakdown=flags["wall_clock_breakdown"],
    )
