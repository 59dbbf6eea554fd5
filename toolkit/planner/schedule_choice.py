"""The pipeline schedule of a layout: every one that training accepts, with the model's own times and memory."""

from collections.abc import Sequence
from dataclasses import replace

from toolkit.planner.layout_candidates import scheduled
from toolkit.planner.request import Plan, PlanRequest
from toolkit.units import format_bytes

_SCHEDULE_FIELDS = ("schedule", "chunks", "max_pending_weights")
"""Fields of Layout that make up a schedule."""
_WORTH = 0.99
"""A schedule that is less simple is taken where its step takes at most this share of the simpler one's."""


def schedule_plans(request: PlanRequest, plan: Plan) -> list[Plan]:
    """Return the plan with DeepSpeed's own 1F1B and with each schedule, the simplest first."""
    fixed = {name: value for name, value in request.fixed.items() if name not in _SCHEDULE_FIELDS}
    every = replace(request, schedules=True, fixed=fixed)
    plain = replace(plan.layout, schedule=None, chunks=1, max_pending_weights=None)
    return [every.estimated(layout, plan.batch, every.step(layout, plan.batch)) for layout in scheduled(every, plain)]


def fastest_schedule(plans: Sequence[Plan]) -> Plan:
    """Return the fastest plan that fits, and a simpler one where that is hardly slower; the first if none fits."""
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return plans[0]
    chosen = fitting[0]
    for plan in fitting[1:]:
        if plan.step.seconds < _WORTH * chosen.step.seconds:
            chosen = plan
    return chosen


def compared(plans: Sequence[Plan]) -> str:
    """Say of every schedule what share of the step it waits, how long the step is, and what does not fit."""
    words = []
    for plan in plans:
        step = plan.step
        waits = (step.bubble + step.pipeline) / step.seconds
        name = plan.layout.pipeline_text if plan.layout.schedule else f"{plan.layout.pipeline_text} (DeepSpeed's own)"
        fits = "" if plan.fits else f", does not fit ({format_bytes(plan.memory.total)})"
        words.append(f"{name} {step.seconds:.3g} s, waits {100 * waits:.0f} %{fits}")
    return "; ".join(words)
