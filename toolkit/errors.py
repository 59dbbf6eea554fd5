"""The errors a user can reach. Each message says what was given, what is allowed, and what to do, on one line."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Literal

Scope = Literal["job", "node", "rank"]


class ToolkitError(Exception):
    """Base of every error that bad input can cause; the command line prints it as one line and exits with 2."""

    exit_code = 2
    scope: Scope = "rank"
    """Who meets the same error: every rank of the job, every rank of a machine, or this rank alone."""

    def is_reported_by(self, env: Mapping[str, str]) -> bool:
        """Whether the rank with this environment is the one that prints the error."""
        if self.scope == "job":
            return env.get("RANK", "0") == "0"
        return self.scope == "rank" or env.get("LOCAL_RANK", "0") == "0"


class RecipeError(ToolkitError):
    """A recipe (or an override) that cannot be decoded. Holds every problem found, one line each."""

    scope: Scope = "job"

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class LayoutError(ToolkitError):
    """A parallel layout that no engine can run, or that the world size does not multiply to."""

    scope: Scope = "job"


class BatchError(ToolkitError):
    """A global batch that does not split evenly into micro-batches and ranks."""

    scope: Scope = "job"


class ConfigError(ToolkitError):
    """A DeepSpeed JSON that cannot be read or that contradicts the recipe. Holds every conflict, one line each."""

    scope: Scope = "job"


class ModelError(ToolkitError):
    """A model that is unknown, unreadable, or does not fit the recipe."""

    scope: Scope = "node"


class DataError(ToolkitError):
    """Text or a tokenizer that is missing, empty, unreadable or does not fit the model."""

    scope: Scope = "node"


class RunError(ToolkitError):
    """A machine or environment that lacks what the recipe asks for."""

    scope: Scope = "node"


class RunDirectoryError(ToolkitError):
    """A run directory that cannot be used."""

    scope: Scope = "node"


class ReportError(ToolkitError):
    """A run that cannot be reported on, or a report that cannot be written."""


class CheckpointError(ToolkitError):
    """A checkpoint that cannot be written, or is damaged, or does not fit the run that shall go on with it.

    Where saving failed: `path` of the checkpoint, the `rank` that failed and its `reason`; `bytes_needed`, where there
    was no room. Every rank raises the same.
    """

    scope: Scope = "job"

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        rank: int | None = None,
        reason: str | None = None,
        bytes_needed: int | None = None,
    ) -> None:
        self.path, self.rank, self.reason, self.bytes_needed = path, rank, reason, bytes_needed
        super().__init__(message)


class NonFiniteError(ToolkitError):
    """The loss or a gradient became NaN or infinite; the weights are those of the last good step."""

    scope: Scope = "job"


class PreemptedError(ToolkitError):
    """A signal ended the run at a step boundary; it can go on from its checkpoint."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again
    scope: Scope = "job"


def nearest(name: str, allowed: Iterable[str], *, cutoff: float = 0.6) -> str:
    """' Did you mean X?' for the closest of `allowed`, or '' when nothing is close: 1 is the same."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]}?" if close else ""
