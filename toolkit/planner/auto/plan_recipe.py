"""The plan of a recipe whose `parallel` or `parallel.schedule` is `auto`: what it leaves open is chosen.

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
from toolkit.planner.schedule_choice import compared, fastest_schedule, schedule_plans
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
    """One line for the console: the plan that was chosen, the number of candidates, and its predicted time and
    memory."""


def planned(
    recipe: Recipe, cluster: Cluster, ranks: int, *, on: str, config: Mapping[str, Any] | None = None
) -> Planned:
    """Plan a recipe for a number of ranks; `on` says in words what they are, `config` is the model's.

    Raises a ToolkitError, in the recipe's terms, where nothing can be planned.
    """
    try:
        request = _request(recipe, cluster, ranks, config)
        if not recipe.parallel.auto:
            return _with_schedule(recipe, request, on)
        plan, candidates = _choose(request)
    except ToolkitError as error:
        raise type(error)([_in_recipe(refusal) for refusal in error.refusals] or error.problems, scope="job") from None
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
    fixed = dict(recipe.parallel.fixed_fields)
    if recipe.batch.micro_batch_size is not None:
        fixed["micro_batch_size"] = recipe.batch.micro_batch_size
    if recipe.train.engine != "deepspeed":  # the other engines only have replicas
        fixed = recipe.parallel.layout_fields | fixed
    schedules = recipe.parallel.schedule == "auto"
    return replace(request_for(recipe, cluster, ranks, config), fixed=fixed, offloads=False, schedules=schedules)


def _with_schedule(recipe: Recipe, request: PlanRequest, on: str) -> Planned:
    """Plan the pipeline schedule alone of a recipe that gives all else."""
    layout = recipe.layout(request.gpus)
    batch = recipe.resolve_batch(layout)
    plans = schedule_plans(request, request.estimated(layout, batch, request.step(layout, batch)))
    plan = fastest_schedule(plans)
    chosen = {"schedule": plan.layout.schedule, "chunks": plan.layout.chunks}
    note = f"{plan.layout.pipeline_text} on {on}: {compared(plans)}"
    return Planned(recipe=recipe.changed({"parallel": chosen}), plan=plan, note=note)


def _choose(request: PlanRequest) -> tuple[Plan, int]:
    """The fastest plan that fits, and of how many. One that offloads is taken only where no other fits."""
    open_fields = {field.name for field in fields(Layout)} - {"dp"} - request.fixed.keys()
    if not open_fields:
        layout_fields = {name: value for name, value in request.fixed.items() if name != "micro_batch_size"}
        return best_micro_batch(request, Layout.resolve(request.gpus, **layout_fields), stand_ins=True), 1
    result = search(request, top=1)
    if not result.plans and request.gpu.name != CPU:
        request = replace(request, offloads=True)
        result = search(request, top=1)
    if not result.plans:
        reason = f"none of {plural(result.candidates, 'layout and micro-batch', 'layouts and micro-batches')} fits"
        reason = f"{reason} into {format_bytes(request.gpu.memory_bytes)}"
        changes = nearest_that_fits(request)
        advice = [change.replace(" GPUs: ", " ranks: ").replace("--seq ", "data.seq_len=") for change in changes]
        raise LayoutError.of("parallel.auto", True, reason, *(advice or ["take a smaller model, or more ranks"]))
    return result.plans[0], result.candidates


def _in_recipe(refusal: Refusal) -> Refusal:
    """Return the refusal with the names of a recipe's fields in the place of command-line options."""

    def named(setting: Setting | str) -> Setting | str:
        return setting if isinstance(setting, str) else (_FIELDS.get(setting[0], setting[0]), setting[1])

    remedy = [named(setting) for setting in refusal.remedy]
    return replace(
        refusal,
        field=_FIELDS.get(refusal.field, refusal.field),
        settings=tuple(map(named, refusal.settings)),
        remedy=tuple(f"launch {change[1]} ranks" if change[0] == "world_size" else change for change in remedy),
    )
