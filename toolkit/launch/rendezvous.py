"""`torchrun --rdzv_backend dstk`: torchrun's own `c10d` rendezvous, repaired for jobs with spare nodes.

torchrun keeps nodes beyond `--nnodes` in a list of redundant nodes. Nodes that could be let in are in another one, the
wait list: as soon as it has an entry, every node restarts its ranks. While ranks restart, there is room for redundant
nodes, so that they move to the wait list; those for which there is no place in the end stay there (torch 2.13). The
full job then restarts its ranks every second, and never trains again. With this backend, nodes that wait for a place in
a full job are redundant again in every state that a node reads.

setuptools' entry point `torchrun.handlers` makes the name known to torchrun, which therefore imports this file at every
start: it imports torch only when the backend is used.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

NAME = "dstk"
"""The value of `--rdzv_backend`."""

_State = tuple[bytes, Any]
"""A pickled state of the rendezvous, and the token with which it may be replaced."""


class SpareNodes:
    """A backend of torchrun's dynamic rendezvous, in whose states the waiting nodes of a full job are redundant."""

    def __init__(self, backend: RendezvousBackend, max_nodes: int) -> None:
        self._backend = backend
        self._max_nodes = max_nodes

    @property
    def name(self) -> str:
        """The backend's name, for torchrun's messages."""
        return NAME

    def get_state(self) -> _State | None:
        """Return the state; None before the first node has set one."""
        answer = self._backend.get_state()
        return None if answer is None else (self._with_spares(answer[0]), answer[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state if `token` is still that of the newest one.

        Return the newest state, and whether it is this one.
        """
        answer = self._backend.set_state(state, token)
        return None if answer is None else (self._with_spares(answer[0]), answer[1], answer[2])

    def _with_spares(self, pickled: bytes) -> bytes:
        state = pickle.loads(pickled)
        if not state.wait_list or not state.complete or len(state.participants) < self._max_nodes:
            return pickled
        state.redundancy_list |= state.wait_list
        state.wait_list.clear()
        return pickle.dumps(state)


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous of a node from the options of torchrun, which are those of `c10d`."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

    backend, store = c10d_rendezvous_backend.create_backend(parameters)
    with_spares = SpareNodes(backend, parameters.max_nodes)
    return dynamic_rendezvous.create_handler(store, with_spares, parameters)  # type: ignore[arg-type]


def handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what torchrun calls for `--rdzv_backend dstk`."""
    return create_handler
