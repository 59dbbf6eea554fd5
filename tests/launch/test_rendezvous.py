"""torchrun's rendezvous with spare nodes: ranks of a full job do not restart because a spare node waits."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from toolkit.launch import rendezvous as rendezvous_file
from toolkit.launch.rendezvous import LocalTimes

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


def state(heartbeats: dict[str, datetime], deadline: datetime | None = None) -> SimpleNamespace:
    return SimpleNamespace(last_heartbeats=dict(heartbeats), deadline=deadline)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    made = Clock()
    monkeypatch.setattr(rendezvous_file, "datetime", made)
    return made


class Clock:
    """The clock of this node, which a test puts forward."""

    def __init__(self) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def now(self, zone: tzinfo) -> datetime:
        return self.time


@pytest.mark.parametrize("skew", [timedelta(hours=-1), timedelta(hours=1)])
def test_a_heartbeat_has_the_time_at_which_this_node_saw_it(clock: Clock, skew: timedelta) -> None:
    times = LocalTimes(last_call_seconds=30)
    began = clock.time
    first = state({"there": began + skew})
    times.localize(first)
    assert first.last_heartbeats == {"there": began}
    clock.time = began + timedelta(seconds=9)
    unchanged = state({"there": began + skew})
    times.localize(unchanged)
    assert unchanged.last_heartbeats == {"there": began}
    changed = state({"there": began + skew + timedelta(seconds=5)})
    times.localize(changed)
    assert changed.last_heartbeats == {"there": clock.time}


def test_what_this_node_writes_has_the_times_that_others_wrote(clock: Clock) -> None:
    times = LocalTimes(last_call_seconds=30)
    theirs = clock.time - timedelta(hours=1)
    shared = state({"there": theirs, "here": clock.time}, deadline=theirs)
    times.localize(shared)
    clock.time += timedelta(seconds=5)
    shared.last_heartbeats["here"] = clock.time
    times.restore(shared)
    assert shared.last_heartbeats == {"there": theirs, "here": clock.time}
    assert shared.deadline == theirs


def test_more_nodes_are_waited_for_until_the_last_call_is_over_here(clock: Clock) -> None:
    times = LocalTimes(last_call_seconds=30)
    deadline = clock.time - timedelta(hours=1)
    for seconds in (0, 20):
        clock.time += timedelta(seconds=seconds)
        shared = state({}, deadline=deadline)
        times.localize(shared)
        assert shared.deadline - clock.time == timedelta(seconds=30 - seconds)
    shared.deadline = clock.time + timedelta(seconds=30)
    times.restore(shared)
    assert shared.deadline == clock.time + timedelta(seconds=30)
