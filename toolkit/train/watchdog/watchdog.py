"""Watchdog: ends this rank when another one hangs or is dead, and agrees with the others on which one that is.

The main thread says where it is (`mark`). One thread keeps this rank's entry on the board fresh, and looks for a
verdict there; a second one keeps time, and touches nothing that could make it wait. As long as all goes well a rank
exchanges two messages a beat with the board, whatever the number of ranks. Only when the main thread has made no
progress for too long, or a collective has failed, one rank reads what all tell, and gives the verdict.

A rank ends by os._exit, as if it had been killed: checkpoints outlast that at any moment.
"""

import contextlib
import faulthandler
import os
import socket
import threading
import time
from typing import NamedTuple, NoReturn

from toolkit.errors import ToolkitError
from toolkit.train.watchdog.board import Board, BoardLostError
from toolkit.train.watchdog.culprit import describe_death, describe_hang, describe_silence, find_culprit
from toolkit.train.watchdog.entry import PEER_FAILED, Entry, Verdict
from toolkit.train.watchdog.last_words import end_process, is_lost_connection, one_line, say
from toolkit.train.watchdog.neighbour import Neighbour, this_machine
from toolkit.train.watchdog.stacks import is_in_collective, stacks
from toolkit.train.watchdog.stillness import Stillness, limit_seconds

_TICK_SECONDS = 0.25
_BEAT_SECONDS = 0.5
_RANKS_A_BEAT = 500
"""The board answers some thousand messages a second: beats are longer where there are more ranks."""
_SILENT_BEATS = 5
_NEXT_INVESTIGATOR_SECONDS = 10.0
_OWN_ERROR_SECONDS = 3.0
"""When the board is gone, its keeper may have met an error that this rank is about to meet as well."""
_LAST_WORD_SECONDS = 2.0


class _Place(NamedTuple):
    phase: str
    step: int
    begun: int
    turn: int


class Watchdog:
    """The watch of one rank. `keeper`: the rank whose process keeps the board; None where the launcher does.

    With `timeout_seconds` 0 only dead ranks are looked for, not those that hang.
    """

    def __init__(self, board: Board, *, local_rank: int, timeout_seconds: float, keeper: int | None) -> None:
        self._board, self._keeper, self._timeout_seconds = board, keeper, timeout_seconds
        self._rank, self._local_rank, self._world_size = board.rank, local_rank, board.world_size
        self._host, self._machine = socket.gethostname(), this_machine()
        self._beat_seconds = _BEAT_SECONDS * max(1.0, board.world_size / _RANKS_A_BEAT)
        self._place = _Place("start-up", 0, 0, 0)
        self._marks = self._beats = self._answers = 0
        self._still_seconds = 0.0
        self._neighbour: Neighbour | None = None
        self._neighbour_sought = board.world_size > 1
        self._kept: Entry | None = None
        """The keeper's entry, as it last was."""
        self._claims: dict[str, float] = {}
        self._left, self._left_with, self._is_alone = "", 0, False
        self._has_lost_connection = False
        self._wake, self._stopped, self._finishing = threading.Event(), threading.Event(), threading.Event()
        self._noted, self._departing, self._departed = threading.Event(), threading.Event(), threading.Event()
        self._own_fault = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_time, name="watchdog-time", daemon=True),
            threading.Thread(target=self._keep_in_touch, name="watchdog", daemon=True),
        ]

    def start(self) -> None:
        """Begin to watch."""
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)  # a rank that crashes in native code shows where
        for thread in self._threads:
            thread.start()

    def mark(self, phase: str, step: int | None = None) -> None:
        """See Mark. For the main thread."""
        place = self._place
        if step is not None and step != place.step:
            self._place = _Place(phase, step, place.begun + 1, 0)
        elif phase != place.phase:
            self._place = _Place(phase, place.step, place.begun, place.turn + 1)
        self._marks += 1

    def note(self, error: BaseException) -> None:
        """Tell the others that this rank gives up. Does not return where the error is another rank's death."""
        if self._stopped.is_set():
            return
        if is_lost_connection(error):
            self._has_lost_connection = True
            self._wake.set()
            # The other thread ends this process, or finds that nobody died.
            self._own_fault.wait(_OWN_ERROR_SECONDS + (3 + _SILENT_BEATS) * self._beat_seconds)
        if isinstance(error, ToolkitError):
            self._left_with, self._is_alone = error.exit_code, error.scope != "job"
        elif isinstance(error, KeyboardInterrupt):
            self._left_with, self._is_alone = 130, False
        else:
            self._left_with, self._is_alone = 1, True
        self._left = one_line(error)  # last: it makes the others valid
        self._wake.set()
        self._noted.wait(_LAST_WORD_SECONDS)

    def depart(self) -> None:
        """This process, which has noted an error and told the user, is about to end: the others shall as well."""
        if self._stopped.is_set() or not self._left:
            return
        self._departing.set()
        self._wake.set()
        self._departed.wait(2 * _LAST_WORD_SECONDS)

    def finish(self) -> None:
        """Before ranks part in good order: that one of them ends is no fault any more. Stops watching."""
        self._finishing.set()
        self._stopped.set()
        self._wake.set()
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            thread.join(timeout=_LAST_WORD_SECONDS)

    @property
    def _limit_seconds(self) -> float:
        return limit_seconds(self._timeout_seconds, self._place.phase, self._place.begun)

    @property
    def _is_overdue(self) -> bool:
        limit = self._limit_seconds
        return bool(limit) and self._still_seconds >= limit

    def _keep_time(self) -> None:
        main, board = Stillness(4 * _TICK_SECONDS), Stillness(4 * _TICK_SECONDS)
        armed = 0.0
        while not self._stopped.wait(_TICK_SECONDS):
            now = time.monotonic()
            self._still_seconds = main.look(self._marks, now)
            unanswered = board.look(self._answers, now)
            neighbour = self._neighbour  # the other thread may let go of it at any moment
            if self._is_overdue or (neighbour is not None and neighbour.has_ended()):
                self._wake.set()
            if self._is_overdue and unanswered > (1 + _SILENT_BEATS) * self._beat_seconds and not self._left:
                self._end_without_the_board(died=False)
            # The phase may be another one when it matters.
            limit = self._timeout_seconds if self._place.begun > 1 else self._limit_seconds
            if limit and now - armed > limit / 10:
                # In C, for when native code keeps the interpreter's lock and no thread of Python's ever runs again.
                faulthandler.dump_traceback_later(limit, file=2)
                armed = now

    def _keep_in_touch(self) -> None:
        try:
            self._kept = self._board.open(self._entry())
            while not self._stopped.is_set():
                self._beat()
                self._wake.wait(self._beat_seconds)
                self._wake.clear()
        except BoardLostError:
            self._survive_the_board()

    def _publish(self) -> None:
        self._beats += 1
        self._board.publish(self._entry())
        self._answers += 1

    def _beat(self) -> None:
        self._publish()
        if self._left and not self._noted.is_set():
            self._has_read()
            self._noted.set()
        self._kept, verdict = self._board.look()
        self._answers += 1
        if self._finishing.is_set():
            return
        if self._left:
            if self._departing.is_set() and not self._departed.is_set():
                self._say_goodbye()
                self._departed.set()
            return
        if verdict is not None:
            self._end(verdict)
        if self._neighbour_sought:
            self._seek_neighbour()
        if self._neighbour is not None and self._neighbour.has_ended():
            self._report_neighbour(self._neighbour)
        if self._has_lost_connection:
            self._look_for_the_dead()
        elif self._is_overdue and self._is_my_turn(f"hang-{self._place.begun}-{self._place.turn}"):
            self._look_for_who_hangs()

    def _entry(self) -> Entry:
        place = self._place
        return Entry(
            rank=self._rank,
            host=self._host,
            machine=self._machine,
            pid=os.getpid(),
            step=place.step,
            phase=place.phase,
            begun=place.begun,
            turn=place.turn,
            beat=self._beats,
            still_seconds=round(self._still_seconds, 2),
            limit_seconds=self._limit_seconds,
            in_collective=self._still_seconds > 1 and is_in_collective(),
            left=self._left,
            left_with=self._left_with,
            is_alone=self._is_alone,
        )

    def _seek_neighbour(self) -> None:
        """Ranks of a machine watch each other in a ring. Without a launcher's word for who they are."""
        following, first = self._rank + 1, self._rank - self._local_rank
        for rank in dict.fromkeys((following % self._world_size, first)):
            if rank == self._rank:
                continue
            entry = self._board.read([rank]).get(rank)
            if entry is None:
                return  # not there yet
            if entry.machine and entry.machine == self._machine:
                with contextlib.suppress(OSError, AttributeError):  # it left already, or an old kernel
                    self._neighbour = Neighbour(rank, entry.pid)
                break
        self._neighbour_sought = False

    def _report_neighbour(self, neighbour: Neighbour) -> None:
        self._neighbour = None
        neighbour.close()
        entry = self._board.read([neighbour.rank])[neighbour.rank]
        if entry.is_alone or not entry.left:  # else this rank comes to the same end by itself
            self._accuse(Verdict(by=self._rank, line=describe_death(entry, self._place.step), unheard=1))

    def _is_my_turn(self, question: str) -> bool:
        """Whether this rank shall find out for all. The first who asks; later ones if nothing comes of it."""
        now = time.monotonic()
        if question not in self._claims:
            self._claims[question] = now + _NEXT_INVESTIGATOR_SECONDS * (self._board.number(question) - 1)
        if now < self._claims[question]:
            return False
        self._claims[question] = now + _NEXT_INVESTIGATOR_SECONDS
        return True

    def _listen(self) -> tuple[dict[int, Entry], set[int]]:
        """All entries, and the ranks whose beat stands still while this one's goes on."""
        entries = self._board.read(range(self._world_size))
        silent = entries.keys() - {self._rank}
        deadline = time.monotonic() + _SILENT_BEATS * self._beat_seconds
        while silent and time.monotonic() < deadline:
            self._stopped.wait(self._beat_seconds / 2)
            self._publish()
            verdict = self._board.look()[1]
            if verdict is not None:  # another one asked as well, and was faster
                self._end(verdict)
            for rank, entry in self._board.read(silent).items():
                if entry.beat != entries[rank].beat:
                    silent.discard(rank)
                    entries[rank] = entry
        entries[self._rank] = self._entry()
        return entries, silent

    def _look_for_who_hangs(self) -> None:
        seconds = self._still_seconds
        entries, silent = self._listen()
        culprit = find_culprit(entries, self._world_size, silent)
        if culprit is None or self._still_seconds < seconds:
            return
        line = describe_hang(culprit, entries, seconds)
        self._accuse(Verdict(by=self._rank, line=line, stacks_of=culprit.stacks_of, unheard=len(silent)))

    def _look_for_the_dead(self) -> None:
        if not self._is_my_turn("lost"):
            return
        entries, silent = self._listen()
        left = [entry for entry in entries.values() if entry.left]
        dead = [entry for entry in left if entry.is_alone] or [entries[rank] for rank in sorted(silent)]
        if dead:
            line = "; ".join(describe_death(entry, self._place.step) for entry in dead[:4])
            self._accuse(Verdict(by=self._rank, line=line, unheard=len(silent)))
        if left:  # what it met concerns all, and it has said so
            end_process(left[0].left_with)
        self._own_fault.set()

    def _accuse(self, verdict: Verdict) -> NoReturn:
        standing = self._board.accuse(verdict)
        if standing == verdict:
            say(f"error: {verdict.line}")
        self._end(standing)

    def _say_goodbye(self) -> None:
        if self._is_alone:
            line = describe_death(self._entry())
            verdict = Verdict(by=self._rank, line=line, code=self._left_with if self._left_with == 2 else PEER_FAILED)
            if self._board.accuse(verdict) == verdict and self._left_with != 2:
                say(f"error: {line}")
        self._wait_for_readers(0)

    def _end(self, verdict: Verdict) -> NoReturn:
        with contextlib.suppress(BoardLostError):
            self._has_read()
            if self._rank in verdict.stacks_of:
                say(stacks(f"rank {self._rank} ({self._host}) in {self._entry().place}"))
            elif verdict.stacks_of:
                time.sleep(self._beat_seconds)  # a launcher ends all when the first one ends
            self._wait_for_readers(verdict.unheard)
        end_process(verdict.code)

    def _has_read(self) -> None:
        if self._rank != self._keeper:
            self._board.number("read")

    def _wait_for_readers(self, unheard: int) -> None:
        """The board goes with its keeper: the others shall have read the verdict."""
        if self._rank != self._keeper:
            return
        deadline = time.monotonic() + _LAST_WORD_SECONDS
        while self._board.numbers("read") < self._world_size - 1 - unheard and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS / 5)

    def _survive_the_board(self) -> None:
        deadline = time.monotonic() + _OWN_ERROR_SECONDS
        while time.monotonic() < deadline and not self._has_lost_connection:
            if self._stopped.is_set() or self._left:
                break
            time.sleep(_TICK_SECONDS / 5)
        for waited_for in (self._noted, self._departed):
            waited_for.set()
        if self._stopped.is_set() or self._left:
            return
        kept = self._kept
        if kept is not None and kept.left and not kept.is_alone:
            end_process(kept.left_with)
        self._end_without_the_board(died=True)

    def _end_without_the_board(self, *, died: bool) -> NoReturn:
        """There is nothing left to agree on: one rank of each machine says what all of them see."""
        if self._rank == 1 or self._local_rank == 0:
            step, kept = self._place.step, self._kept
            if self._keeper is None or kept is None:
                who = "the launcher" if self._keeper is None else f"rank {self._keeper}"
                line = f"{who}, which keeps the ranks' store, is lost; rank {self._rank} is in {self._entry().place}"
            else:
                line = describe_death(kept, step) if died else describe_silence(kept, step, self._still_seconds)
            say(f"error: {line}")
        end_process(PEER_FAILED)
