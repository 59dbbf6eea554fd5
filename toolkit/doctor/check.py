"""Check: one line of the doctor's page."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
"""`note`: training works, but slower, or without something that few need. `problem`: something will fail."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was looked at, what was found, and what to do about it."""

    topic: str
    name: str
    found: str
    state: State = "ok"
    mend: str | None = None

    def __post_init__(self) -> None:
        assert self.state == "ok" or self.mend, f"{self.name}: a {self.state} says what to do"
