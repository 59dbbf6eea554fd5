"""The tables of `dstk plan`, its comparison of two layouts, and the same as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.config.strategy import layout_text
from toolkit.planner.costs import Cost
from toolkit.planner.request import Plan, PlanRequest
from toolkit.planner.schedule_choice import compared, schedule_plans
from toolkit.planner.step_time import TERMS
from toolkit.report.terminal import table_console
from toolkit.units import format_bytes, format_count, plural, three_digits

_GIB = 2**30
_BESIDE_LAYOUT = 58
"""Columns that a narrow table takes beside its layouts."""
_LEAST_LAYOUT = 16
"""Columns of layouts at least."""
_LEAST = 0.01
"""The share of a step up to which its terms, or their differences, are not named."""
_PARTS = (
    "parameters",
    "reference",
    "gradients",
    "masters",
    "optimizer",
    "activation_total",
    "logits",
    "gathered",
    "buckets",
    "teacher",
)


def title(request: PlanRequest) -> str:
    """Return the request on one line."""
    gpus = f"{request.gpus} x {request.gpu.name}"
    tokens = plural(request.seq_len, "token")
    return f"{request.name}, {gpus}, {tokens}, global batch {request.global_batch_size}"


def _table_that_fits(plans: Sequence[Plan], console: Console) -> Table:
    """Return the table with a column a term; where that is too wide, with the largest two terms in one cell."""
    for term_separator in (None, ", "):
        table = _table(plans, term_separator=term_separator, columns=console.width)
        if console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width:
            return table
    return _table(plans, term_separator=",\n", columns=console.width)


def notes(request: PlanRequest, *, is_search: bool) -> Iterator[str]:
    """Say what the request leaves out of the search, and what a recipe needs for samples beyond the named positions."""
    gpus = request.gpus
    batch = request.global_batch_size
    lower = batch // gpus * gpus
    if is_search and lower not in (0, batch):
        yield (
            f"--global-batch {batch} is not a multiple of {gpus} GPUs, so no layout has a replica on each of them; "
            f"{lower} and {lower + gpus} are"
        )
    positions_note = request.model.positions_note(request.name, seq_len=request.seq_len)
    if positions_note is not None:
        yield positions_note


def print_plans(request: PlanRequest, plans: Sequence[Plan], costs: Sequence[Cost | None]) -> None:
    """A line a plan, and a column for each term that some plan has; where there is no room, the largest terms."""
    console = table_console()
    console.print(Text(title(request), style="bold"), soft_wrap=True)
    console.print(_table_that_fits(plans, console))
    for plan, cost in zip(plans, costs, strict=True):
        if cost is not None:
            console.print(_cost_line(request, plan, cost), soft_wrap=True)
    if plans[0].reference_seconds:
        console.print(_reference_pass(plans[0]), soft_wrap=True)
    offloaded = [plan.host_bytes for plan in plans if plan.offloads]
    if offloaded:
        console.print(_host_memory(request, max(offloaded)), soft_wrap=True)
    if any(not plan.fits for plan in plans):
        gpu_memory = f"{request.gpu.memory_bytes / _GIB:.1f} GiB"
        host_memory = f"{format_bytes(request.cluster.host_memory_bytes)} a host"
        console.print(f"! does not fit surely into {gpu_memory}, and {host_memory}", soft_wrap=True)


def _cost_line(request: PlanRequest, plan: Plan, cost: Cost) -> str:
    """Say how long a plan trains, and as far as it is known for what money, energy and CO2."""
    gpus = "" if plan.step.gpus == request.gpus else f" on {plan.step.gpus} GPUs"
    line = f"{plan.strategy}{gpus}: {cost.days:.1f} days"
    if cost.usd is not None:
        line += f", {cost.usd:,.0f} USD"
    if cost.kwh is not None:
        line += f", {cost.kwh:,.0f} kWh"
        if cost.kg_co2 is not None:
            line += f", {_mass(cost.kg_co2)} CO2"
        line += " at most"
    return line


def _mass(kilograms: float) -> str:
    """41.3 -> '41 kg', 41_300 -> '41.3 t'."""
    return f"{kilograms:,.0f} kg" if kilograms < 1000 else f"{kilograms / 1000:,.1f} t"


def _host_memory(request: PlanRequest, most: int) -> str:
    """Say how much of a host's memory offloaded states take, and how much it is taken to have."""
    room = format_bytes(request.cluster.host_memory_bytes)
    held = f"offload keeps up to {format_bytes(most)} in the memory of a host"
    return f"{held}, of {room} (host_memory_bytes of --cluster)"


def _reference_pass(plan: Plan) -> str:
    """What the reference takes before training, in the unit of samples: dstk data alone reads how many there are."""
    seconds = f"{three_digits(plan.reference_seconds)} s for every {plural(plan.batch.global_batch_size, 'sample')}"
    share = f"{100 * plan.reference_seconds / plan.step.seconds:.0f} % of an epoch"
    return (
        f"{plan.strategy}: the reference reads the data set before training, {seconds} (dstk data counts them), {share}"
    )


def _table(plans: Sequence[Plan], *, term_separator: str | None, columns: int) -> Table:
    """A row a plan, with the largest two terms in a cell, or with None a column for each term that some plan has.

    Layouts stay whole where they can.
    """
    is_wide = term_separator is None
    separator = term_separator or ""
    terms = [name for name in TERMS if any(plan.step.terms[name] > _LEAST * plan.step.seconds for plan in plans)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    layouts = [_folded(plan.strategy, max(columns - _BESIDE_LAYOUT, _LEAST_LAYOUT)) for plan in plans]
    longest = max((len(line) for layout in layouts for line in layout.splitlines()), default=0)
    width = longest if longest + _BESIDE_LAYOUT <= columns else None
    table.add_column("--layout", overflow="fold", width=width, min_width=min(longest, _LEAST_LAYOUT))
    middle = ["most of it", "step s", *terms] if is_wide else ["step s", "goes to"]
    for heading in ("GiB", *middle, "tokens/s/GPU", "MFU"):
        is_text = heading in ("most of it", "goes to")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading != "goes to")
    for plan, layout in zip(plans, layouts, strict=True):
        step = plan.step
        total = f"{plan.memory.total / _GIB:.1f}" + ("" if plan.fits else " !")
        each = [three_digits(step.terms[name]) for name in terms]
        split = each if is_wide else [separator.join(_largest_terms(plan))]
        part = [largest_part(plan)] if is_wide else []
        speed = [f"{step.tokens_per_second_per_gpu:,.0f}", f"{100 * step.mfu:.1f} %"]
        table.add_row(layout, total, *part, three_digits(step.seconds), *split, *speed)
    return table


def _folded(strategy: str, width: int) -> str:
    """Break a strategy between its parts into lines of at most `width` columns."""
    lines = [""]
    for part in strategy.split("-"):
        if lines[-1] and len(lines[-1]) + len(part) >= width:
            lines.append("")
        lines[-1] += f"{part}-"
    return "\n".join(lines).removesuffix("-")


def _largest_terms(plan: Plan) -> list[str]:
    largest = sorted(plan.step.terms.items(), key=lambda term: -term[1])[:2]
    return [f"{name} {100 * seconds / plan.step.seconds:.0f} %" for name, seconds in largest]


def largest_part(plan: Plan) -> str:
    """The part of the memory that is largest."""
    name = max(_PARTS, key=lambda part: getattr(plan.memory, part))
    return {"activation_total": "activations"}.get(name, name)


def print_why(request: PlanRequest, plan: Plan, best: Plan | None) -> None:
    """Print why a layout is not the first choice."""
    console = table_console()
    if plan.host_bytes > plan.host_room:
        held = f"{plan.strategy} keeps {format_bytes(plan.host_bytes)} of a host's {format_bytes(plan.host_room)}"
        console.print(f"{held}.", soft_wrap=True)
    if not plan.memory.fits:
        console.print(_memory_sentence(request, plan), soft_wrap=True)
    if plan.layout.pp > 1 and request.execution.framework == "toolkit":
        console.print(f"Schedules of {plan.strategy}: {compared(schedule_plans(request, plan))}.", soft_wrap=True)
    if best is None:
        return
    if best.strategy == plan.strategy:
        console.print(f"{plan.strategy} is the first choice.", soft_wrap=True)
        return
    differences = _differing_terms(plan, best)
    end = "" if differences else f" no term differs by more than {100 * _LEAST:.0f} %"
    console.print(f"{_times_sentence(plan, best)}:{end}", soft_wrap=True)
    for name, seconds in differences.items():
        sign = "+" if seconds > 0 else ""
        console.print(f"  {name:10} {sign}{three_digits(seconds)} s")


def _memory_sentence(request: PlanRequest, plan: Plan) -> str:
    """Say how much memory a plan needs, and its three largest parts."""
    memory = plan.memory
    needs = f"{plan.strategy} needs {memory.total / _GIB:.1f} GiB of {request.gpu.memory_bytes / _GIB:.1f}"
    largest = sorted(_PARTS, key=lambda part: -getattr(memory, part))[:3]
    parts = ", ".join(f"{part.replace('_total', '')} {getattr(memory, part) / _GIB:.1f}" for part in largest)
    return f"{needs}: {parts}."


def _times_sentence(plan: Plan, best: Plan) -> str:
    """Compare the steps of a plan and of the first choice."""
    ratio = plan.step.seconds / best.step.seconds
    pace = f"takes {ratio:.2f} times as long as" if ratio >= 1 else "would be faster than"
    times = f"{three_digits(plan.step.seconds)} s against {three_digits(best.step.seconds)} s"
    return f"{plan.strategy} {pace} {best.strategy}, {times}"


def _differing_terms(plan: Plan, best: Plan) -> dict[str, float]:
    """Return the seconds by which the terms of a step exceed those of the first choice, the largest differences first.

    Differences of up to `_LEAST` of the first choice's step are left out.
    """
    differences = {name: plan.step.terms[name] - best.step.terms[name] for name in TERMS}
    largest_first = sorted(TERMS, key=lambda name: -abs(differences[name]))
    least = _LEAST * best.step.seconds
    return {name: differences[name] for name in largest_first if abs(differences[name]) > least}


def to_json(plan: Plan, cost: Cost | None = None) -> dict[str, Any]:
    """A plan as other programs read it: bytes and seconds."""
    layout = plan.layout
    step = plan.step
    return {
        "layout": layout_text(replace(layout, recompute="none")),
        "strategy": plan.strategy,
        "micro_batch_size": plan.batch.micro_batch_size,
        "accumulation": plan.batch.accumulation,
        "recompute": layout.recompute,
        "schedule": layout.schedule or ("1f1b" if layout.pp > 1 else "none"),
        "fits": plan.fits,
        "verdict": plan.memory.verdict,
        "memory_bytes": plan.memory.total,
        "host_bytes_per_node": plan.host_bytes,
        "gpus": step.gpus,
        "step_seconds": step.seconds,
        "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
        "mfu": step.mfu,
        "terms": step.terms,
        "reference_seconds": plan.reference_seconds,
        **({} if cost is None else {"cost": vars(cost)}),
    }


def nothing_fits(request: PlanRequest, candidates: int, nearest: Sequence[str]) -> str:
    """One line for a search without a result."""
    problem = f"none of {plural(candidates, 'candidate')} fits into {request.gpu.memory_bytes / _GIB:.1f} GiB"
    parameters = format_count(request.model.parameters.numel)
    near = f"nearest: {'; '.join(nearest)}" if nearest else "nothing near does"
    return f"{problem} ({parameters} parameters); {near}"
