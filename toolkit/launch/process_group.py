"""The default process group of a job, under a watchdog; the check that ranks train on the same inputs."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from toolkit.errors import FinishedError, RunError, ToolkitError
from toolkit.launch.elastic import Torchrun, release_spares, wait_as_spare
from toolkit.launch.health.heartbeat_store import HeartbeatStore
from toolkit.launch.health.stalled_ranks import limit_seconds
from toolkit.launch.health.watchdog import Watchdog
from toolkit.launch.meeting_point import announced_wait, check_address, meeting_error, name_interface
from toolkit.launch.output import exit_hooks
from toolkit.launch.rank_environment import RankEnvironment, read_integer
from toolkit.launch.spawn import free_port


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """The store in which the ranks of this launch have met."""

    store: Store
    rank: int
    world_size: int
    spares: range = range(0)
    """Ranks of this launch that have no part in the job, which come after all others."""


_meetings: dict[RankEnvironment, _Meeting] = {}
"""Stores in which ranks have met before their process group is made."""


@contextmanager
def process_group(
    environment: RankEnvironment, device: torch.device, *, hang_timeout_seconds: float = 0
) -> Iterator[Watchdog]:
    """Create the default process group, and destroy it at the end.

    Meanwhile a watchdog ends this rank when another one dies, or makes no progress for `hang_timeout_seconds` (if that
    is not 0): then the caller has to report its phases (`Watchdog.report_phase`).
    """
    # The watchdog must find the rank that hangs before the backend gives up without naming it.
    meeting = _meetings.pop(environment) if environment in _meetings else _meet(environment)
    store = meeting.store
    timeout = timedelta(seconds=max(60 * _minutes(), 2 * limit_seconds(hang_timeout_seconds)))
    watchdog = Watchdog(
        HeartbeatStore(store, rank=meeting.rank, world_size=meeting.world_size),
        local_rank=environment.local_rank,
        timeout_seconds=hang_timeout_seconds,
        # torchrun hosts the store in a process of its own.
        store_rank=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
        store_host=environment.master_addr,
    )
    watchdog.start()
    try:
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        yield watchdog
    except BaseException as error:
        if isinstance(error, FinishedError) and meeting.rank == 0:
            release_spares(store, meeting.spares)
        watchdog.report_error(error)
        exit_hooks.append(watchdog.announce_exit)
        raise
    watchdog.stop()
    # A rank that destroys the group while others still use it aborts them (gloo) or hangs (NCCL): so all ranks do it
    # together, and none after an error.
    dist.barrier()
    dist.destroy_process_group()
    if meeting.rank == 0:
        release_spares(store, meeting.spares)


def decided_by_first(environment: RankEnvironment, facts: str, decide: Callable[[list[str]], str]) -> str:
    """Let the first rank decide, knowing the `facts` of every rank; return its text on all ranks. A collective call.

    It also works before the process group is there, whose store it uses. Raises what `decide` raises; the other ranks
    raise a ToolkitError with the same lines.
    """
    if dist.is_initialized():
        return _decided_in_group(facts, decide)
    if environment.world_size == 1:
        return decide([facts])
    meeting = _meet(environment)
    _meetings[environment] = meeting
    store = meeting.store
    if meeting.rank:
        try:
            store.set(f"facts/{meeting.rank}", facts)
            failure = store.get("failure").decode()
            decided = store.get("decided").decode()
            store.set(f"heard/{meeting.rank}", "")
        except RuntimeError:  # with which torch reports a store that is gone
            failure = "rank 0 ended before it had decided for all ranks. See its own message."
            decided = ""
        if failure:
            raise ToolkitError(failure.split("\n"), scope="job")
        return decided
    failure = "rank 0 failed. See its own message."
    decided = ""
    try:
        keys = [f"facts/{number}" for number in range(1, meeting.world_size)]
        decided = decide([facts, *(content.decode() for content in store.multi_get(keys))])  # in one round trip
        failure = ""
    except ToolkitError as error:
        failure = str(error)
        raise
    finally:
        store.set("decided", decided)
        store.set("failure", failure)
        with suppress(RuntimeError):  # the store ends with this rank: the others read it first
            store.wait([f"heard/{number}" for number in range(1, meeting.world_size)], timedelta(seconds=5))
    return decided


def keep_first_ranks(environment: RankEnvironment, count: int) -> RankEnvironment:
    """Make the job one of the first `count` ranks of this launch, which have met; the environment of this rank in it.

    On the ranks after them it does not return: they wait as spares for the end of the run, and raise SpareError.
    """
    meeting = _meetings.pop(environment)
    if meeting.rank >= count:
        wait_as_spare(meeting.store, meeting.rank, meeting.world_size)
    smaller = replace(environment, world_size=count)
    os.environ.update(smaller.variables)
    _meetings[smaller] = replace(meeting, world_size=count, spares=range(count, meeting.world_size))
    return smaller


def _decided_in_group(facts: str, decide: Callable[[list[str]], str]) -> str:
    facts_of_ranks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(facts_of_ranks, facts)
    decision: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            decision = [decide(facts_of_ranks)]
        except ToolkitError as error:
            decision = [error]
    dist.broadcast_object_list(decision)
    if isinstance(decision[0], ToolkitError):
        raise decision[0]
    return str(decision[0])


def _meet(environment: RankEnvironment) -> _Meeting:
    """Meet the other ranks of this launch in its store."""
    torchrun = Torchrun.detect()
    if torchrun is not None:
        torchrun.check_store()
    os.environ.update(environment.variables)
    if environment.world_size == 1 and environment.master_port == 0:
        os.environ["MASTER_PORT"] = str(free_port())
    check_address(environment)
    name_interface(environment.master_addr)
    with announced_wait(environment):
        try:
            store, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(minutes=_minutes()))))
        except dist.DistError as error:
            raise meeting_error(environment, error) from None
    return _Meeting(store=store, rank=rank, world_size=world_size)


def _minutes() -> int:
    return read_integer(os.environ, "DEEPSPEED_TIMEOUT", "30")


def check_same_everywhere(fingerprint: str, device: torch.device) -> None:
    """Raise RunError if ranks differ in `fingerprint`: they would silently train on different data."""
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=8).digest()
    local = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
    all_ranks = [torch.zeros_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, local)
    different = [rank for rank, value in enumerate(all_ranks) if not torch.equal(value, all_ranks[0])]
    if different:
        shown = ", ".join(map(str, different[:8])) + (", …" if len(different) > 8 else "")
        raise RunError(
            f"the recipe or the text of rank {shown} is not that of rank 0. "
            "Give every machine the same recipe, files and data.source.",
            scope="job",
        )
