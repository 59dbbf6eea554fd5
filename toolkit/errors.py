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
        return "1 rank" if value == 1 else f"{value} ranks"
    if field.startswith("--"):
        if value is False:
            return f"no {field}"
        return field if value is None or value is True else f"{field} {printable(value)}"
    if value is None:
        return f"{field}=null"
    if isinstance(value, bool):
        return f"{field}={str(value).lower()}"
    if isinstance(value, tuple):
        value = list(value)
    elif isinstance(value, str):
        value = printable(value)
    return f"{field}={value}"


def _spell_remedy(field: str, value: Any) -> str:
    """A setting to make, which may be words: `parallel.tp to 1, 2 or 4`."""
    return f"{field} to {value}" if isinstance(value, str) and " " in value else spell_setting(field, value)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why settings are refused, as a value: each front end renders it once, in the spelling of its own options.

    `settings` and `remedy` hold settings, or text where there is no field to set; the remedies are alternatives.
    """

    field: str
    """The field to look at; empty where none is to blame."""
    settings: tuple[Setting | str, ...] = ()
    """The settings that are refused."""
    reason: str
    """The rule that the settings break: what is allowed, or why these are not."""
    remedy: tuple[Setting | str, ...] = ()

    @classmethod
    def of(cls, field: str, value: Any, reason: str, *remedy: Setting | str) -> "Refusal":
        """Refuse one value of a field."""
        return cls.between(((field, value),), reason, *remedy)

    @classmethod
    def between(cls, settings: tuple[Setting, ...], reason: str, *remedy: Setting | str) -> "Refusal":
        """Refuse values that do not go together; the field to look at is the first. Empty remedies are left out."""
        return cls(field=settings[0][0], settings=settings, reason=reason, remedy=tuple(filter(None, remedy)))

    def __str__(self) -> str:
        return self.render()

    def render(self, spell: Callable[[str, Any], str] = spell_setting, *, verb: str = "set") -> str:
        """One line: `A=1 with B=2 and C=3: the reason. Set A=0, or B=4.`"""
        settings = _spelled(self.settings, spell)
        text = f"{_joined(settings)}: {self.reason}." if settings else self.reason
        remedies = _spelled(self.remedy, _spell_remedy if spell is spell_setting else spell)
        for index, setting in enumerate(self.remedy):
            if not isinstance(setting, str) and (index == 0 or isinstance(self.remedy[index - 1], str)):
                remedies[index] = f"{verb} {remedies[index]}"
        advice = ", or ".join(remedies)
        if not advice:
            return text
        end = "" if advice.endswith("?") else "."
        return f"{text} {advice[0].upper()}{advice[1:]}{end}"

    def in_section(self, section: str) -> "Refusal":
        """Return the refusal about fields of a section of a recipe: `tp` becomes `parallel.tp`."""

        def prefixed(settings: Sequence[Setting | str]) -> tuple[Setting | str, ...]:
            return tuple(
                setting
                if isinstance(setting, str) or setting[0] == "world_size"
                else (f"{section}.{setting[0]}", setting[1])
                for setting in settings
            )

        field = f"{section}.{self.field}" if self.field else section
        return Refusal(field=field, settings=prefixed(self.settings), reason=self.reason, remedy=prefixed(self.remedy))


def _joined(settings: Sequence[str]) -> str:
    """`A`, `A with B`, `A with B and C`, `A with B, C and D`."""
    first, *others = settings
    if not others:
        return first
    *most, last = others
    if not most:
        return f"{first} with {last}"
    return f"{first} with {', '.join(most)} and {last}"


def _spelled(settings: Sequence[Setting | str], spell: Callable[[str, Any], str]) -> list[str]:
    """Each setting as text. A setting of the same section as the one before leaves its section out."""
    texts = []
    last_section = None
    for setting in settings:
        if isinstance(setting, str):
            texts.append(setting)
            continue
        field, value = setting
        section, _, name = field.rpartition(".")
        texts.append(spell(name if section and section == last_section else field, value))
        last_section = section
    return texts


Problems = str | Refusal | Iterable[str | Refusal]


class ToolkitError(Exception):
    """Base of every error that bad input can cause; the command line prints a line a problem and exits with 2.

    An error about settings carries a Refusal for each problem; one about a file's content or the operating system is a
    sentence with the path.
    """

    exit_code = 2
    scope: Scope = "rank"
    """Processes that meet the same error: every rank of the job, every rank of a machine, or this rank alone."""

    def __init__(
        self, problems: Problems = "", refusals: Iterable[Refusal] = (), *, scope: Scope | None = None
    ) -> None:
        """Take a problem, or all that were found; `refusals` are those whose lines are among them."""
        listed = [problems] if isinstance(problems, str | Refusal) else list(problems)
        self.problems = [str(problem) for problem in listed]
        self.refusals = [*refusals, *(problem for problem in listed if isinstance(problem, Refusal))]
        self.scope = scope or self.scope
        super().__init__("\n".join(self.problems))

    @property
    def refusal(self) -> Refusal | None:
        """The first problem as a value; None where the error is not about settings."""
        return next(iter(self.refusals), None)

    def as_refusal(self, field: str = "") -> Refusal:
        """The first problem as a value; an error without one becomes a refusal whose reason is the message.

        `field` replaces the field to look at.
        """
        refusal = self.refusal or Refusal(field="", reason=str(self))
        return replace(refusal, field=field or refusal.field)

    @classmethod
    def of(cls, field: str, value: Any, reason: str, *remedy: Setting | str) -> Self:
        """The error that refuses one value of a field."""
        return cls(Refusal.between(((field, value),), reason, *remedy))

    @classmethod
    def between(cls, settings: tuple[Setting, ...], reason: str, *remedy: Setting | str) -> Self:
        """The error that refuses values that do not go together."""
        return cls(Refusal.between(settings, reason, *remedy))

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
        self.path = path
        self.rank = rank
        self.reason = reason
        self.bytes_needed = bytes_needed
        super().__init__(message)


class NonFiniteError(ToolkitError, scope="job"):
    """The loss or a gradient became NaN or infinite; the weights are those of the last good step."""


class ReplicaError(ToolkitError, scope="job"):
    """Ranks that must hold the same weights or optimizer states hold different ones, and a rollback is not possible."""


class PreemptedError(ToolkitError):
    """A signal ended the run at a step boundary; it can resume from its checkpoint."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again
    scope: Scope = "job"


class FinishedError(ToolkitError, scope="job"):
    """`--resume auto` found a run that has taken all its steps: nothing is left to do, and nothing failed."""

    exit_code = 0


class SpareError(ToolkitError, scope="rank"):
    """This rank had no part in the layout of an elastic launch, and the run has ended: nothing failed."""

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


def closest(name: str, allowed: Iterable[str], *, cutoff: float = 0.6, most: int = 1) -> list[str]:
    """The names among `allowed` that are spelled like `name`, the closest first (cutoff 1: equal names only)."""
    spelled = {candidate.lower(): candidate for candidate in allowed}
    close = difflib.get_close_matches(name.lower(), list(spelled), n=most, cutoff=cutoff)
    return [spelled[lower] for lower in close]


def nearest(name: str, allowed: Iterable[str], *, cutoff: float = 0.6, most: int = 1) -> str:
    """' Did you mean X or Y?' for the closest of `allowed`; '' when nothing is close (cutoff 1: equal names only)."""
    close = closest(name, allowed, cutoff=cutoff, most=most)
    if not close:
        return ""
    *others, last = close
    choices = f"{', '.join(others)} or {last}" if others else last
    return f" Did you mean {choices}?"
