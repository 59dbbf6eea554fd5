"""MachineCheck: one line of the doctor's output."""

from dataclasses import dataclass
from typing import Literal

CheckState = Literal["ok", "note", "problem"]
"""`note`: training works, but slower or without something that few need. `problem`: something will fail."""


@dataclass(frozen=True, kw_only=True)
class MachineCheck:
    """What was checked, what was found, and how to fix it."""

    topic: str = ""
    name: str
    found: str
    state: CheckState = "ok"
    fix: str | None = None

    def __post_init__(self) -> None:
        assert self.state == "ok" or self.fix, f"{self.name}: a {self.state} needs a fix"


def ok(name: str, found: str) -> MachineCheck:
    """Return a check without a finding."""
    return MachineCheck(name=name, found=found)


def note(name: str, found: str, fix: str) -> MachineCheck:
    """Return a note."""
    return MachineCheck(name=name, found=found, state="note", fix=fix)


def problem(name: str, found: str, fix: str) -> MachineCheck:
    """Return a problem."""
    return MachineCheck(name=name, found=found, state="problem", fix=fix)
