"""Key: what is told about one key of a DeepSpeed config."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.dsconfig.job import ConfigJob


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key. `default` and `why` may depend on the job."""

    what: str
    default: Any = None
    """What DeepSpeed takes where the key is absent; a function of the job where that depends on others."""
    why: str | Callable[[ConfigJob], str]

    def default_in(self, job: ConfigJob) -> Any:
        """DeepSpeed's default in this job."""
        return self.default(job) if callable(self.default) else self.default

    def why_in(self, job: ConfigJob) -> str:
        """Why the job has the value that it has."""
        return self.why if isinstance(self.why, str) else self.why(job)
