"""A real Slurm on hosts: munge, slurmctld on the first one, slurmd on each, and two GPUs a host that are none."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster.hosts import Host, command_environment

_CONFIG = """
ClusterName=test
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=30
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
_NODE = "NodeName={name} NodeAddr={address} CPUs={cpus} RealMemory=4000 Gres=gpu:2 State=UNKNOWN"
_CPUS = 32
"""Cores that a host claims to have: no limit of theirs is enforced."""
_SET_UP = """
set -e
mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir /sys/fs/cgroup/freezer
touch /run/gpu0 /run/gpu1
install -d -o munge -g munge /run/munge
install -o munge -g munge -m 400 {key} /run/munge/key
"""
"""Without /sys/fs/cgroup slurmd does not start; it takes files for GPUs."""
_MUNGED = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--foreground", "--force"]
_MUNGED += [f"--{option}-file=/run/munge/{option}" for option in ("key", "pid", "log", "seed")]
_MUNGED += ["--socket=/run/munge/socket"]
_START_SECONDS = 90


def missing_slurm() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed (Debian: munge, slurm-wlm)" if absent else ""


@contextmanager
def slurm(nodes: Sequence[Host], folder: Path) -> Iterator[dict[str, str]]:
    """Start Slurm on all hosts; yields the environment of its commands."""
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    lines = [_NODE.format(name=node.name, address=node.address, cpus=_CPUS) for node in nodes]
    names = ",".join(node.name for node in nodes)
    config = _CONFIG.format(first=nodes[0].name, folder=folder, nodes="\n".join(lines), names=names)
    (folder / "slurm.conf").write_text(config)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "gres.conf").write_text("".join(f"NodeName={node.name} Name=gpu File=/run/gpu[0-1]\n" for node in nodes))
    environment = command_environment() | {"SLURM_CONF": str(folder / "slurm.conf")}
    for node in nodes:
        node.run(["sh", "-c", _SET_UP.format(key=key)])
        node.start(_MUNGED)
    for node in nodes:
        _wait_for(lambda node=node: node.start(["test", "-S", "/run/munge/socket"]).wait(30) == 0)
    nodes[0].start(["slurmctld", "-D"], env=environment)
    for node in nodes:
        node.start(["slurmd", "-D", "-N", node.name], env=environment)
    idle = ["sinfo", "--noheader", "--format=%t %D"]

    def all_idle() -> bool:
        asked = nodes[0].start(idle, env=environment)
        return asked.wait(60) == 0 and asked.output.strip() == f"idle {len(nodes)}"

    _wait_for(all_idle)
    yield environment


def _wait_for(is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not is_ready():
        assert time.monotonic() < deadline, "Slurm did not start"
        time.sleep(0.5)
