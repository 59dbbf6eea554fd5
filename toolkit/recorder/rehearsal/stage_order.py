"""RecordedSchedule: the calls of a pipeline schedule by instruction, from which those of another stage follow.

Inner stages with the same layers run the same instructions, but in another order: in 1F1B a stage runs as many forward
passes ahead as there are stages behind it, and even and odd stages send and receive in turns. So one of them is
rehearsed, and its calls are put into the order of each of the others.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.recorder.rehearsal.collectives import Collective, CollectiveRecorder


@dataclass(frozen=True, kw_only=True)
class RecordedSchedule:
    """A schedule that a rank has run."""

    kind: type[Any]
    """The class of the schedule, of DeepSpeed or a subclass."""
    micro_batches: int
    stages: int
    instructions: tuple[str, ...]
    """Names of the instructions, in their order."""
    starts: tuple[int, ...]
    """Number of the rank's first call in or after each of them."""
    end: int
    """Number of the rank's first call behind the schedule."""

    def at_stage(self, stage: int, calls: Sequence[Collective]) -> list[Collective]:
        """Return the calls of this schedule, among all `calls` of the rank, in the order of another stage.

        Raises KeyError where that stage runs an instruction that this one does not.
        """
        blocks: dict[str, deque[Sequence[Collective]]] = defaultdict(deque)
        ends = (*self.starts[1:], self.end)
        for name, start, end in zip(self.instructions, self.starts, ends, strict=True):
            blocks[name].append(calls[start:end])
        ordered: list[Collective] = []
        schedule = self.kind(micro_batches=self.micro_batches, stages=self.stages, stage_id=stage)
        for name in _names(schedule):
            if not blocks[name]:
                raise KeyError(f"stage {stage} runs more of {name} than the stage that was rehearsed")
            ordered += blocks[name].popleft()
        return ordered


def calls_at_stage(
    calls: Sequence[Collective], schedules: Sequence[RecordedSchedule], stage: int
) -> tuple[Collective, ...]:
    """Return the calls of a rank as its counterpart at another stage makes them, from construction on."""
    ordered: list[Collective] = []
    position = 0
    for schedule in schedules:
        ordered += calls[position : schedule.starts[0]]
        ordered += schedule.at_stage(stage, calls)
        position = schedule.end
    ordered += calls[position:]
    return tuple(ordered)


class NotedSchedule:
    """A schedule that notes which calls a recorder sees in each instruction, while DeepSpeed's engine runs it."""

    def __init__(self, schedule: Any, recorder: CollectiveRecorder, noted: list[RecordedSchedule]) -> None:
        self._schedule = schedule
        self._recorder = recorder
        self._noted = noted

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers, as DeepSpeed asks for it."""
        buffers: int = self._schedule.num_pipe_buffers()
        return buffers

    def __iter__(self) -> Iterator[list[Any]]:
        names = []
        starts = []
        for instructions in self._schedule:
            for instruction in instructions:
                names.append(type(instruction).__name__)
                starts.append(len(self._recorder.recorded))
                yield [instruction]
        recorded = RecordedSchedule(
            kind=type(self._schedule),
            micro_batches=self._schedule.micro_batches,
            stages=self._schedule.stages,
            instructions=tuple(names),
            starts=tuple(starts),
            end=len(self._recorder.recorded),
        )
        self._noted.append(recorded)


def _names(schedule: Any) -> list[str]:
    return [type(instruction).__name__ for instructions in schedule for instruction in instructions]
