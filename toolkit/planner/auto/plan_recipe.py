"""The plan of a recipe whose `parallel` is `auto`: what it leaves open is chosen, what it gives is kept.

A function of the recipe and the cluster alone. At launch one rank calls it for all (`toolkit.training.plan_launch`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from toolkit.config.layout import Layout
from toolkit.config.recipe import Recipe
from toolkit.errors import LayoutError, Refusal, RunError, Setting, ToolkitError
from toolkit.planner.calibration.file import CPU
from toolkit.planner.cluster import Cluster
from toolkit.planner.request import Plan, PlanRequest, request_for
from toolkit.planner.search import best_micro_batch, nearest_that_fits, search
from toolkit.units import format_bytes, plural

_FIELDS = {
    "--model": "model.name_or_path",
    "--seq": "data.seq_len",
    "--gpus": "world_size",
    "--global-batch": "batch.global_batch_size",
    "micro_batch_size": "batch.micro_batch_size",
    "attention": "model.attn_implementation",
    **{field.name: f"parallel.{field.name}" for field in fields(Layout)},
}
"""A recipe's names of what a plan is asked."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A recipe with the plan's values in it."""

    recipe: Recipe
    plan: Plan
    note: str
    """What was chosen, from how many, for what, on one line."""


def planned(
    recipe: Recipe, cluster: Cluster, ranks: int, *, on: str, config: Mapping[str, Any] | None = None
) -> Planned:
    """Plan a recipe for a number of ranks; `on` says in words what they are, `config` is the model's.

    Raises a ToolkitError, in the recipe's terms, where nothing can be planned.
    """
    try:
        request = _request(recipe, cluster, ranks, config)
        plan, candidates = _choose(request)
    except ToolkitError as error:
        raise type(error)([_in_recipe(one) for one in error.refusals] or error.problems, scope="job") from None
    sizes = {"micro_batch_size": plan.batch.micro_batch_size}
    explicit = recipe.changed({"parallel": {**asdict(plan.layout), "auto": False}, "batch": sizes})
    room = f"{format_bytes(plan.memory.total)} of {format_bytes(cluster.gpu.memory_bytes)}"
    chosen = f"{plan.strategy}, the first of {plural(candidates, 'candidate')}"
    note = f"{chosen} on {on}: predicted {plan.step.seconds:.2g} s a step, {room} a rank"
    return Planned(recipe=explicit, plan=plan, note=note)


def _request(recipe: Recipe, cluster: Cluster, ranks: int, config: Mapping[str, Any] | None) -> PlanRequest:
    if cluster.gpu.peak_flops(recipe.precision) is None:
        reason = f"{cluster.gpu.name} has no units for it"
        raise RunError.of("precision", recipe.precision, reason, ("precision", "fp16 or fp32"))
    kept = dict(recipe.parallel.given)
    if recipe.batch.micro_batch_size is not None:
        kept["micro_batch_size"] = recipe.batch.micro_batch_size
    if recipe.train.engine != "deepspeed":  # the other engines only have replicas
        kept = recipe.parallel.layout_fields | kept
    return replace(request_for(recipe, cluster, ranks, config), kept=kept, offloads=False)


def _choose(request: PlanRequest) -> tuple[Plan, int]:
    """The fastest plan that fits, and of how many. One that offloads is taken only where no other fits."""
    open_fields = {field.name for field in fields(Layout)} - {"dp"} - request.kept.keys()
    if not open_fields:
        layout_fields = {name: value for name, value in request.kept.items() if name != "micro_batch_size"}
        return best_micro_batch(request, Layout.resolve(request.gpus, **layout_fields), stand_ins=True), 1
    found = search(request, top=1)
    if not found.plans and request.gpu.name != CPU:
        request = replace(request, offloads=True)
        found = search(request, top=1)
    if not found.plans:
        reason = f"none of {plural(found.candidates, 'layout and micro-batch', 'layouts and micro-batches')} fits"
        near = nearest_that_fits(request)
        near = [one.replace(" GPUs: ", " ranks: ").replace("--seq ", "data.seq_len=") for one in near]
        what = f"{reason} into {format_bytes(request.gpu.memory_bytes)}"
        raise LayoutError.of("parallel.auto", True, what, *(near or ["take a smaller model, or more ranks"]))
    return found.plans[0], found.candidates


def _in_recipe(refusal: Refusal) -> Refusal:
    """The same in the names of recipes."""

    def named(item: Setting | str) -> Setting | str:
        return item if isinstance(item, str) else (_FIELDS.get(item[0], item[0]), item[1])

    remedy = [named(item) for item in refusal.remedy]
    return replace(
        refusal,
        field=_FIELDS.get(refusal.field, refusal.field),
        given=tuple(map(named, refusal.given)),
        remedy=tuple(f"launch {one[1]} ranks" if one[0] == "world_size" else one for one in remedy),
    )
