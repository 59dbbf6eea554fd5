"""Disturb an elastic run on four hosts at random until it ends, and compare it with one that nothing disturbed.

    python tests/cluster/chaos.py --steps 2000 --disturbances 100
    python tests/cluster/chaos.py --steps 300 --disturbances 10 --seed 4
    python tests/cluster/chaos.py --steps 500 --disturbances 25 --layout dp2-z2

Checkpoints go to S3 and to the memory of hosts; the run directory is on a disk that the hosts share. Lost hosts are
started again, and torchrun where it has ended, as a cluster does; nothing else is repaired. The run must end by itself,
with the losses and gradient norms of one undisturbed process within 1e-6: the layout is planned anew at each restart.
With `--layout` it stays, as many hosts as it has ranks train, the others are spares, and the run must equal an
undisturbed one in that layout to the bit.

The table says what each kind of disturbance cost: steps that were taken again, and seconds without a new one.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from s3_server import environment

from cluster.elastic import ElasticJob, write_elastic_demo
from cluster.faulty_store import BUCKET, PORT
from cluster.hosts import ROOT, Host, hosts, missing
from cluster.runs import TOLERANCE, metrics, train_in_one_process, train_undisturbed
from toolkit.config.strategy import Strategy

HOSTS = 4
SCRIPT = ROOT / "tests" / "cluster" / "chaos_train.py"
STORE = ROOT / "tests" / "cluster" / "faulty_store.py"
_RECOVERY_SECONDS = 300
_EFFECT_STEPS = 5
"""Steps that a run takes, about, while a disturbance shows its effect."""
_RETURN_PROBABILITY = 0.7
"""That hosts which are away come back before the next disturbance."""
_DISK_BYTES = 400_000_000
_FULL_SECONDS = 4
_REFUSED_SECONDS = 6


@dataclass(kw_only=True)
class Disturbance:
    """One disturbance, and what it cost."""

    kind: str
    detail: str = ""
    step: int
    lost_steps: int = 0
    """Steps that were taken again."""
    missed: bool = False
    """Whether it hit no host that trains."""
    silent_seconds: float = 0.0
    """The longest time without a new step until the run was beyond the disturbed step."""
    layout: str = ""
    """The layout in which it went on."""


@dataclass(kw_only=True)
class Chaos:
    """A run on hosts, of which some may be away."""

    job: ElasticJob
    nodes: list[Host]
    disk: Path
    rng: random.Random
    away: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Hosts that are lost, drained or cut off, with what brings each back."""
    least: int = 1
    """Hosts that the run needs."""

    @property
    def present(self) -> list[Host]:
        return [node for node in self.nodes if node.name not in self.away]

    @property
    def replicas(self) -> int:
        """The data-parallel ranks of the present layout."""
        match = re.match(r"dp(\d+)", self.job.layout)
        return int(match[1]) if match else 1

    def ranks_of(self, node: Host) -> list[int]:
        """The processes that train on a host; none on a spare one."""
        return [pid for pid, line in node.processes().items() if str(SCRIPT) in line and "torchrun" not in line]

    def draw_host(self) -> Host:
        """A host that trains; any that is present while none does."""
        training = [node for node in self.present if self.ranks_of(node)]
        return self.rng.choice(training or self.present)

    def bring_back(self) -> None:
        """Bring back all hosts that are away."""
        for name, return_host in list(self.away.items()):
            return_host()
            del self.away[name]
        self.supervise()

    def supervise(self) -> None:
        """Start torchrun where it has ended before the run has, as a service manager does."""
        for node in self.present:
            if self.job.commands[node.name].process.poll() is not None and not self.job.has_ended:
                self.job.join(node)

    def wait(self, until: Callable[[], bool], timeout: float = _RECOVERY_SECONDS) -> None:
        """Wait until something is true or the run has ended, under supervision. Raises AssertionError after that."""

        def is_over() -> bool:
            if len(self.present) < self.least:
                self.bring_back()
            self.supervise()
            return until() or self.job.has_ended

        self.job.wait(is_over, timeout)


def kill_rank(chaos: Chaos) -> str:
    """kill -9 of a rank."""
    node = chaos.draw_host()
    pids = chaos.ranks_of(node)
    for pid in pids[:1]:
        os.kill(pid, signal.SIGKILL)
    return node.name


def drain_host(chaos: Chaos) -> str:
    """SIGTERM to the torchrun of a host, which ends."""
    node = chaos.draw_host()
    for pid, line in node.processes().items():
        if "torchrun" in line:
            os.kill(pid, signal.SIGTERM)
    chaos.away[node.name] = lambda: None
    return node.name


def lose_host(chaos: Chaos) -> str:
    """The power of a host fails."""
    node = chaos.draw_host()
    node.lose()
    chaos.away[node.name] = node.power_on
    return node.name


def cut_shortly(chaos: Chaos) -> str:
    """A link is down for a second: everything waits."""
    node = chaos.draw_host()
    node.cut()
    time.sleep(1)
    node.connect()
    return node.name


def cut_for_long(chaos: Chaos) -> str:
    """A link is down until the others have given up."""
    node = chaos.draw_host()
    node.cut()

    def connect_again() -> None:
        node.connect()
        node.kill_processes()
        chaos.job.commands[node.name].process.wait(30)

    chaos.away[node.name] = connect_again
    return node.name


def fill_disk(chaos: Chaos) -> str:
    """The disk of the run is full for some seconds, in which a save fails."""
    ballast = chaos.disk / "ballast"
    with ballast.open("wb") as file:
        free = os.statvfs(chaos.disk).f_bavail * os.statvfs(chaos.disk).f_frsize
        os.posix_fallocate(file.fileno(), 0, max(1, free - 100_000))
    time.sleep(_FULL_SECONDS)
    ballast.unlink()
    return ""


def refuse_store(chaos: Chaos) -> str:
    """S3 refuses every request for some seconds, in which a save fails."""
    refuse = chaos.disk / "refuse"
    refuse.write_text("")
    time.sleep(_REFUSED_SECONDS)
    refuse.unlink()
    return ""


def corrupt_newest(chaos: Chaos) -> str:
    """A byte of the newest checkpoint in S3 changes, and a rank dies."""
    corrupt = chaos.disk / "corrupt"
    corrupt.write_text("")
    chaos.job.wait(lambda: not corrupt.exists())
    return kill_rank(chaos)


def flip_bit(chaos: Chaos) -> str:
    """A bit of the weights of one replica flips."""
    rank = chaos.rng.randrange(chaos.replicas)
    (chaos.disk / f"flip-{rank}").write_text("")
    return f"rank {rank}"


KINDS: tuple[Callable[[Chaos], str], ...] = (
    kill_rank,
    drain_host,
    lose_host,
    cut_shortly,
    cut_for_long,
    fill_disk,
    refuse_store,
    corrupt_newest,
    flip_bit,
)

RESTARTS = (kill_rank, drain_host, lose_host, cut_for_long, corrupt_newest)
"""Those after which all ranks start again; a full disk may also have that effect."""
_MISSED_STEPS = 40
"""Steps after which a disturbance that shows no effect has hit a host that was just joining, or a spare. It does not
count as one, and the run fails where there are many: then something else is wrong."""
_MOST_MISSED = 0.2
"""Of all disturbances, those that may have hit no host that trains."""


def disturb(chaos: Chaos, kind: Callable[[Chaos], str]) -> Disturbance:
    """Disturb the run, and wait until it is further than it was.

    The disturbance is `missed` where the run goes on as if nothing had happened.
    """
    job = chaos.job
    happened = Disturbance(kind=kind.__name__, step=job.steps)
    began = time.monotonic()
    opened = job.opened
    happened.detail = kind(chaos)
    progress = [(began, happened.step)]

    def has_shown() -> bool:
        return job.opened > opened if kind in RESTARTS else not list(chaos.disk.glob("flip-*"))

    def is_further() -> bool:
        steps = job.steps
        if steps != progress[-1][1]:
            progress.append((time.monotonic(), steps))
        return steps > happened.step + (0 if has_shown() else _MISSED_STEPS)

    chaos.wait(is_further)
    happened.missed = not has_shown()
    for never_read in chaos.disk.glob("flip-*"):
        never_read.unlink()
    progress.append((time.monotonic(), job.steps))
    pauses = [after - before for (before, _), (after, _) in pairwise(progress)]
    happened.silent_seconds = round(max(pauses), 1)
    happened.lost_steps = max(0, happened.step - min(steps for _, steps in progress))
    happened.layout = job.layout
    return happened


def run(arguments: argparse.Namespace, folder: Path) -> list[Disturbance]:
    """Disturb a run until it ends; raises AssertionError where it does not end as an undisturbed one."""
    rng = random.Random(arguments.seed)
    steps = arguments.steps
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", disk], check=True)
    try:
        recipe = write_elastic_demo(folder, steps=steps)
        words = ["checkpoint.memory_every=7", f"checkpoint.url=s3://{BUCKET}/run"]
        words += ["train.replica_check=1", "train.max_incidents=20"]
        if arguments.layout:
            layout = ["--layout", arguments.layout, "batch.micro_batch_size=4"]
            words += layout
            least = Strategy.parse(arguments.layout).world_size(1)
            most = least
            tolerance = 0.0
            undisturbed = train_undisturbed(folder, recipe, least, *layout)
        else:
            least = 1
            most = HOSTS
            tolerance = TOLERANCE
            undisturbed = train_in_one_process(folder, recipe, "batch.micro_batch_size=16")
        happened: list[Disturbance] = []
        missed: list[Disturbance] = []
        with hosts(HOSTS + 1, folder / "nodes") as nodes:
            store = nodes[0].start([sys.executable, STORE, disk])
            variables = environment(f"http://{nodes[0].name}:{PORT}")
            job = ElasticJob(
                nodes[0],
                f"{least}:{most}",
                recipe,
                disk / "run",
                overrides=words,
                script=SCRIPT,
                cwd=disk,
                variables=variables,
            )
            job.wait(lambda: "serves" in store.output)
            chaos = Chaos(job=job, nodes=nodes[1:], disk=disk, rng=rng, least=least)
            for node in chaos.nodes:
                job.join(node)
            chaos.wait(lambda: job.steps > 2)
            while len(happened) < arguments.disturbances and not job.has_ended:
                # Of a single replica nothing tells that a bit has flipped.
                allowed = [kind for kind in KINDS if kind.__name__ in arguments.kinds]
                possible = [kind for kind in allowed if kind is not flip_bit or chaos.replicas > 1]
                disturbance = disturb(chaos, rng.choice(possible or [kill_rank]))
                print(json.dumps(vars(disturbance)), flush=True)
                if disturbance.missed:
                    missed.append(disturbance)
                else:
                    happened.append(disturbance)
                assert len(missed) <= 2 + _MOST_MISSED * len(happened), f"no effect: {missed}\n{job.output}"
                if rng.random() < _RETURN_PROBABILITY:
                    chaos.bring_back()
                spacing = (steps - job.steps) // (arguments.disturbances - len(happened) + 1)
                next_step = job.steps + rng.randint(1, max(1, 2 * (spacing - _EFFECT_STEPS)))
                chaos.wait(lambda next_step=next_step: job.steps >= next_step)
            assert len(happened) == arguments.disturbances, f"the run has ended after {len(happened)} disturbances"
            chaos.bring_back()
            chaos.wait(lambda: job.has_ended, timeout=3600)
        largest = compare(metrics(disk / "run"), undisturbed, tolerance)
        counts = f"{len(happened)} disturbances and {len(missed)} without effect, {steps} steps"
        print(f"{counts}; largest difference from the undisturbed run: {largest:.1e}")
        return happened
    finally:
        subprocess.run(["umount", "--lazy", disk], check=False)


def compare(lines: list[dict[str, float]], undisturbed: list[dict[str, float]], tolerance: float) -> float:
    """The largest relative difference of a loss or a gradient norm; raises AssertionError where it is too large."""
    assert [line["step"] for line in lines] == [line["step"] for line in undisturbed]
    differences = {}
    for line, expected in zip(lines, undisturbed, strict=True):
        for name in ("loss", "grad_norm"):
            differences[f"{name} of step {line['step']:.0f}"] = abs(line[name] / expected[name] - 1)
    beyond = [f"{where} is {value:.1e} off" for where, value in differences.items() if value > tolerance]
    assert not beyond, f"{beyond[0]}, and {len(beyond) - 1} more"
    return max(differences.values())


def table(happened: list[Disturbance]) -> str:
    """What each kind of disturbance cost."""
    rows = ["| what happened | times | steps taken again, mean (most) | seconds without a step, median (most) |"]
    rows.append("|---|---|---|---|")
    for kind in KINDS:
        of_kind = [disturbance for disturbance in happened if disturbance.kind == kind.__name__]
        if of_kind:
            steps = [disturbance.lost_steps for disturbance in of_kind]
            seconds = [disturbance.silent_seconds for disturbance in of_kind]
            name = (kind.__doc__ or "").split(".")[0].rstrip(".")
            cost = (
                f"{statistics.mean(steps):.1f} ({max(steps)}) | {statistics.median(seconds):.1f} ({max(seconds):.1f})"
            )
            rows.append(f"| {name} | {len(of_kind)} | {cost} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--disturbances", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", help="keep this layout, such as dp2-z2, and compare to the bit")
    names = [kind.__name__ for kind in KINDS]
    parser.add_argument("--kinds", nargs="+", choices=names, default=names, metavar="KIND", help=", ".join(names))
    options = parser.parse_args()
    if options.layout and Strategy.parse(options.layout).world_size(1) > HOSTS:
        parser.error(f"--layout {options.layout}: there are {HOSTS} hosts of one rank each")
    if missing():
        sys.exit(missing())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        print(table(run(options, Path(name))))


if __name__ == "__main__":
    main()
