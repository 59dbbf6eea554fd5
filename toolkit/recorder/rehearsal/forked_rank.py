"""ForkedRank: the rehearsal of one rank in a forked process, because engines change the process that they run in."""

import multiprocessing as mp
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.recorder.rehearsal.rank_kinds import RankKind
from toolkit.recorder.rehearsal.rank_step import RankStep, RehearsalFailure


class ForkedRank:
    """A process that rehearses a rank of a kind. `rehearse`: called there; what it returns or raises is the outcome."""

    def __init__(self, kind: RankKind, rehearse: Callable[[], RankStep]) -> None:
        self.kind = kind
        context = mp.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        sys.stdout.flush()
        self._process = context.Process(target=_send_outcome, args=(rehearse, sender), daemon=True)
        self._process.start()
        sender.close()

    def outcome(self) -> RankStep:
        """Wait for the rank. Raises its ToolkitError or RehearsalFailure, and RuntimeError where it cannot go on."""
        try:
            outcome = pickle.loads(self._receiver.recv_bytes())
        except EOFError as error:
            self._process.join()
            died = f"its process ended with exit code {self._process.exitcode}"
            raise RuntimeError(f"rank {self.kind.rank} cannot be rehearsed: {died}") from error
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, str):
            raise RuntimeError(f"rank {self.kind.rank} cannot be rehearsed:\n{outcome}")
        assert isinstance(outcome, RankStep)
        return outcome

    def end(self) -> None:
        """End the process, whether or not its outcome was waited for."""
        self._receiver.close()
        self._process.terminate()
        self._process.join()


def _send_outcome(rehearse: Callable[[], RankStep], sender: Any) -> None:
    try:
        outcome: Any = rehearse()
    except (ToolkitError, RehearsalFailure) as error:
        outcome = error
    except BaseException:
        outcome = traceback.format_exc()
    sender.send_bytes(pickle.dumps(outcome))
