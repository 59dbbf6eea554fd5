"""The errors that a user can cause. Each says what was given, what is allowed and what to do, on one line."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from toolkit.files import printable

Scope = Literal["job", "node", "rank"]
Setting = tuple[str, Any]
"""A field and a value for it: ("parallel.tp", 2)."""


def spell_setting(field: str, value: Any) -> str:
    """A setting in the spelling of recipes (`parallel.tp=2`) or options (`--micro 2`)."""
    if field == "world_size":
        return f"{value} rank{'s' * (value != 1)}"
    if field.startswith("--"):
        bare = "no " * (value is False) + field
        return bare if value is None or isinstance(value, bool) else f"{field} {printable(value)}"
    if value is None or isinstance(value, bool):
        return f"{field}={'null' if value is None else str(value).lower()}"
    value = list(value) if isinstance(value, tuple) else printable(value) if isinstance(value, str) else value
    return f"{field}={value}"


def _spell_remedy(field: str, value: Any) -> str:
    """A setting to make, which may be words: `parallel.tp to 1, 2 or 4`."""
    return f"{field} to {value}" if isinstance(value, str) and " " in value else spell_setting(field, value)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why settings are refused, as a value: each front end renders it once, in the spelling of its own options.

    `given` and `remedy` hold settings, or text where there is no field to set; the remedies are alternatives.
    """

    field: str
    """The field to look at; empty where none is to blame."""
    given: tuple[Setting | str, ...] = ()
    reason: str
    """What is allowed, or why this is not."""
    remedy: tuple[Setting | str, ...] = ()

    @classmethod
    def of(cls, field: str, value: Any, reason: str, *remedy: Setting | str) -> "Refusal":
        """Refuse one value of a field."""
        return cls.between(((field, value),), reason, *remedy)

    @classmethod
    def between(cls, given: tuple[Setting, ...], reason: str, *remedy: Setting | str) -> "Refusal":
        """Refuse values that do not go together; the field to look at is the first. Empty remedies are left out."""
        return cls(field=given[0][0], given=given, reason=reason, remedy=tuple(filter(None, remedy)))

    def __str__(self) -> str:
        return self.render()

    def render(self, spell: Callable[[str, Any], str] = spell_setting, *, verb: str = "set") -> str:
        """One line: `A=1 with B=2 and C=3: the reason. Set A=0, or B=4.`"""
        first, *others = _spelled(self.given, spell) or [""]
        *most, last = others or [""]
        given = f"{first}{' with ' * bool(others)}{', '.join(most)}{' and ' * bool(most)}{last}"
        text = f"{given}: {self.reason}." if given else self.reason
        remedies = _spelled(self.remedy, _spell_remedy if spell is spell_setting else spell)
        for index, item in enumerate(self.remedy):
            if not isinstance(item, str) and (index == 0 or isinstance(self.remedy[index - 1], str)):
                remedies[index] = f"{verb} {remedies[index]}"
        advice = ", or ".join(remedies)
        return f"{text} {advice[0].upper()}{advice[1:]}{'.' * (advice[-1] != '?')}" if advice else text

    def in_section(self, section: str) -> "Refusal":
        """The same about fields of a section of a recipe: `tp` becomes `parallel.tp`."""

        def prefixed(items: Sequence[Setting | str]) -> tuple[Setting | str, ...]:
            return tuple(
                item if isinstance(item, str) or item[0] == "world_size" else (f"{section}.{item[0]}", item[1])
                for item in items
            )

        field = f"{section}.{self.field}" if self.field else section
        return Refusal(field=field, given=prefixed(self.given), reason=self.reason, remedy=prefixed(self.remedy))


def _spelled(items: Sequence[Setting | str], spell: Callable[[str, Any], str]) -> list[str]:
    """Each item as text. A setting of the same section as the one before leaves its section out."""
    texts, section = [], None
    for item in items:
        if isinstance(item, str):
            texts.append(item)
            continue
        field, value = item
        own, _, name = field.rpartition(".")
        texts.append(spell(name if own and own == section else field, value))
        section = own
    return texts


Problems = str | Refusal | Iterable[str | Refusal]


class ToolkitError(Exception):
    """Base of every error that bad input can cause; the command line prints a line a problem and exits with 2.

    An error about settings carries a Refusal for each problem; one about a file's content or the operating system is a
    sentence with the path.
    """

    exit_code = 2
    scope: Scope = "rank"
    """Who meets the same error: every rank of the job, every rank of a machine, or this rank alone."""

    def __init__(self, found: Problems = "", refusals: Iterable[Refusal] = (), *, scope: Scope | None = None) -> None:
        """Take every problem found; `refusals` are those whose lines are among them."""
        problems = [found] if isinstance(found, str | Refusal) else list(found)
        self.problems = [str(problem) for problem in problems]
        self.refusals = [*refusals, *(problem for problem in problems if isinstance(problem, Refusal))]
        self.scope = scope or self.scope
        super().__init__("\n".join(self.problems))

    @property
    def refusal(self) -> Refusal | None:
        """The first problem as a value; None where the error is not about settings."""
        return next(iter(self.refusals), None)

    def as_refusal(self, field: str = "") -> Refusal:
        """The first problem as a value, with the message for its reason where there is none; `field`: to look at."""
        found = self.refusal or Refusal(field="", reason=str(self))
        return replace(found, field=field or found.field)

    @classmethod
    def of(cls, field: str, value: Any, reason: str, *remedy: Setting | str) -> Self:
        """The error that refuses one value of a field."""
        return cls(Refusal.between(((field, value),), reason, *remedy))

    @classmethod
    def between(cls, given: tuple[Setting, ...], reason: str, *remedy: Setting | str) -> Self:
        """The error that refuses values that do not go together."""
        return cls(Refusal.between(given, reason, *remedy))

    def __init_subclass__(cls, scope: Scope | None = None) -> None:
        cls.scope = scope or cls.scope

    def is_reported_by(self, env: Mapping[str, str]) -> bool:
        """Whether the rank with this environment is the one that prints the error."""
        if self.scope == "job":
            return env.get("RANK", "0") == "0"
        return self.scope == "rank" or env.get("LOCAL_RANK", "0") == "0"


class RecipeError(ToolkitError, scope="job"):
    """A recipe (or an override) that cannot be decoded. Holds every problem found."""


class LayoutError(ToolkitError, scope="job"):
    """A parallel layout that no engine can run, or that the world size does not multiply to."""


class BatchError(ToolkitError, scope="job"):
    """A global batch that does not split evenly into micro-batches and ranks."""


class ConfigError(ToolkitError, scope="job"):
    """A DeepSpeed JSON that cannot be read or that contradicts the recipe. Holds every conflict."""


class ModelError(ToolkitError, scope="node"):
    """A model that is unknown, unreadable, or does not fit the recipe."""


class DataError(ToolkitError, scope="node"):
    """Text or a tokenizer that is missing, empty, unreadable or does not fit the model."""


class RunError(ToolkitError, scope="node"):
    """A machine or environment that lacks what the recipe asks for."""


class RunDirectoryError(ToolkitError, scope="node"):
    """A run directory that cannot be used."""


class ReportError(ToolkitError):
    """A run that cannot be reported on, or a report that cannot be written."""


class CheckpointError(ToolkitError, scope="job"):
    """A checkpoint that cannot be written, is damaged, or does not fit the run that resumes from it.

    Where saving failed: `path` of the checkpoint, the `rank` that failed and its `reason`; `bytes_needed`, where there
    was no room. Every rank raises the same.
    """

    def __init__(
        self,
        message: str | Refusal,
        *,
        path: str | None = None,
        rank: int | None = None,
        reason: str | None = None,
        bytes_needed: int | None = None,
    ) -> None:
        self.path, self.rank, self.reason, self.bytes_needed = path, rank, reason, bytes_needed
        super().__init__(message)


class NonFiniteError(ToolkitError, scope="job"):
    """The loss or a gradient became NaN or infinite; the weights are those of the last good step."""


class PreemptedError(ToolkitError):
    """A signal ended the run at a step boundary; it can resume from its checkpoint."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again
    scope: Scope = "job"


class FinishedError(ToolkitError, scope="job"):
    """`--resume auto` found a run that has taken all its steps: nothing is left to do, and nothing failed."""

    exit_code = 0


def printed_lines(message: str, arguments: Iterable[str]) -> list[str]:
    """A message as lines to print: what the user gave cannot break a line, steer a terminal, or fill the screen."""
    for argument in arguments:
        for part in (argument, argument.partition("=")[2]):
            if part and not part.isprintable():
                message = message.replace(part, printable(part))
    lines = (line if line.isprintable() else ascii(line) for line in message.split("\n"))
    return [re.sub(r"\S{160,}", lambda word: f"{word[0][:80]}…{word[0][-40:]}", line) for line in lines]


def unusable(error: OSError) -> str:
    """The message for a path that the operating system refuses where no code expected it."""
    return f"{printable(error.filename)}: {error.strerror}. Name another path, or make this one usable."


def nearest(name: str, allowed: Iterable[str], *, cutoff: float = 0.6, most: int = 1) -> str:
    """' Did you mean X or Y?' for the closest of `allowed`; '' when nothing is close (cutoff 1: equal names only)."""
    spelled = {one.lower(): one for one in allowed}
    close = [spelled[one] for one in difflib.get_close_matches(name.lower(), list(spelled), n=most, cutoff=cutoff)]
    return f" Did you mean {' or '.join(filter(None, [', '.join(close[:-1]), close[-1]]))}?" if close else ""
