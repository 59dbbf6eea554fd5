"""Ranks that a real `mpirun` or `srun` starts on two hosts know their number, their host and where they meet."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.hosts import Command, Host, hosts, require_hosts
from cluster.launchers import missing_command
from cluster.slurm import missing_slurm, slurm
from cluster.ssh import missing_ssh, start_sshd

require_hosts()
pytestmark = pytest.mark.whole
PRINT = """
import os, socket
from toolkit.launch.rank_environment import RankEnvironment
found = RankEnvironment.detect()
line = f"{found.rank} {found.world_size} {found.local_rank} {socket.gethostname()} {found.master_addr}\\n"
os.write(1, line.encode())
"""
EXPECTED = ["0 4 0 node1 node1", "1 4 1 node1 node1", "2 4 0 node2 node1", "3 4 1 node2 node1"]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Host]]:
    tmp_path.chmod(0o755)  # munge is not root
    with hosts(2, tmp_path) as made:
        yield made


def mpirun(nodes: list[Host], *options: str) -> Command:
    if absent := missing_command("mpirun") or missing_ssh():
        pytest.skip(absent)
    start_sshd(nodes, nodes[0].folder / "ssh")
    words = ["mpirun", "--allow-run-as-root", "--host", "node1:2,node2:2", *options, "-x", "PATH", "-x", "PYTHONPATH"]
    return nodes[0].start([*words, sys.executable, "-c", PRINT])


def test_mpirun(nodes: list[Host]) -> None:
    started = mpirun(nodes, "-x", "MASTER_ADDR=node1")
    assert started.wait(120) == 0, started.output
    assert sorted(filter(None, started.output.splitlines())) == EXPECTED


def test_mpirun_without_a_place_to_meet_is_refused(nodes: list[Host]) -> None:
    started = mpirun(nodes)
    assert started.wait(120) != 0
    assert "Name it: mpirun -x MASTER_ADDR=HOST." in started.output


def test_srun(nodes: list[Host]) -> None:
    if missing_slurm():
        pytest.skip(missing_slurm())
    with slurm(nodes, nodes[0].folder / "slurm") as environment:
        words = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-c", PRINT]
        started = nodes[0].start(words, env=environment)
        assert started.wait(120) == 0, started.output
    assert sorted(started.output.splitlines()) == EXPECTED
