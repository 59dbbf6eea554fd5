"""What a rank tells the others about itself, and what one of them finds. Imports no torch."""

import json
from dataclasses import asdict, dataclass
from typing import Self

PEER_FAILED = 76
"""Exit code of a rank that ends because of another one (EX_PROTOCOL of sysexits.h: the other side failed)."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a rank is. `beat` is a count that moves as long as the process can run Python.

    Times are ages, measured by the rank itself: clocks of different machines are never compared.
    """

    rank: int
    host: str
    machine: str
    """Differs between machines and between containers; process ids mean something within one."""
    pid: int
    step: int
    phase: str
    begun: int
    """Steps that this process has begun: unlike `step`, it never goes back."""
    turn: int
    """Phases since the step began."""
    beat: int
    still_seconds: float
    """Since the main thread last went on."""
    limit_seconds: float
    """How long it may be still in this phase; 0: for ever."""
    in_collective: bool
    """Whether it is seen to wait for other ranks."""
    left: str = ""
    """Why this rank gives up, in one line."""
    left_with: int = 0
    """The exit code to that."""
    is_alone: bool = False
    """Whether the other ranks will not come to the same end by themselves."""

    @property
    def position(self) -> tuple[int, int]:
        """Ranks that are in step with each other are at the same."""
        return self.begun, self.turn

    @property
    def place(self) -> str:
        """The same in words."""
        return f"step {self.step} ({self.phase})" if self.begun else self.phase

    @property
    def name(self) -> str:
        """Of the rank."""
        return f"rank {self.rank} ({self.host})"

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the job ends. There is one for a job: the first."""

    by: int
    """The rank that found it, and prints `line` where there is one."""
    line: str
    code: int = PEER_FAILED
    """With which ranks end."""
    stacks_of: tuple[int, ...] = ()
    """Ranks that show what their threads do."""
    unheard: int = 0
    """How many ranks will not read this."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"stacks_of": tuple(values["stacks_of"])})
