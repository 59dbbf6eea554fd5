"""What grows with the number of ranks: the start of a job, its heartbeats, a checkpoint, counted at 2 to 64 ranks.

    python benchmarks/scaling.py                   # 2, 4, … 64 ranks: some minutes on two cores
    python benchmarks/scaling.py --ranks 2 4       # does it run?
    python benchmarks/scaling.py --save            # also writes benchmarks/results/scaling.md

Each rank is a process without a model, in the toolkit's own process group with its watchdog, and saves one MiB of a
checkpoint with the toolkit's own writer. Round trips to the store are counted on their way, by a proxy between ranks
and store: those of the last rank, and those of all ranks but the first, which has the store. Seconds are of two cores
that all ranks share: counts are what carries over to a cluster. A closed form beside each count says what it is for
1,024 ranks; with `--save`, nothing is written unless it describes all measured counts.
"""

import argparse
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from measure.table import publish

from toolkit.checkpoint.names import MANIFEST, MODEL
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.save import CheckpointContents, FileSizes, save
from toolkit.checkpoint.save_plan import LocalShard
from toolkit.checkpoint.select import select_checkpoint
from toolkit.checkpoint.tensor_source import ShardedTensorGroup, ShardedTensorSource
from toolkit.launch.local_ranks import run_ranks
from toolkit.launch.process_group import decided_by_first, process_group
from toolkit.launch.rank_environment import RankEnvironment
from toolkit.launch.spawn import free_port
from toolkit.parallel.shard import Shard

CPU = torch.device("cpu")
ROW_BYTES = 2**20
WATCH_SECONDS = 10
PHASES = ("plan", "start-up", "heartbeats", "save", "verify")
PAPER_RANKS = 1024


class CountingProxy:
    """Passes connections on to the store, and counts the round trips of each."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._counts: Counter[str] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def round_trips(self) -> int:
        return sum(self._counts.values())

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            store = self._connect()
            number += 1
            is_waiting = threading.Event()
            for source, sink, counts in ((client, store, True), (store, client, False)):
                arguments = (f"{number}", source, sink, is_waiting, counts)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _connect(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._target_port))
            except ConnectionRefusedError:
                time.sleep(0.01)

    def _pass_on(
        self, name: str, source: socket.socket, sink: socket.socket, is_waiting: threading.Event, counts: bool
    ) -> None:
        """A request that follows an answer is a round trip, in however many pieces both come."""
        while True:
            try:
                data = source.recv(1 << 16)
                if not data:
                    return
                if counts and not is_waiting.is_set():
                    self._counts[name] += 1
                    is_waiting.set()
                elif not counts:
                    is_waiting.clear()
                sink.sendall(data)
            except OSError:
                return


def rank(folder: str, store_port: int) -> dict[str, Any]:
    """What this rank counted in each phase: seconds, and its round trips to the store."""
    here = RankEnvironment.detect()
    proxy = CountingProxy(store_port) if here.rank else None
    # Rank 0 hosts the store, and has no way to it that could be watched.
    os.environ["MASTER_PORT"] = str(proxy.port if proxy else store_port)
    here = RankEnvironment.detect()
    seconds: dict[str, float] = {}
    trips: dict[str, int] = {}
    before = 0

    def mark(phase: str, began: float) -> float:
        nonlocal before
        now = time.monotonic()
        seconds[phase] = now - began
        trips[phase] = (proxy.round_trips if proxy else 0) - before
        before = proxy.round_trips if proxy else 0
        return now

    began = time.monotonic()
    decided_by_first(here, "cpu", lambda facts: f"{len(facts)} ranks")
    began = mark("plan", began)
    with process_group(here, CPU, hang_timeout_seconds=600) as watchdog:
        ranks = Ranks.of()
        dist.barrier()
        began = mark("start-up", began)
        time.sleep(WATCH_SECONDS)
        began = mark("heartbeats", began)
        watchdog.stop()  # so that all that is counted from here on is of the checkpoint
        dist.barrier()
        began = mark("end of heartbeats", began)
        contents = CheckpointContents(tensors=sharded_rows(ranks), trainer_state={"step": 1})
        saved = save(Path(folder), 1, contents, sizes=FileSizes(min_file_bytes=ROW_BYTES))
        dist.barrier()
        began = mark("save", began)
        select_checkpoint(saved.path)
        dist.barrier()
        mark("verify", began)
    return {"seconds": seconds, "trips": trips}


def sharded_rows(ranks: Ranks) -> ShardedTensorSource:
    """One matrix a rank, of which each rank has one row in as many as there are ranks."""
    width = ROW_BYTES // 4 // ranks.size
    shape = (ranks.size, width)
    names = [f"layers.{number}.weight" for number in range(ranks.size)]
    row = torch.full((width,), float(ranks.rank))
    shards = [LocalShard(shard=Shard(name=name, shape=shape), start=ranks.rank * width, length=width) for name in names]
    specs = [TensorSpec(name=name, shape=shape, dtype=torch.float32) for name in names]
    group = ShardedTensorGroup(kind=MODEL, specs=specs, local_shards=shards, values=lambda index: row)
    return ShardedTensorSource(groups=[group])


def measure(count: int) -> dict[str, Any]:
    """A job of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(rank, count, folder, free_port(), joined=False, timeout_seconds=900)
        checkpoint = Path(folder) / "step-00000001"
        files = sum(path.is_file() for path in checkpoint.rglob("*"))
        manifest_bytes = (checkpoint / MANIFEST).stat().st_size
    return {
        "last": results[-1]["trips"],
        "all": {phase: sum(result["trips"][phase] for result in results) for phase in PHASES},
        "seconds": {phase: max(result["seconds"][phase] for result in results) for phase in PHASES},
        "files": files,
        "manifest_bytes": manifest_bytes,
    }


@dataclass(frozen=True, kw_only=True)
class Count:
    """One count, and how it grows with the number of ranks."""

    name: str
    measured: Callable[[dict[str, Any]], float]
    form: str
    """The closed form in n, the number of ranks."""
    on_paper: Callable[[int], float]
    tolerance: float = 0.0
    """The share by which a measured count may be off."""
    slack: int = 0
    """Round trips by which it may always be off: requests that arrive together are one, or two."""
    digits: int = 0

    def check(self, ranks: int, measurement: dict[str, Any]) -> None:
        """Raise AssertionError where the closed form does not describe the measured count."""
        measured = self.measured(measurement)
        expected = self.on_paper(ranks)
        allowed = max(self.slack, self.tolerance * expected)
        assert abs(measured - expected) <= allowed, (self.name, ranks, measured, expected)


def heartbeats_a_second(ranks: int) -> float:
    """Round trips of one rank: it sets its heartbeat and looks for a failure, each half second, or less often."""
    return 4 / max(1, ranks / 500)


COUNTS = (
    Count(
        name="plan, round trips of a rank",
        measured=lambda job: job["last"]["plan"],
        form="6",
        on_paper=lambda n: 6,
        slack=2,
    ),
    Count(
        name="plan, round trips of all",
        measured=lambda job: job["all"]["plan"],
        form="6 (n - 1)",
        on_paper=lambda n: 6 * (n - 1),
        tolerance=0.1,
        slack=4,
    ),
    Count(
        name="start-up over gloo, round trips of a rank",
        measured=lambda job: job["last"]["start-up"],
        form="3 n + 6",
        on_paper=lambda n: 3 * n + 6,
        tolerance=0.15,
        slack=4,
    ),
    Count(
        name="start-up over gloo, round trips of all",
        measured=lambda job: job["all"]["start-up"],
        form="(3 n + 6) (n - 1)",
        on_paper=lambda n: (3 * n + 6) * (n - 1),
        tolerance=0.15,
        slack=4,
    ),
    Count(
        name="heartbeats, round trips a second of a rank",
        measured=lambda job: job["last"]["heartbeats"] / WATCH_SECONDS,
        form="4; 2,000 / n beyond 500",
        on_paper=heartbeats_a_second,
        tolerance=0.15,
        digits=1,
    ),
    Count(
        name="heartbeats, round trips a second of all",
        measured=lambda job: job["all"]["heartbeats"] / WATCH_SECONDS,
        form="4 (n - 1); 2,000 beyond 500",
        on_paper=lambda n: (n - 1) * heartbeats_a_second(n),
        tolerance=0.15,
    ),
    Count(
        name="save and verify, round trips of all",
        measured=lambda job: job["all"]["save"] + job["all"]["verify"],
        form="0",
        on_paper=lambda n: 0,
    ),
    Count(
        name="files of a checkpoint",
        measured=lambda job: job["files"],
        form="n + 3",
        on_paper=lambda n: n + 3,
    ),
    Count(
        name="bytes of its manifest",
        measured=lambda job: job["manifest_bytes"],
        form="156 n + 426",
        on_paper=lambda n: 156 * n + 426,
        tolerance=0.02,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/scaling.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = {count: measure(count) for count in options.ranks}
    rows = []
    for count in COUNTS:
        values = [f"{count.measured(job):,.{count.digits}f}" for job in measured.values()]
        rows.append([count.name, *values, f"{count.on_paper(PAPER_RANKS):,.{count.digits}f}", count.form])
    for phase in ("plan", "start-up", "save", "verify"):
        seconds = [f"{job['seconds'][phase]:.2f}" for job in measured.values()]
        rows.append([f"{phase}, seconds", *seconds, "", ""])
    for ranks, job in measured.items():
        for count in COUNTS:
            count.check(ranks, job)
    publish(
        "scaling",
        title="What grows with the number of ranks",
        headings=("what", *(f"{count}" for count in measured), f"{PAPER_RANKS:,}, on paper", "of n ranks"),
        rows=rows,
        notes=[
            "`plan`: ranks say what they run on, and the first one decides for all (`parallel: auto`).",
            "`start-up`: the process group, its watchdog, and gloo's connections of all pairs of ranks.",
            "`save`: one MiB of fp32 a rank, in a file of each; `verify`: every file hashed, by ranks in turns.",
            "The watchdog is stopped before `save`: neither it nor `verify` asks the store for anything.",
            "gloo connects all pairs of ranks, once: 3 n round trips of each. NCCL asks for one key a group instead.",
            "Nothing else grows on one rank. The store answers what all ranks ask; manifest and files are of the job.",
            "Seconds are of all ranks on two cores, which is where n and n² of them come from.",
        ],
        save=options.save,
    )


if __name__ == "__main__":
    main()
