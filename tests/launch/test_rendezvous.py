"""torchrun's rendezvous with spare nodes: ranks of a full job do not restart because a spare node waits."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

PLACES = 2
NODES = 4


class Job:
    """Nodes that join a job with two places."""

    def __init__(self, backend: str, store: Path) -> None:
        self.nodes = [rendezvous(backend, store) for _ in range(NODES)]
        self.trains = [False] * NODES
        self.threads: list[threading.Thread] = []

    def join(self, node: int) -> None:
        """Have a node join in the background, or leave and join again, as torchrun does when its ranks restart."""
        self.trains[node] = False

        def join() -> None:
            with suppress(RendezvousError):  # the job is closed
                self.nodes[node].next_rendezvous()
                self.trains[node] = True

        self.threads.append(threading.Thread(target=join, daemon=True))
        self.threads[-1].start()

    def waiting(self, node: int) -> int:
        """How many nodes wait to be let in, as this one is told: if any does, torchrun restarts its ranks."""
        return self.nodes[node].num_nodes_waiting()

    def wait_until_full(self) -> list[int]:
        """Return the nodes that train, when no place is free."""
        wait_until(lambda: sum(self.trains) == PLACES)
        return [node for node in range(NODES) if self.trains[node]]

    def close(self) -> None:
        self.nodes[0].set_closed()
        for thread in self.threads:
            thread.join(60)
        for node in self.nodes:
            node.shutdown()


@contextmanager
def job(backend: str, folder: Path) -> Iterator[Job]:
    made = Job(backend, folder / "store")
    try:
        yield made
    finally:
        made.close()


def rendezvous(backend: str, store: Path) -> RendezvousHandler:
    parameters = RendezvousParameters(
        backend=backend,
        endpoint=str(store),
        run_id="job",
        min_nodes=PLACES,
        max_nodes=PLACES,
        local_addr="127.0.0.1",
        store_type="file",
        keep_alive_interval=1,
    )
    return get_rendezvous_handler(parameters)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def restart(job: Job) -> list[int]:
    """Restart the ranks of both nodes that train, one noticing it later than spare nodes; who waits then, for each."""
    for node in range(NODES):
        job.join(node)
    first, second = job.wait_until_full()
    job.join(first)
    wait_until(lambda: job.waiting(second) == NODES - 1)
    job.join(second)
    return [job.waiting(node) for node in job.wait_until_full()]


def test_spare_nodes_that_come_too_late_do_not_restart_a_full_job(tmp_path: Path) -> None:
    with job("dstk", tmp_path) as spares:
        assert restart(spares) == [0, 0]


def test_torchruns_own_rendezvous_would_restart_it_for_ever(tmp_path: Path) -> None:
    """If this fails, torch has repaired it, and the backend of this toolkit can go."""
    with job("c10d", tmp_path) as spares:
        assert restart(spares) != [0, 0]


@pytest.mark.parametrize("backend", ["dstk", "c10d"])
def test_a_free_place_is_offered_to_a_node_that_waits(backend: str, tmp_path: Path) -> None:
    with job(backend, tmp_path) as nodes:
        for node in range(PLACES):
            nodes.join(node)
        nodes.wait_until_full()
        nodes.join(0)
        wait_until(lambda: nodes.waiting(1) == 1)
