"""Where ranks meet, MASTER_ADDR and MASTER_PORT: errors and waits that name it, and the network that leads there.

Imports no torch.
"""

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.errors import RunError
from toolkit.launch.health.local_process import print_error, summarize
from toolkit.launch.rank_environment import RankEnvironment

_RESOLVE_SECONDS = 30.0
"""Name servers learn of a machine a little after it has started."""
_SILENT_SECONDS = 60.0
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
"""Request for the IPv4 address of an interface: netdevice(7)."""


def check_address(environment: RankEnvironment) -> None:
    """Raise RunError if this machine finds no address for MASTER_ADDR within half a minute."""
    addr = environment.master_addr
    deadline = time.monotonic() + _RESOLVE_SECONDS
    while (reason := _resolve_error(addr)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if reason:
        raise RunError(
            f"MASTER_ADDR={addr}: {socket.gethostname()} finds no address of that name ({reason}). Ranks meet there: "
            "give a name that every machine knows, or an address."
        )


def name_interface(master_addr: str) -> None:
    """Have gloo use the interface that leads to `master_addr`, unless GLOO_SOCKET_IFNAME names another.

    Its own choice is the address of this machine's name. With several networks that can be one which the other
    machines do not reach, and Debian gives 127.0.1.1 to a machine's own name.
    """
    if _INTERFACE in os.environ:
        return
    with contextlib.suppress(OSError, UnicodeError):  # IPv6 alone: the choice is left to gloo
        address = address_towards(master_addr)
        names = [name for _, name in socket.if_nameindex() if _address_of(name) == address]
        if names and not address.startswith("127."):
            os.environ[_INTERFACE] = names[0]


@contextmanager
def announced_wait(environment: RankEnvironment) -> Iterator[None]:
    """After a minute inside, one rank of each machine says on stderr for whom it waits, and where."""
    host = socket.gethostname()
    place = f"{environment.master_addr}:{environment.master_port}"
    if environment.rank == 0:
        waits = f"has waited {_SILENT_SECONDS:.0f} s at {place} for the other ranks; {environment.world_size} must come"
    else:
        waits = f"has waited {_SILENT_SECONDS:.0f} s for rank 0 at {place} (MASTER_ADDR and MASTER_PORT)"
    timer = threading.Timer(_SILENT_SECONDS, print_error, [f"note: rank {environment.rank} on {host} {waits}"])
    timer.daemon = True
    if environment.local_rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def meeting_error(environment: RankEnvironment, error: BaseException) -> RunError:
    """Describe why this rank could not meet the others, from the error of torch's store."""
    host = socket.gethostname()
    if "EADDRINUSE" in str(error):
        return RunError(
            f"MASTER_PORT={environment.master_port}: another process of {host} uses that port. Choose another one for "
            "this job; docs/launchers.md has each launcher's option.",
            scope="rank",
        )
    return RunError(
        f"rank {environment.rank} on {host} has not met the others at {environment.master_addr}:"
        f"{environment.master_port} (MASTER_ADDR and MASTER_PORT): {summarize(error)}"
    )


def _resolve_error(name: str) -> str:
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError as error:  # a label is empty or too long
        return str(error)
    return ""


def address_towards(name: str) -> str:
    """The IPv4 address from which this machine sends to `name`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((name, 9))  # of UDP, which sends nothing
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface; empty without one."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    return ""
