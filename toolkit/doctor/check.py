"""MachineCheck: one line of the doctor's output."""

from dataclasses import dataclass
from typing import Literal

CheckState = Literal["ok", "note", "problem"]
"""`note`: training works, but slower or without something that few need. `problem`: something will fail."""


@dataclass(frozen=True, kw_only=True)
class MachineCheck:
    """One check: its name, the fact it is about, and how to fix a problem."""

    topic: str = ""
    name: str
    fact: str
    state: CheckState = "ok"
    fix: str | None = None

    def __post_init__(self) -> None:
        assert self.state == "ok" or self.fix, f"{self.name}: a {self.state} needs a fix"


def ok(name: str, fact: str) -> MachineCheck:
    """Return a check without a problem."""
    return MachineCheck(name=name, fact=fact)


def note(name: str, fact: str, fix: str) -> MachineCheck:
    """Return a note."""
    return MachineCheck(name=name, fact=fact, state="note", fix=fix)


def problem(name: str, fact: str, fix: str) -> MachineCheck:
    """Return a problem."""
    return MachineCheck(name=name, fact=fact, state="problem", fix=fix)
