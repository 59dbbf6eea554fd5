"""A timeline in a terminal: a row for each rank, colored or in ASCII, cut in its middle where there is no room."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.config.pipeline_schedules import Schedule
from toolkit.config.simulate_schedule import TimedOperation, Timeline
from toolkit.report.terminal import table_console
from toolkit.units import plural

_NAMES = {"F": "forward", "D": "backward", "B": "backward for the input", "W": "backward for the weights"}
_COLORS = {
    "F": ("#0072b2", "#3d97cc"),
    "D": ("#c04400", "#dc7030"),
    "B": ("#c04400", "#dc7030"),
    "W": ("#00705c", "#2f9a83"),
}
"""Two shades of each kind of pass; neighboring bars have different ones."""
_LINES = {"F": "-", "D": "=", "B": "=", "W": "~"}
"""Characters that tell passes apart in place of colors."""
_MOST_ROWS = 32
_HEAD = 0.6
"""Share of the columns for the beginning, where the middle is left out."""
_GAP = "..."


@dataclass(frozen=True, kw_only=True)
class _View:
    """The drawn part of a timeline: `shown` are columns, of which `scale` are a unit of time."""

    scale: float
    shown: Sequence[range]
    plain: bool
    is_sampled: bool = False
    """Whether passes are narrower than a column, which shows the one at its time."""

    @property
    def note(self) -> str:
        """Note about the part that is not shown; empty where all is."""
        if self.is_sampled:
            return "a column shows the pass at its time, of many; --svg draws all"
        if self.is_cut:
            return f"{_GAP} the middle of the step, which repeats what is left of it; --svg draws all"
        return ""

    @property
    def is_cut(self) -> bool:
        return len(self.shown) > 1

    @property
    def width(self) -> int:
        gap = len(_GAP) if self.is_cut else 0
        return sum(map(len, self.shown)) + gap

    def row(self, timeline: Timeline, rank: int) -> Text:
        """The passes of a rank, each a bar with its micro-batch."""
        cells: dict[int, tuple[str, str]] = {}
        for operation in timeline.operations(rank):
            begin = round(operation.start * self.scale)
            end = round(operation.end * self.scale)
            for part in self.shown:
                visible = range(max(begin, part.start), min(end, part.stop))
                if visible:
                    text, style = self._bar(operation, end - begin, timeline.schedule)
                    cells |= {column: (text[column - begin], style) for column in visible}
        out = Text()
        for place, part in enumerate(self.shown):
            out.append(_GAP if place else "", style="dim")
            for column in part:
                out.append(*cells.get(column, (" ", "")))
        return out

    def _bar(self, operation: TimedOperation, width: int, schedule: Schedule) -> tuple[str, str]:
        """Text and style: the number in the middle, or at the beginning without colors."""
        label = "" if self.is_sampled else str(operation.micro_batch)
        label = label if len(label) <= width else label[-1:]
        if self.plain:
            return label.ljust(width, _LINES[operation.kind]), ""
        shade = operation.micro_batch if schedule.virtual_stages == 1 else operation.stage // schedule.pp
        color = _COLORS[operation.kind][0 if self.is_sampled else shade % 2]
        return label.center(width), f"#ffffff on {color}"


def _view(timeline: Timeline, columns: int, *, plain: bool) -> _View:
    """All of the timeline where there is room, or its beginning and its end, or a sample of it."""
    forward, backward, weight = map(fmean, (timeline.costs.forward, timeline.costs.backward, timeline.costs.weight))
    shortest = min(forward, backward, weight) if timeline.schedule.splits_backward else min(forward, backward + weight)
    # Without colors the line behind a number says which pass it is.
    at_least = 1 + len(str(timeline.schedule.micro_batches - 1)) if plain else 1
    # Whole columns for the shortest pass, so that equal passes are equally wide.
    scale = max(at_least, int(columns / timeline.makespan * shortest)) / shortest
    total = round(timeline.makespan * scale)
    if total <= columns:
        return _View(scale=scale, shown=[range(total)], plain=plain)
    head = int((columns - len(_GAP)) * _HEAD)
    tail = columns - len(_GAP) - head
    if 2 * timeline.starts[-1][0] * scale <= head:
        return _View(scale=scale, shown=[range(head), range(total - tail, total)], plain=plain)
    return _View(scale=columns / timeline.makespan, shown=[range(columns)], plain=plain, is_sampled=True)


def print_timeline(timeline: Timeline, compared: Sequence[Timeline], *, blocking: bool) -> None:
    """The timeline with each rank's bubble and memory, a summary, and the other kinds, whose transfers never block."""
    console = table_console()
    console.print(Text(_title(timeline.schedule), style="bold"), soft_wrap=True)
    view = _print_ranks(console, timeline)
    for line in _summary(timeline, view):
        console.print(line, soft_wrap=True)
    console.print(_table(compared, timeline.schedule))
    if blocking:
        console.print(Text("Ranks wait for the transfers of 1f1b, and not for those of the others.", style="dim"))


def print_timelines(timelines: Mapping[str, Timeline]) -> None:
    """Timelines of one schedule on one scale of time, in seconds, below each other."""
    console = table_console()
    longest = max(timelines.values(), key=lambda timeline: timeline.makespan)
    for name, timeline in timelines.items():
        title = f"{name}, {timeline.makespan:.3g} s: {_title(timeline.schedule)}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        view = _print_ranks(console, timeline, longest.makespan)
        console.print(_summary(timeline, view)[-1], soft_wrap=True)
        console.print()
    console.print(_legend(longest.schedule, view))


def _print_ranks(console: Console, timeline: Timeline, makespan: float | None = None) -> _View:
    """A row for each rank. With `makespan` all of the timeline, on the scale of one that lasts so long."""
    schedule = timeline.schedule
    console.print()
    name = "stage" if schedule.virtual_stages == 1 else "rank"
    labels = [f"{name} {rank}" for rank in range(schedule.pp)]
    held = [_held(schedule, rank) for rank in range(schedule.pp)]
    label_width = len(labels[-1]) + 2
    held_width = max(len("in flight"), *map(len, held))
    columns = max(20, console.width - label_width - held_width - len("  bubble  "))
    plain = console.color_system is None or console.no_color
    if makespan is None:
        view = _view(timeline, columns, plain=plain)
    else:
        view = _View(scale=columns / makespan, shown=[range(columns)], plain=plain)
    heading = f"{'':{label_width + view.width}}  bubble  {'in flight':>{held_width}}"
    console.print(Text(heading, style="dim"), soft_wrap=True)
    for rank in _rows(schedule.pp):
        if rank is None:
            console.print(Text(f"{'':{label_width}}{_GAP}", style="dim"))
            continue
        line = Text(f"{labels[rank]:<{label_width}}").append(view.row(timeline, rank))
        line.append(f"{100 * timeline.bubbles[rank]:>6.1f} %  {held[rank]:>{held_width}}")
        console.print(line, soft_wrap=True)
    console.print()
    return view


def _title(schedule: Schedule) -> str:
    chunks = f", {schedule.virtual_stages} virtual stages each" if schedule.virtual_stages > 1 else ""
    ranks = plural(schedule.pp, "pipeline rank")
    return f"{schedule.kind}: {ranks}{chunks}, {plural(schedule.micro_batches, 'micro-batch', 'micro-batches')}"


def _held(schedule: Schedule, rank: int) -> str:
    whole, rest = schedule.held()[rank]
    return f"{whole:g} + {rest:g}" if schedule.splits_backward else f"{whole:.4g}"


def _rows(pp: int) -> Iterable[int | None]:
    """The ranks that have a row, and None where some are left out."""
    if pp <= _MOST_ROWS:
        return range(pp)
    half = _MOST_ROWS // 2
    return [*range(half), None, *range(pp - half, pp)]


def _summary(timeline: Timeline, view: _View) -> list[Text]:
    schedule = timeline.schedule
    notes = [view.note] if view.note else []
    if schedule.splits_backward:
        notes.insert(0, "in flight: whole micro-batches + those that keep only what their W needs")
    step = f"{timeline.step:.2f} F+B, where {schedule.micro_batches} would be without a bubble"
    bubble = Text.assemble("bubble ", (f"{100 * timeline.bubble:.1f} %", "bold"), f"; step {step}")
    return [_legend(schedule, view), *(Text(note, style="dim") for note in notes), bubble]


def _legend(schedule: Schedule, view: _View) -> Text:
    legend = Text()
    for kind in "FBW" if schedule.splits_backward else "FD":
        legend.append(_LINES[kind] * 3 if view.plain else "   ", style="" if view.plain else f"on {_COLORS[kind][0]}")
        legend.append(f" {_NAMES[kind]}   ")
    if schedule.virtual_stages > 1 and not view.plain and not view.is_sampled:
        legend.append("lighter: odd chunks")
    return legend


def _table(compared: Sequence[Timeline], asked: Schedule) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("schedule", no_wrap=True)
    for heading in ("virtual stages", "bubble", "step (F+B)", "most in flight"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in compared:
        schedule = row.schedule
        most = max(schedule.in_flight)
        cells = [f"{100 * row.bubble:.1f} %", f"{row.step:.2f}", f"{most:.4g}"]
        style = "bold" if schedule is asked else ""
        table.add_row(schedule.kind, str(schedule.virtual_stages), *cells, style=style)
    return table
