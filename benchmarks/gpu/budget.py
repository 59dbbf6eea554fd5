"""Steps in a given time: each has a limit, what fails says why on one line, what does not fit is named."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.launch.local_ranks import in_one_line, run_jobs

State = Literal["done", "failed", "not run"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a step ended. `value`: what it returned; `reason`: one line where it did not end well."""

    state: State
    value: Any = None
    reason: str = ""


class Budget:
    """The time until a deadline, of which a step gets at most its limit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started = time.monotonic()

    @property
    def left(self) -> float:
        return self.seconds - self.used

    @property
    def used(self) -> float:
        return time.monotonic() - self._started

    def attempt(self, function: Callable[[float], Any], *, needs: float, limit: float) -> Outcome:
        """Call `function` with its limit in seconds, unless less is left than the step needs."""
        if self.left < needs:
            return Outcome(state="not run", reason=f"needs {needs:.0f} s, {max(0.0, self.left):.0f} s were left")
        try:
            return Outcome(state="done", value=function(min(limit, self.left)))
        except Exception as error:  # whatever a step raises is a line of the page
            return Outcome(state="failed", reason=in_one_line(error))

    def on_ranks(self, function: Callable[[], Any], ranks: int, *, needs: float, limit: float) -> Outcome:
        """Call `function` on so many new ranks, which meet by themselves; the value is rank 0's."""

        def run(seconds: float) -> Any:
            calls = [(function, ranks)]
            ((_, outcome, _),) = run_jobs(calls, cores=ranks, timeout_seconds=seconds, joined=False)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome[0]

        return self.attempt(run, needs=needs, limit=limit)
