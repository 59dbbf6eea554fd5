"""The report of a search for layouts: index.html, with all candidates as a picture and as a table.

write_plans(Path("plans"), PlansPage(request=request, evaluated=evaluated(request), chosen=search(request).plans, ...))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.planner.costs import Cost
from toolkit.planner.request import Plan, PlanRequest
from toolkit.planner.search import SearchResult, frontier
from toolkit.report.page import render, replace_folder
from toolkit.report.plan_picture import PlanPicture, Point
from toolkit.report.step_bars import StepBar, digits, step_bars, terms_of
from toolkit.units import format_bytes, format_count, format_duration, plural

FILES = ("index.html",)
MOST_SHOWN = 3000
"""Rows that a browser still filters at once."""
_MOST_BARS = 10
_GIB = 2**30
_SHORT = {"fits": "yes", "does not fit": "no"}
_GOALS = {"speed": "fastest", "cost": "cheapest", "memory": "smallest"}


@dataclass(frozen=True, kw_only=True)
class PlansPage:
    """Content of the page: a question, the plans that the search chose, and everything it could have chosen."""

    request: PlanRequest
    goal: str
    evaluated: SearchResult
    """All candidates whose memory is estimated, and how many there are."""
    chosen: Sequence[Plan]
    cost: Cost | None
    """Cost of the first choice; None where no cost was asked for."""
    command: str


def write_plans(folder: Path, page: PlansPage) -> Path:
    """Write the report into `folder` and return the path of its page. Raises ReportError if that is not allowed."""
    text = plans_page(page)

    def write(place: Path) -> None:
        (place / "index.html").write_text(text, encoding="utf-8")

    return replace_folder(folder, FILES, write)


def plans_page(page: PlansPage) -> str:
    """Render the page as HTML."""
    request = page.request
    best = page.chosen[0]
    shown = shown_plans(page)
    front = frontier(page.evaluated.plans)
    keys = {id(plan): f"c{index}" for index, plan in enumerate(shown)}
    on_frontier = {id(plan) for plan in front}
    points = [_point(plan, keys[id(plan)], is_frontier=id(plan) in on_frontier) for plan in shown]
    pictures = [PlanPicture(points, request.gpu, width=w, height=h) for w, h in ((1080, 440), (340, 320))]
    columns = _columns(shown)
    drawn = bars(page.chosen)
    return render(
        "plan.html",
        request=request,
        title=f"{request.name} on {request.gpus} x {request.gpu.name}",
        best=best,
        goal=_GOALS[page.goal],
        figures=_figures(page, best),
        pictures=pictures,
        points=points,
        unseen=len(points) - len(pictures[0].drawn),
        columns=columns,
        rows=[
            {"key": point.key, "label": point.label, "cells": [read(plan, point) for read in columns.values()]}
            for plan, point in zip(shown, points, strict=True)
        ],
        filters=_filters(columns, shown, points),
        evaluated=page.evaluated,
        bars=drawn,
        terms=terms_of(drawn),
        chosen=list(zip(drawn, page.chosen, strict=False)),
        facts=_facts(request),
        command=page.command,
        readouts={"charts": {}},
    )


def shown_plans(page: PlansPage) -> list[Plan]:
    """Return plans that fit, then others, the fastest first; of too many, the frontier and the nearest to fitting."""
    plans = sorted(page.evaluated.plans, key=lambda plan: not plan.fits)
    if len(plans) <= MOST_SHOWN:
        return plans
    needed = {id(plan) for plan in frontier(plans)}
    others = [plan for plan in plans if id(plan) not in needed]
    others.sort(key=lambda plan: 0 if plan.fits else plan.memory.total)
    shown_ids = needed | {id(plan) for plan in others[: MOST_SHOWN - len(needed)]}
    return [plan for plan in plans if id(plan) in shown_ids]


def outcome(plan: Plan) -> str:
    """Whether it fits: `tight` where the band of the estimate's error decides."""
    return "does not fit" if plan.host_bytes > plan.host_room else plan.memory.verdict


def _point(plan: Plan, key: str, *, is_frontier: bool) -> Point:
    return Point(
        key=key,
        label=plan.strategy,
        gib=plan.memory.total / _GIB,
        speed=plan.step.tokens_per_second_per_gpu,
        outcome=outcome(plan),
        is_frontier=is_frontier,
    )


_AXES: dict[str, Any] = {
    "GPUs": lambda plan: plan.step.gpus,
    "dp": lambda plan: plan.layout.dp,
    "ep": lambda plan: plan.layout.ep,
    "cp": lambda plan: plan.layout.cp,
    "tp": lambda plan: plan.layout.tp,
    "pp": lambda plan: plan.layout.pp,
    "schedule": lambda plan: plan.layout.schedule or "default",
    "chunks": lambda plan: plan.layout.chunks,
    "Ulysses": lambda plan: plan.layout.ulysses,
    "experts": lambda plan: plan.layout.experts,
    "ZeRO": lambda plan: plan.layout.zero_stage,
    "SP": lambda plan: "yes" if plan.layout.sequence_parallel else "no",
    "recompute": lambda plan: plan.layout.recompute,
    "offload": lambda plan: "yes" if plan.layout.offload_optimizer != "none" else "no",
    "micro-batch": lambda plan: plan.batch.micro_batch_size,
}
_ALWAYS = ("dp", "tp", "pp", "ZeRO", "recompute", "micro-batch")


def _columns(plans: Sequence[Plan]) -> dict[str, Any]:
    """Return columns of predictions, of axes along which candidates differ, and of axes that everybody expects."""
    columns = {
        name: (lambda plan, _, read=read: str(read(plan)))
        for name, read in _AXES.items()
        if name in _ALWAYS or len({read(plan) for plan in plans}) > 1
    }
    predicted: dict[str, Any] = {
        "tokens/s/GPU": lambda plan, _: f"{plan.step.tokens_per_second_per_gpu:,.0f}",
        "GiB": lambda plan, _: f"{plan.memory.total / _GIB:.1f}",
        "step s": lambda plan, _: digits(plan.step.seconds),
        "MFU %": lambda plan, _: f"{100 * plan.step.mfu:.1f}",
        "fits": lambda _, point: _SHORT.get(point.outcome, point.outcome),
        "frontier": lambda _, point: "yes" if point.is_frontier else "no",
    }
    return predicted | columns


def _filters(columns: dict[str, Any], plans: Sequence[Plan], points: Sequence[Point]) -> list[dict[str, Any]]:
    """A choice for each column of names or small numbers: its values, ascending."""
    filters = []
    for place, (name, read) in enumerate(columns.items(), start=1):
        if name in _AXES or name in ("fits", "frontier"):
            values = {read(plan, point) for plan, point in zip(plans, points, strict=True)}
            ordered = sorted(values, key=lambda value: (int(value) if value.isdigit() else 0, value))
            filters.append({"name": name, "column": place, "values": ordered})
    return filters


def bars(chosen: Sequence[Plan]) -> list[StepBar]:
    """The first choices, one a bar."""
    plans = chosen[:_MOST_BARS]
    differ = len({plan.step.gpus for plan in plans}) > 1
    return step_bars(
        [(plan.strategy + (f" on {plan.step.gpus} GPUs" if differ else ""), plan.step.terms) for plan in plans]
    )


def _figures(page: PlansPage, best: Plan) -> dict[str, tuple[str, str]]:
    """The first choice in numbers, each with a qualifier."""
    step = best.step
    fitting = sum(plan.fits for plan in page.evaluated.plans)
    cost = {}
    if page.cost is not None:
        usd = page.cost.usd
        cost["days"] = (f"{page.cost.days:,.1f}", "" if usd is None else f"{usd:,.0f} USD")
    return {
        "tokens/s per GPU": (
            f"{step.tokens_per_second_per_gpu:,.0f}",
            f"{format_count(step.tokens / step.seconds)} in all",
        ),
        "step": (
            format_duration(step.seconds) if step.seconds >= 60 else f"{digits(step.seconds)} s",
            f"{format_count(step.tokens)} tokens",
        ),
        "MFU": (f"{step.mfu:.1%}", f"of {page.request.gpu.name}"),
        "memory": (format_bytes(best.memory.total), f"of {format_bytes(page.request.gpu.memory_bytes)}"),
        **cost,
        "candidates": (f"{page.evaluated.candidates:,}", f"{fitting:,} fit"),
    }


def _facts(request: PlanRequest) -> list[tuple[str, str]]:
    """The question, and what is known of the cluster."""
    cluster = request.cluster
    shape = request.model.shape

    def rate(value: float) -> str:
        return f"{value / 1e9:,.4g} GB/s"

    facts = [
        ("model", f"{request.name}, {format_count(request.model.parameters.numel)} parameters, {shape.layers} layers"),
        ("sample", f"{request.seq_len:,} tokens"),
        ("global batch", f"{request.global_batch_size:,} samples"),
        ("precision", request.execution.precision),
        ("GPUs", f"{request.gpus:,} x {request.gpu.name}"),
        ("memory of a GPU", format_bytes(request.gpu.memory_bytes)),
        ("a node", plural(cluster.gpus_per_node, "GPU")),
        (f"link in a node ({request.gpu.link})", rate(cluster.link_bytes_per_second)),
        ("network, a GPU's share", rate(cluster.network_bytes_per_second)),
        ("GPU to host", rate(cluster.host_bytes_per_second)),
        ("memory of a host", format_bytes(cluster.host_memory_bytes)),
    ]
    peak = request.gpu.peak_flops(request.execution.unit)
    return facts if peak is None else [*facts, ("peak of a GPU", f"{peak / 1e12:,.4g} TFLOP/s")]
