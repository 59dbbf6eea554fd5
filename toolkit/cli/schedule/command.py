"""`dstk schedule`: the simulated timeline of a pipeline schedule, its bubble, and what ranks hold in memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from toolkit.cli import Count, FiniteRange, option_of
from toolkit.cli.json_output import json_option, print_json
from toolkit.config.pipeline_schedules import KINDS, Kind, Schedule, schedule_of
from toolkit.config.simulate_schedule import ScheduleCosts, Timeline, simulate
from toolkit.errors import LayoutError, ReportError, spell_setting
from toolkit.files import printable, reason_of
from toolkit.planner.blocking_transfers import simulate_blocking

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_OPERATIONS = 500_000
"""Most operations of one timeline, which take about a second."""


@click.command()
@click.option("--pp", type=Count(max=4096), help="Pipeline ranks.")
@click.option("--micro-batches", type=Count(max=65536), help="Micro-batches of a step.")
@click.option("--run", metavar="DIR", help="Show the last step that train.profile traced in a run, and its simulation.")
@click.option("--kind", type=click.Choice(KINDS), default="1f1b", show_default=True, help="The schedule.")
@click.option(
    "--virtual-stages",
    type=Count(max=64),
    help="Chunks of the model on a rank: interleaved has 2 or more.  [default: 2 for interleaved and zb-v, else 1]",
)
@click.option(
    "--max-pending-weights",
    type=Count(max=65536),
    help="The most passes W that wait on a rank, with zb-h1 and zb-v.  [default: as many as the schedule lets wait]",
)
@click.option(
    "--backward",
    type=FiniteRange(min=0, max=1e6, min_open=True),
    default=2.0,
    show_default=True,
    help="Time of a backward pass where a forward pass takes 1; 3 with full recomputation.",
)
@click.option(
    "--comm",
    type=FiniteRange(min=0, max=1e6),
    default=0.0,
    show_default=True,
    help="Time from one stage to the next, where a rank's forward pass takes 1.",
)
@click.option("--blocking", is_flag=True, help="Ranks wait for transfers, as in DeepSpeed's own 1f1b.")
@click.option("--stage-times", metavar="LIST", help="Relative times of ranks, or of all virtual stages: 1,1,1,1.3.")
@click.option("--svg", metavar="FILE", help="Draw the timeline.")
@json_option("Every operation with its times, as JSON.")
def command(
    pp: int | None, micro_batches: int | None, run: str | None, kind: str, virtual_stages: int | None,
    max_pending_weights: int | None, backward: float, comm: float, blocking: bool, stage_times: str | None,
    svg: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Simulate a pipeline schedule: its timeline, its bubble, and the micro-batches that every rank holds in memory.

    parallel.schedule in a recipe trains with any of them. Without it DeepSpeed's own instructions run 1f1b, in which
    ranks wait for transfers (--blocking). Numbers in the timeline are micro-batches.

    \b
    dstk schedule --pp 4 --micro-batches 8
    dstk schedule --pp 4 --micro-batches 8 --kind interleaved --virtual-stages 2 --svg timeline.svg
    dstk schedule --pp 4 --micro-batches 16 --stage-times 1,1,1,1.3 --comm 0.1 --backward 3
    dstk schedule --run runs/mine --svg timeline.svg
    """
    if svg is not None and (Path(svg).suffix != ".svg" or (Path(svg).exists() and not Path(svg).is_file())):
        raise ReportError.of("--svg", svg, "the picture is an SVG file", "name a file that ends in .svg")
    if run is not None:
        _show_run(Path(run), svg, as_json=as_json)
        return
    for name, value in (("--pp", pp), ("--micro-batches", micro_batches)):
        if value is None:
            raise click.MissingParameter(param_hint=f"'{name}'", param_type="option")
    assert pp is not None
    assert micro_batches is not None
    asked = _schedule(cast(Kind, kind), pp, micro_batches, virtual_stages, max_pending_weights)
    times = _stage_times(stage_times, asked)
    if blocking and kind != "1f1b":
        settings = (("--blocking", None), ("--kind", kind))
        raise LayoutError.between(settings, "DeepSpeed's own instructions run 1f1b only", "leave --blocking out")
    timeline = _timeline(asked, backward, comm, times, blocking=blocking)
    others = _comparison(timeline, backward, comm, times)
    if svg is not None:
        _draw(Path(svg), [timeline])
    if as_json:
        print_json({"blocking": blocking} | _to_json(timeline, others))
        return
    from toolkit.cli.schedule.terminal import print_timeline

    print_timeline(timeline, others, blocking=blocking)


def _schedule(
    kind: Kind, pp: int, micro_batches: int, virtual_stages: int | None, max_pending_weights: int | None
) -> Schedule:
    operations = 3 * pp * micro_batches * (virtual_stages or 2)
    if operations > _MOST_OPERATIONS:
        settings = (("--pp", pp), ("--micro-batches", micro_batches))
        reason = f"up to {operations:,} operations, and at most {_MOST_OPERATIONS:,} are simulated"
        raise LayoutError.between(settings, reason, "lower one of them: a longer step repeats its middle")
    try:
        return schedule_of(
            kind,
            pp=pp,
            micro_batches=micro_batches,
            virtual_stages=virtual_stages,
            max_pending_weights=max_pending_weights,
        )
    except LayoutError as error:
        raise LayoutError(_rendered(error), error.refusals) from None


def _rendered(error: LayoutError) -> str:
    """The error about a schedule in this command's options."""

    def spell(field: str, value: Any) -> str:
        return spell_setting(option_of(field), value)

    return error.as_refusal().render(spell, verb="use")


def _stage_times(text: str | None, schedule: Schedule) -> "Sequence[float]":
    """Decode --stage-times. Raises LayoutError for what is not a positive number for each rank or stage."""
    if text is None:
        return ()
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError:
        times = []
    if not times or not all(1e-6 <= time <= 1e6 for time in times):
        raise LayoutError.of("--stage-times", text, "numbers above 0, with commas between them", "give 1,1,1.3 or so")
    allowed = sorted({schedule.pp, len(schedule.rank_of)})
    if len(times) not in allowed:
        settings = (("--stage-times", text), ("--pp", schedule.pp))
        reason = f"{len(times)} of {schedule.pp} ranks"
        if len(allowed) > 1:
            reason += f" or {allowed[-1]} stages"
        raise LayoutError.between(settings, reason, "give one for each")
    return times


def _timeline(
    schedule: Schedule, backward: float, comm: float, times: "Sequence[float]", *, blocking: bool = False
) -> Timeline:
    costs = ScheduleCosts.relative(schedule, backward=backward, transfer=comm, stage_times=times)
    return simulate_blocking(schedule, costs) if blocking else simulate(schedule, costs)


def _comparison(timeline: Timeline, backward: float, comm: float, times: "Sequence[float]") -> list[Timeline]:
    """All kinds for the same ranks, micro-batches and costs; the one that was asked for is `timeline` itself."""
    asked = timeline.schedule
    if len(times) != asked.pp and times:  # other kinds have other stages: what each rank has in all
        by_rank = [
            [time for time, place in zip(times, asked.rank_of, strict=True) if place == rank]
            for rank in range(asked.pp)
        ]
        times = [sum(parts) / asked.virtual_stages for parts in by_rank]
    rows = []
    for kind in KINDS:
        if kind == asked.kind:
            rows.append(timeline)
        else:
            schedule = schedule_of(kind, pp=asked.pp, micro_batches=asked.micro_batches)
            rows.append(_timeline(schedule, backward, comm, times))
    return rows


def _show_run(run: Path, svg: str | None, *, as_json: bool) -> None:
    """Show what a run's ranks did in its last traced step, above what the simulator says of passes that long."""
    from toolkit.report.measured_timeline import read_timelines

    measured, simulated = read_timelines(run)
    if svg is not None:
        _draw(Path(svg), [measured, simulated], names=("measured", "simulated"))
    if as_json:
        print_json({"measured": _to_json(measured, []), "simulated": _to_json(simulated, [])})
        return
    from toolkit.cli.schedule.terminal import print_timelines

    print_timelines({"measured": measured, "simulated": simulated})


def _draw(path: Path, timelines: "Sequence[Timeline]", names: "Sequence[str]" = ()) -> None:
    from toolkit.report.schedule_picture import schedule_picture

    try:
        path.write_text(schedule_picture(timelines, names), encoding="utf-8")
    except OSError as error:
        raise ReportError(
            f"--svg {printable(path)}: {reason_of(error)}. Name a file in a directory that exists."
        ) from None


def _to_json(timeline: Timeline, compared: "Sequence[Timeline]") -> dict[str, Any]:
    schedule = timeline.schedule
    ranks = [
        {
            "rank": rank,
            "bubble": timeline.bubbles[rank],
            "busy": timeline.busy[rank],
            "in_flight": schedule.in_flight[rank],
            "operations": [operation._asdict() for operation in timeline.operations(rank)],
        }
        for rank in range(schedule.pp)
    ]
    rows = [
        {"kind": row.schedule.kind, "virtual_stages": row.schedule.virtual_stages} | _facts(row) for row in compared
    ]
    asked = {
        "kind": schedule.kind,
        "pp": schedule.pp,
        "micro_batches": schedule.micro_batches,
        "virtual_stages": schedule.virtual_stages,
    }
    return asked | _facts(timeline) | {"makespan": timeline.makespan, "ranks": ranks, "compared": rows}


def _facts(timeline: Timeline) -> dict[str, float]:
    return {"bubble": timeline.bubble, "step": timeline.step, "most_in_flight": max(timeline.schedule.in_flight)}
