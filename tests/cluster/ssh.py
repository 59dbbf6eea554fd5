"""A real sshd on each host, with keys made for the test. Nothing outside of the hosts is changed."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.hosts import Host

_SSHD = "/usr/sbin/sshd"
_CLIENT = """
Host *
  IdentityFile {folder}/identity
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  BatchMode yes
"""
_SERVER = """
HostKey {folder}/identity
AuthorizedKeysFile {folder}/identity.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
MaxStartups 100
PidFile none
"""


def missing_ssh() -> str:
    """Why no sshd can be started here; empty if one can."""
    if Path(_SSHD).exists() and shutil.which("ssh-keygen"):
        return ""
    return "sshd is not installed (Debian: openssh-server)"


def start_sshd(nodes: Sequence[Host], folder: Path) -> None:
    """Start sshd on every host; root logs in from each to each without a password."""
    folder.mkdir()
    key = folder / "identity"
    nodes[0].run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"{node.name},{node.address} {public}\n" for node in nodes))
    (folder / "ssh_config").write_text(_CLIENT.format(folder=folder))
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    for node in nodes:
        node.run(["sh", "-c", f"mount --bind {folder} /etc/ssh && mkdir -p /run/sshd"])
        node.start([_SSHD, "-D", "-e"])
    deadline = time.monotonic() + 60
    for node in nodes:
        while nodes[0].start(["ssh", node.name, "true"]).wait(30) != 0:
            assert time.monotonic() < deadline, f"no sshd on {node.name}"
            time.sleep(0.2)
