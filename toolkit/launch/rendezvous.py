"""`torchrun --rdzv_backend dstk`: torchrun's own `c10d` rendezvous, repaired for spare nodes and for wrong clocks.

torchrun keeps nodes beyond `--nnodes` in a list of redundant nodes. Nodes that could be let in are in another one, the
wait list: as soon as it has an entry, every node restarts its ranks. While ranks restart, there is room for redundant
nodes, so that they move to the wait list; those for which there is no place in the end stay there (torch 2.13). The
full job then restarts its ranks every second, and never trains again. With this backend, nodes that wait for a place in
a full job are redundant again in every state that a node reads.

A node writes the time of its heartbeats by its own clock, and others compare it with theirs: a node whose clock is more
than 15 s behind counts as lost at once (torch 2.13). With this backend a heartbeat has the time at which the reading
node saw that it had changed, by the clock of that node; likewise the time at which the others are no longer waited for.

setuptools' entry point `torchrun.handlers` makes the name known to torchrun, which therefore imports this file at every
start: it imports torch only when the backend is used.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

NAME = "dstk"
"""The value of `--rdzv_backend`."""

_State = tuple[bytes, Any]
"""A pickled state of the rendezvous, and the token with which it may be replaced."""


class RepairedBackend:
    """A backend of torchrun's dynamic rendezvous, in whose states spare nodes do not wait and times are this node's.

    `last_call_seconds`: how long a job that could start waits for more nodes.
    """

    def __init__(self, backend: RendezvousBackend, *, max_nodes: int, last_call_seconds: float) -> None:
        self._backend = backend
        self._max_nodes = max_nodes
        self._times = LocalTimes(last_call_seconds)

    @property
    def name(self) -> str:
        """The backend's name, for torchrun's messages."""
        return NAME

    def get_state(self) -> _State | None:
        """Return the state; None before the first node has set one."""
        answer = self._backend.get_state()
        return None if answer is None else (self._repaired(answer[0]), answer[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state if `token` is still that of the newest one.

        Return the newest state, and whether it is this one.
        """
        shared = pickle.loads(state)
        self._times.restore(shared)
        answer = self._backend.set_state(pickle.dumps(shared), token)
        return None if answer is None else (self._repaired(answer[0]), answer[1], answer[2])

    def _repaired(self, pickled: bytes) -> bytes:
        state = pickle.loads(pickled)
        if state.wait_list and state.complete and len(state.participants) >= self._max_nodes:
            state.redundancy_list |= state.wait_list
            state.wait_list.clear()
        self._times.localize(state)
        return pickle.dumps(state)


class LocalTimes:
    """The times of a shared state by the clock of this node: what it sees for the first time has happened just now."""

    def __init__(self, last_call_seconds: float) -> None:
        self._last_call = timedelta(seconds=last_call_seconds)
        self._heartbeats: dict[Any, _Seen] = {}
        self._deadline: _Seen | None = None

    def localize(self, state: Any) -> None:
        """Replace the times in a state that other nodes have written, in place."""
        now = datetime.now(UTC)
        seen = {}
        for node, written in state.last_heartbeats.items():
            earlier = self._heartbeats.get(node)
            is_known = earlier is not None and earlier.written == written
            seen[node] = earlier if earlier is not None and is_known else _Seen(written=written, local=now)
            state.last_heartbeats[node] = seen[node].local
        self._heartbeats = seen
        if state.deadline is None:
            self._deadline = None
        elif self._deadline is None or self._deadline.written != state.deadline:
            self._deadline = _Seen(written=state.deadline, local=now + self._last_call)
        if self._deadline is not None:
            state.deadline = self._deadline.local

    def restore(self, state: Any) -> None:
        """Put back the times that other nodes have written, in place. Those that this node has changed stay."""
        for node, local in state.last_heartbeats.items():
            seen = self._heartbeats.get(node)
            if seen is not None and seen.local == local:
                state.last_heartbeats[node] = seen.written
        if self._deadline is not None and state.deadline == self._deadline.local:
            state.deadline = self._deadline.written


@dataclass(frozen=True, kw_only=True)
class _Seen:
    written: datetime
    """The time by the clock of the node that wrote it."""
    local: datetime
    """What it is for this node."""


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous of a node from the options of torchrun, which are those of `c10d`."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

    backend, store = c10d_rendezvous_backend.create_backend(parameters)
    last_call = dynamic_rendezvous.RendezvousTimeout().last_call.total_seconds()
    last_call_seconds = float(parameters.get("last_call_timeout") or last_call)
    repaired = RepairedBackend(backend, max_nodes=parameters.max_nodes, last_call_seconds=last_call_seconds)
    return dynamic_rendezvous.create_handler(store, repaired, parameters)  # type: ignore[arg-type]


def handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what torchrun calls for `--rdzv_backend dstk`."""
    return create_handler
