"""Messages of ranks in the heartbeat store: heartbeats, and one failure report. Imports no torch."""

import json
from dataclasses import asdict, dataclass
from typing import Self

PEER_FAILED = 76
"""Exit code of a rank that ends because of another one (EX_PROTOCOL of sysexits.h: the other side failed)."""


@dataclass(frozen=True, kw_only=True)
class _Message:
    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        values = json.loads(text)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@dataclass(frozen=True, kw_only=True)
class Heartbeat(_Message):
    """The progress of a rank. Durations are measured by the rank itself: clocks of machines are never compared."""

    rank: int
    host: str
    machine_id: str
    """Identifies a machine and a container in which process ids are valid."""
    pid: int
    step: int
    phase: str
    steps_started: int
    """Steps that this process has started: unlike `step`, it never decreases."""
    phases_started: int
    """Phases since the step started."""
    sequence: int
    """Number of heartbeats, which increases as long as the process can run Python."""
    stalled_seconds: float
    """Seconds since the main thread last reported progress."""
    limit_seconds: float
    """Seconds that this phase may take without progress; 0 means no limit."""
    in_collective: bool
    """Whether the main thread is seen waiting for other ranks."""
    exit_reason: str = ""
    """Reason why this rank is about to exit, in one line; empty otherwise."""
    exit_code: int = 0
    is_local_failure: bool = False
    """Whether the other ranks will not fail in the same way by themselves."""

    @property
    def progress(self) -> tuple[int, int]:
        """Equal for ranks that are in the same phase of the same step."""
        return self.steps_started, self.phases_started

    @property
    def location(self) -> str:
        """The step, if one has started, and the phase: `step 7 (backward)`."""
        return f"step {self.step} ({self.phase})" if self.step else self.phase

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True, kw_only=True)
class FailureReport(_Message):
    """Why the job ends. A job has one: the first that is published."""

    reporter: int
    """The rank that publishes it and prints `message`."""
    message: str
    exit_code: int = PEER_FAILED
    stack_ranks: tuple[int, ...] = ()
    """Ranks that print the stacks of their threads."""
    unreachable: int = 0
    """Number of ranks that cannot read this."""
