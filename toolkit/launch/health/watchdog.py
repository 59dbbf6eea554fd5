"""Watchdog: ends this rank when another one hangs or dies; all ranks agree on which one, and one prints its name.

The main thread reports its phase (`report_phase`). One thread publishes this rank's heartbeat and polls for a failure
report; a second one measures time, and calls nothing that could block. In a healthy job a rank sends two messages to
the heartbeat store in each period, whatever the number of ranks. Only when the main thread has made no progress for
too long, or a collective has failed, one rank reads all heartbeats and publishes the failure report.

A rank exits by os._exit, as if it had been killed: checkpoints stay valid whenever that happens.
"""

import contextlib
import faulthandler
import os
import socket
import threading
import time
from dataclasses import replace
from typing import NamedTuple, NoReturn

from toolkit.errors import ToolkitError
from toolkit.launch import stop_requests
from toolkit.launch.health import local_process, stalled_ranks
from toolkit.launch.health.heartbeat import PEER_FAILED, FailureReport, Heartbeat
from toolkit.launch.health.heartbeat_store import HeartbeatStore, HeartbeatStoreLostError, is_lost_connection
from toolkit.launch.health.progress_page import ProgressPage
from toolkit.launch.health.stalled_ranks import StallClock, limit_seconds
from toolkit.phases import phase_of

_TICK_SECONDS = 0.25
_HEARTBEAT_SECONDS = 0.5
_RANKS_PER_PERIOD = 500
"""The store handles some thousand messages a second: with more ranks the heartbeats are less frequent."""
_MISSED_HEARTBEATS = 5
_NEXT_INVESTIGATOR_SECONDS = 10.0
_OWN_ERROR_SECONDS = 3.0
"""Seconds of waiting for an error of this rank: when the store is gone, its host may have met the same error."""
_EXIT_SECONDS = 2.0
_STOP_REQUEST_SECONDS = 1.0


class _Progress(NamedTuple):
    phase: str
    step: int
    steps_started: int
    phases_started: int


class _Failure(NamedTuple):
    exit_reason: str
    exit_code: int
    is_local_failure: bool


class Watchdog:
    """Watches over one rank. `store_rank`: the rank whose process hosts the store; None if the launcher does.

    `store_host` is the machine of that process, by the name or address at which ranks reach it. With `timeout_seconds`
    0 it detects dead ranks only, not those that hang.
    """

    def __init__(
        self,
        store: HeartbeatStore,
        *,
        local_rank: int,
        timeout_seconds: float,
        store_rank: int | None,
        store_host: str,
    ) -> None:
        self._store = store
        self._store_rank = store_rank
        self._store_host = store_host
        self._timeout_seconds = timeout_seconds
        self._rank = store.rank
        self._local_rank = local_rank
        self._world_size = store.world_size
        self._host = socket.gethostname()
        self._machine_id = local_process.machine_id()
        self._heartbeat_seconds = _HEARTBEAT_SECONDS * max(1.0, store.world_size / _RANKS_PER_PERIOD)
        self._progress = _Progress("start-up", 0, 0, 0)
        self._page = ProgressPage.create()
        self._peer_page: ProgressPage | None = None
        self._phase_reports = 0
        self._sequence = 0
        self._responses = 0
        self._stalled_seconds = 0.0
        self._peer: local_process.PeerProcess | None = None
        self._needs_peer = store.world_size > 1
        self._store_heartbeat: Heartbeat | None = None
        """The last heartbeat of the rank that hosts the store."""
        self._turns: dict[str, float] = {}
        """Times from which this rank may investigate each question."""
        self._failure = _Failure("", 0, False)
        self._has_lost_connection = False
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._finishing = threading.Event()
        self._error_published = threading.Event()
        self._exiting = threading.Event()
        self._exit_announced = threading.Event()
        self._no_rank_died = threading.Event()
        self._threads = [
            threading.Thread(target=self._measure_time, name="watchdog-time", daemon=True),
            threading.Thread(target=self._send_heartbeats, name="watchdog", daemon=True),
        ]

    def start(self) -> None:
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)  # a rank that crashes in native code prints its stack
        for thread in self._threads:
            thread.start()

    def report_phase(self, phase: str, step: int | None = None) -> None:
        """Implement PhaseReporter. For the main thread."""
        now = self._progress
        if step is not None and step != now.step:
            self._progress = _Progress(phase, step, now.steps_started + 1, 0)
        elif phase != now.phase:
            begun = phase_of(phase) != phase_of(now.phase)
            self._progress = _Progress(phase, now.step, now.steps_started, now.phases_started + begun)
        self._phase_reports += 1
        if self._page is not None and self._progress is not now:
            self._page.write(self._progress.step, phase)

    def report_error(self, error: BaseException) -> None:
        """Publish why this rank is about to exit. Does not return if the error is the consequence of a rank's death."""
        if self._stopped.is_set():
            return
        if is_lost_connection(error):
            self._has_lost_connection = True
            self._wake.set()
            # The other thread ends this process, or finds that no rank died.
            self._no_rank_died.wait(_OWN_ERROR_SECONDS + (3 + _MISSED_HEARTBEATS) * self._heartbeat_seconds)
        exit_code = 1
        is_local = True
        if isinstance(error, ToolkitError):
            exit_code = error.exit_code
            is_local = error.scope != "job"
        elif isinstance(error, KeyboardInterrupt):
            exit_code = 130
            is_local = False
        self._failure = _Failure(local_process.summarize(error), exit_code, is_local)
        self._wake.set()
        self._error_published.wait(_EXIT_SECONDS)

    def announce_exit(self) -> None:
        """End the other ranks: this one has reported an error here and to the user, and is about to exit."""
        if self._stopped.is_set() or not self._failure.exit_reason:
            return
        self._exiting.set()
        self._wake.set()
        self._exit_announced.wait(2 * _EXIT_SECONDS)

    def stop(self) -> None:
        """Stop watching, before ranks exit normally: from now on it is no failure if one ends."""
        self._finishing.set()
        self._stopped.set()
        self._wake.set()
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            thread.join(timeout=_EXIT_SECONDS)
        pages = (self._page, self._peer_page)
        self._page = None
        self._peer_page = None
        for page in pages:
            if page is not None:
                page.close()

    @property
    def _limit_seconds(self) -> float:
        return limit_seconds(self._timeout_seconds, self._progress.phase, self._progress.steps_started)

    @property
    def _is_overdue(self) -> bool:
        limit = self._limit_seconds
        return bool(limit) and self._stalled_seconds >= limit

    def _measure_time(self) -> None:
        main_thread = StallClock(4 * _TICK_SECONDS)
        store = StallClock(4 * _TICK_SECONDS)
        armed = 0.0
        while not self._stopped.wait(_TICK_SECONDS):
            now = time.monotonic()
            self._stalled_seconds = main_thread.update(self._phase_reports, now)
            unanswered = store.update(self._responses, now)
            peer = self._peer  # the other thread may drop it at any moment
            if self._is_overdue or (peer is not None and peer.has_ended()):
                self._wake.set()
            store_limit = (1 + _MISSED_HEARTBEATS) * self._heartbeat_seconds
            if self._is_overdue and unanswered > store_limit and not self._failure.exit_reason:
                self._exit_without_store(died=False)
            # The phase may have changed by the time the traceback is due.
            limit = self._timeout_seconds if self._progress.steps_started > 1 else self._limit_seconds
            if limit and now - armed > limit / 10:
                # In C, for native code that holds the GIL: no Python thread would ever run again.
                faulthandler.dump_traceback_later(limit, file=2)
                armed = now

    def _send_heartbeats(self) -> None:
        try:
            self._store_heartbeat = self._store.open(self._heartbeat())
            while not self._stopped.is_set():
                self._send_heartbeat()
                self._wake.wait(self._heartbeat_seconds)
                self._wake.clear()
        except HeartbeatStoreLostError:
            self._handle_lost_store()

    def _publish(self) -> None:
        self._sequence += 1
        self._store.publish(self._heartbeat())
        self._responses += 1

    def _send_heartbeat(self) -> None:
        self._publish()
        if self._failure.exit_reason and not self._error_published.is_set():
            self._acknowledge()
            self._error_published.set()
        self._store_heartbeat, report = self._store.poll()
        self._responses += 1
        if self._finishing.is_set():
            return
        if self._failure.exit_reason:
            if self._exiting.is_set() and not self._exit_announced.is_set():
                self._report_own_failure()
                self._exit_announced.set()
            return
        if report is not None:
            self._exit(report)
        if self._needs_peer:
            self._find_peer()
        self._check_peer()
        if self._has_lost_connection:
            self._find_dead_ranks()
        elif self._is_overdue:
            question = f"hang-{self._progress.steps_started}-{self._progress.phases_started}"
            if self._may_investigate(question):
                self._investigate_hang()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            rank=self._rank,
            host=self._host,
            machine_id=self._machine_id,
            pid=os.getpid(),
            **self._progress._asdict(),
            sequence=self._sequence,
            stalled_seconds=round(self._stalled_seconds, 2),
            limit_seconds=self._limit_seconds,
            in_collective=self._stalled_seconds > 1 and local_process.is_in_collective(),
            **self._failure._asdict(),
        )

    def _find_peer(self) -> None:
        """Ranks of a machine watch each other in a ring, which they find without help from the launcher."""
        next_rank = (self._rank + 1) % self._world_size
        first_rank = self._rank - self._local_rank
        for rank in dict.fromkeys((next_rank, first_rank)):
            if rank == self._rank:
                continue
            heartbeat = self._store.read([rank]).get(rank)
            if heartbeat is None:
                return  # not started yet
            if heartbeat.machine_id and heartbeat.machine_id == self._machine_id:
                with contextlib.suppress(OSError, AttributeError):  # it has exited already, or the kernel is old
                    self._peer = local_process.PeerProcess(rank, heartbeat.pid)
                    if self._peer_page is not None:
                        self._peer_page.close()
                    self._peer_page = ProgressPage.of_process(heartbeat.pid)
                break
        self._needs_peer = False

    def _check_peer(self) -> None:
        if self._peer is not None and self._peer.has_ended():
            self._report_peer(self._peer)

    def _report_peer(self, peer: local_process.PeerProcess) -> None:
        self._peer = None
        peer.close()
        heartbeat = self._store.read([peer.rank])[peer.rank]
        if not heartbeat.exit_reason:
            self._await_stop_request()
        if heartbeat.is_local_failure or not heartbeat.exit_reason:  # otherwise this rank fails in the same way
            step = self._progress.step
            written = None if self._peer_page is None or heartbeat.exit_reason else self._peer_page.read()
            if written is not None:  # where it died; its heartbeat says where it was a moment before
                step, phase = written
                heartbeat = replace(heartbeat, step=step, phase=phase)
            message = stalled_ranks.describe_death(heartbeat, step)
            self._report(FailureReport(reporter=self._rank, message=message, unreachable=1))

    def _await_stop_request(self) -> None:
        """Wait a moment for the signal that may have ended the peer: Ctrl-C reaches this rank at about that time."""
        deadline = time.monotonic() + _STOP_REQUEST_SECONDS
        while not (stop_requests.is_stopping() or self._stopped.is_set() or self._failure.exit_reason):
            if time.monotonic() > deadline:
                break
            time.sleep(_TICK_SECONDS / 5)

    def _may_investigate(self, question: str) -> bool:
        """Whether it is this rank's turn: the first rank that asks investigates, later ones if it has not succeeded."""
        now = time.monotonic()
        if question not in self._turns:
            self._turns[question] = now + _NEXT_INVESTIGATOR_SECONDS * (self._store.increment(question) - 1)
        if now < self._turns[question]:
            return False
        self._turns[question] = now + _NEXT_INVESTIGATOR_SECONDS
        return True

    def _collect_heartbeats(self) -> tuple[dict[int, Heartbeat], set[int]]:
        """Return all heartbeats, and the ranks whose heartbeat has not changed while this rank's did."""
        heartbeats = self._store.read(range(self._world_size))
        unresponsive = heartbeats.keys() - {self._rank}
        deadline = time.monotonic() + _MISSED_HEARTBEATS * self._heartbeat_seconds
        while unresponsive and time.monotonic() < deadline:
            self._stopped.wait(self._heartbeat_seconds / 2)
            self._publish()
            report = self._store.poll()[1]
            if report is not None:  # another rank investigated as well, and was faster
                self._exit(report)
            for rank, heartbeat in self._store.read(unresponsive).items():
                if heartbeat.sequence != heartbeats[rank].sequence:
                    unresponsive.discard(rank)
                    heartbeats[rank] = heartbeat
        heartbeats[self._rank] = self._heartbeat()
        return heartbeats, unresponsive

    def _investigate_hang(self) -> None:
        seconds = self._stalled_seconds
        heartbeats, unresponsive = self._collect_heartbeats()
        stalled = stalled_ranks.find_stalled_ranks(heartbeats, self._world_size, unresponsive)
        if stalled is None or self._stalled_seconds < seconds:
            return
        message = stalled_ranks.describe_hang(stalled, heartbeats, seconds)
        self._report(
            FailureReport(
                reporter=self._rank, message=message, stack_ranks=stalled.stack_ranks, unreachable=len(unresponsive)
            )
        )

    def _find_dead_ranks(self) -> None:
        if not self._may_investigate("lost"):
            return
        heartbeats, unresponsive = self._collect_heartbeats()
        self._check_peer()  # a process closes its connections a moment before it has ended
        exiting = [heartbeat for heartbeat in heartbeats.values() if heartbeat.exit_reason]
        dead = [heartbeat for heartbeat in exiting if heartbeat.is_local_failure] or [
            heartbeats[rank] for rank in sorted(unresponsive)
        ]
        if dead:
            message = "; ".join(stalled_ranks.describe_death(heartbeat, self._progress.step) for heartbeat in dead[:4])
            self._report(FailureReport(reporter=self._rank, message=message, unreachable=len(unresponsive)))
        if exiting:  # its error concerns all ranks, and it has printed it
            local_process.exit_now(exiting[0].exit_code)
        self._no_rank_died.set()

    def _report(self, report: FailureReport) -> NoReturn:
        stop_requests.end_if_waiting()
        first = self._store.report_failure(report)
        if first == report:
            local_process.print_error(f"error: {report.message}")
        self._exit(first)

    def _report_own_failure(self) -> None:
        if self._failure.is_local_failure:
            is_bad_input = self._failure.exit_code == 2
            message = stalled_ranks.describe_death(self._heartbeat())
            exit_code = 2 if is_bad_input else PEER_FAILED
            report = FailureReport(reporter=self._rank, message=message, exit_code=exit_code)
            if self._store.report_failure(report) == report and not is_bad_input:
                local_process.print_error(f"error: {message}")
        self._wait_for_readers(0)

    def _exit(self, report: FailureReport) -> NoReturn:
        stop_requests.end_if_waiting()
        with contextlib.suppress(HeartbeatStoreLostError):
            self._acknowledge()
            if self._rank in report.stack_ranks:
                local_process.print_error(
                    local_process.thread_stacks(f"rank {self._rank} ({self._host}) in {self._heartbeat().location}")
                )
            elif report.stack_ranks:
                time.sleep(self._heartbeat_seconds)  # a launcher ends all ranks when the first one exits
            self._wait_for_readers(report.unreachable)
        local_process.exit_now(report.exit_code)

    def _acknowledge(self) -> None:
        if self._rank != self._store_rank:
            self._store.increment("read")

    def _wait_for_readers(self, unreachable: int) -> None:
        """Keep the store alive until the other ranks have read the failure report."""
        if self._rank != self._store_rank:
            return
        deadline = time.monotonic() + _EXIT_SECONDS
        while self._store.count("read") < self._world_size - 1 - unreachable and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS / 5)

    def _handle_lost_store(self) -> None:
        deadline = time.monotonic() + _OWN_ERROR_SECONDS
        while time.monotonic() < deadline and not self._has_lost_connection:
            if self._stopped.is_set() or self._failure.exit_reason:
                break
            time.sleep(_TICK_SECONDS / 5)
        if self._has_lost_connection:
            self._await_stop_request()
        self._error_published.set()
        self._exit_announced.set()
        if self._stopped.is_set() or self._failure.exit_reason:
            return
        stop_requests.end_if_waiting()
        if self._store_rank is None and stop_requests.is_stopping():
            return  # the launcher has ended, and with it the store: the ranks save without it
        last = self._store_heartbeat
        if last is not None and last.exit_reason and not last.is_local_failure:
            local_process.exit_now(last.exit_code)
        self._exit_without_store(died=True)

    def _exit_without_store(self, *, died: bool) -> NoReturn:
        """Exit without an agreement: one rank of each machine prints what all of them see."""
        if self._rank == 1 or self._local_rank == 0:
            step = self._progress.step
            last = self._store_heartbeat
            if self._store_rank is None or last is None:
                seconds = None if died else self._stalled_seconds
                message = stalled_ranks.describe_lost_store(
                    self._heartbeat(), self._store_host, self._store_rank, seconds
                )
            elif died:
                message = stalled_ranks.describe_death(last, step)
            else:
                message = stalled_ranks.describe_no_response(last, step, self._stalled_seconds)
            local_process.print_error(f"error: {message}")
        local_process.exit_now(PEER_FAILED)
