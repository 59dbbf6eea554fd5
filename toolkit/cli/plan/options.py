"""PlanRequest of the options of `dstk plan`."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from toolkit.cli.memory.options import read_config
from toolkit.config.layout import Batch
from toolkit.config.recipe import Precision
from toolkit.config.source_text import shorten
from toolkit.errors import BatchError, LayoutError, RecipeError, RunError, nearest, spell_setting
from toolkit.estimate.trainable import EVERYTHING, Trainable
from toolkit.files import expanded, read_text, reason_of
from toolkit.hardware import gpu as find_gpu
from toolkit.planner.calibration.file import CPU, MEASURED, Calibration, is_calibration
from toolkit.planner.cluster import Cluster, with_present_names
from toolkit.planner.execution import Execution, Format
from toolkit.planner.request import Plan, PlanRequest, request_for
from toolkit.planner.search import best_micro_batch
from toolkit.units import LARGEST_COUNT

_LIKELY_GPUS = 64
_LARGEST_FACT = 1e18
"""Bytes, bytes per second or seconds of a cluster's file: a million times what any machine has."""
_CLUSTER_FACTS = {field.name for field in fields(Cluster)} - {"gpu", "cores", "slowdown"}


def request_of(options: Mapping[str, Any]) -> PlanRequest:
    """The request. Raises ToolkitError for what cannot be planned."""
    gpus, kind = _gpus(options["gpus"])
    cluster = _cluster(kind, options["cluster"], gpus)
    if options["recipe"] is not None:
        return _request_of_recipe(options, cluster, gpus)
    precision: Format = options["precision"]
    wide: Precision = "bf16" if precision not in ("fp32", "fp16") else precision
    _check_units("--precision", wide, cluster)
    config = read_config(options["model"])
    if options["framework"] == "toolkit":
        _only_of_other_frameworks(options)
    execution = Execution(
        framework=options["framework"],
        precision=_computed_in(precision, cluster),
        virtual_stages=options["virtual_stages"],
    )
    if options["attention"] is not None:
        execution = replace(execution, attention=options["attention"])
    return PlanRequest.of(
        options["model"],
        config,
        cluster=cluster,
        gpus=gpus,
        seq_len=options["seq"],
        global_batch_size=options["global_batch"],
        precision=wide,
        execution=execution,
        trainable=_trainable(options),
        imbalance=options["imbalance"],
        schedules=options["schedules"],
    )


_WITHOUT_RECIPE = {
    "model": None,
    "precision": "bf16",
    "framework": "toolkit",
    "attention": None,
    "virtual_stages": 1,
    "trainable": None,
    "imbalance": 1.0,
    "write": None,
}
"""Options that a recipe leaves no choice of, or that make one, and what they are where they are not given."""


def _request_of_recipe(options: Mapping[str, Any], cluster: Cluster, gpus: int) -> PlanRequest:
    """The request of a recipe; a length and a batch beside it take the place of its own."""
    from toolkit.config import load_recipe  # and with it YAML, which a plan without a recipe does not wait for
    from toolkit.config.gallery import find_recipe

    path = options["recipe"]
    for name, default in _WITHOUT_RECIPE.items():
        if options[name] != default:
            option = "--" + name.replace("_", "-")
            conflict = ((option, options[name]), ("--recipe", path))
            raise RecipeError.between(conflict, "the recipe says what is trained", f"omit {option}")
    changes = {"data.seq_len": options["seq"], "batch.global_batch_size": options["global_batch"]}
    overrides = [f"{field}={value}" for field, value in changes.items() if value is not None]
    recipe = load_recipe(find_recipe(path), overrides)
    _check_units(f"{path}: precision", recipe.precision, cluster)
    request = request_for(recipe, cluster, gpus)
    return replace(request, schedules=options["schedules"])


def _check_units(setting: str, precision: Precision, cluster: Cluster) -> None:
    """Raise RunError for a GPU that does not compute in the precision."""
    if cluster.gpu.peak_flops(precision) is None:
        raise RunError.of(setting, precision, f"{cluster.gpu.name} has no units for it", "write fp16 or fp32")


def _only_of_other_frameworks(options: Mapping[str, Any]) -> None:
    """Raise LayoutError for options that say how another framework runs, and that this toolkit has no choice of."""
    remedy = "give it with another --framework"
    if options["attention"] is not None:
        reason = "the toolkit runs what the model's class has"
        raise LayoutError.of("--attention", options["attention"], reason, remedy)
    if options["virtual_stages"] > 1:
        reason = "the toolkit's chunks are part of a layout, such as pp4x2"
        raise LayoutError.of("--virtual-stages", options["virtual_stages"], reason, remedy)


def _gpus(text: str) -> tuple[int, str]:
    """The number and the kind of `64xH100`."""
    match = re.fullmatch(r"([0-9]+)x(\S.*)", text)
    if match is None:
        raise RunError.of("--gpus", text, "it is a number of GPUs and their kind", "write 64xH100")
    number = match[1].lstrip("0") or "0"
    if len(number) > len(str(LARGEST_COUNT)) or not 1 <= int(number) <= LARGEST_COUNT:
        reason = f"{shorten(number)} GPUs are out of range; from 1 to {LARGEST_COUNT} are counted"
        raise RunError.of("--gpus", shorten(text), reason, f"write {_LIKELY_GPUS}x{match[2]}")
    return int(number), match[2]


def _trainable(options: Mapping[str, Any]) -> Trainable:
    """Return the parameters that train, with adapters in the precision of the weights, as this toolkit has them."""
    if options["trainable"] is None:
        return EVERYTHING
    if options["framework"] != "toolkit":
        reason = "frozen weights are predicted of this toolkit's runs"
        raise LayoutError.of("--framework", options["framework"], reason, "remove --trainable")
    trainable = Trainable.parse(options["trainable"])
    return replace(trainable, in_fp32=not trainable.rank)


def _computed_in(precision: Format, cluster: Cluster) -> Format:
    unit = Execution(precision=precision).unit
    if cluster.gpu.peak_flops(unit) is None:
        raise RunError.of("--precision", precision, f"{cluster.gpu.name} has no units for it", "write bf16")
    return precision


def _cluster(name: str, path: str | None, ranks: int) -> Cluster:
    """The GPU's reference system, what a YAML file says of it, or what `dstk calibrate` measured."""
    if path == MEASURED or (path is None and name == CPU):
        return _measured(Calibration.of_this_machine(), name, ranks)
    if path is None:
        return Cluster.of(find_gpu(name))
    if is_calibration(expanded(path)):
        return _measured(Calibration.read(expanded(path)), name, ranks)
    facts = _yaml_facts(path)
    named = facts.pop("gpu", name)
    for key, value in facts.items():
        if key not in _CLUSTER_FACTS:
            advice = nearest(key, _CLUSTER_FACTS).strip() or f"write {', '.join(sorted(_CLUSTER_FACTS))} or gpu"
            raise RunError.of(f"{path}: {key}", value, "it is not a fact of a cluster", advice)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST_FACT:
            reason = f"it is a number above 0, at most {_LARGEST_FACT:g}"
            shown = shorten(str(value)) if isinstance(value, int) else value
            raise RunError.of(f"{path}: {key}", shown, reason, "write seconds, bytes, or bytes per second")
    per_node = facts.get("gpus_per_node", 1)
    if per_node != int(per_node) or per_node > LARGEST_COUNT:
        reason = f"it is a whole number, at most {LARGEST_COUNT}"
        raise RunError.of(f"{path}: gpus_per_node", per_node, reason, "write 8")
    return Cluster.of(find_gpu(str(named)), **facts)


def _measured(calibration: Calibration, name: str, ranks: int) -> Cluster:
    kind = calibration.gpu
    if kind != (CPU if name == CPU else find_gpu(name).name):
        raise RunError.of("--gpus", f"{ranks}x{name}", f"the calibration is of {kind}", f"write {ranks}x{kind}")
    return calibration.of_ranks(ranks)


def _yaml_facts(path: str) -> dict[str, Any]:
    from toolkit.config.strict_yaml import parse  # and with it YAML, which most plans do not wait for

    try:
        document = parse(read_text(expanded(path)))
    except (OSError, ValueError) as error:
        raise RunError.of("--cluster", path, f"it cannot be read: {reason_of(error)}", "name a YAML file") from None
    if document.problems:
        problem = document.problems[0]
        raise RunError.of("--cluster", path, problem.message.rstrip("."), "write one fact a line")
    if not isinstance(document.value, dict):
        raise RunError.of("--cluster", path, "it is not a mapping of facts", "write gpus_per_node: 8 and the like")
    return with_present_names(document.value)


def plan_of(request: PlanRequest, text: str, options: Mapping[str, Any]) -> Plan:
    """The plan of one layout, with the micro-batch that is asked for, or else with the fastest that fits.

    Raises BatchError for a micro-batch that the global batch is not a multiple of.
    """
    layout, size_in_layout = request.read_layout(text)
    if options["recompute"] is not None:
        layout = replace(layout, recompute=options["recompute"])
    size = options["micro"] or size_in_layout
    if size is None:
        return best_micro_batch(request, layout)
    try:
        batch = Batch.resolve(global_batch_size=request.global_batch_size, micro_batch_size=size, dp=layout.dp)
    except BatchError as error:
        raise BatchError(error.as_refusal().render(_spell_option, verb="use"), error.refusals) from None
    return request.plan(layout, batch)


def _spell_option(field: str, value: Any) -> str:
    """Write a field of a batch as an option of this command."""
    name = field.rpartition(".")[2]
    options = {"global_batch_size": "--global-batch", "micro_batch_size": "--micro"}
    return spell_setting(options.get(name, name), value)
