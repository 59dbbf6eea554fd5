"""Starting the server of this host, or finding the one that an earlier start of the same launch has left."""

import json
import os
import socket
import subprocess
import sys
import time

from toolkit.errors import RunError
from toolkit.host_memory import server
from toolkit.host_memory.filesystem import HostServer

_START_SECONDS = 60.0
_POLL_SECONDS = 0.05


def server_of_this_host(launcher: int, address: str) -> HostServer:
    """The server of the launcher with this process id, which is started if there is none.

    `address`: that of this host, as other hosts reach it. Raises RunError where no server starts.
    """
    deadline = time.monotonic() + _START_SECONDS
    process: subprocess.Popen[bytes] | None = None
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as visitor:
                visitor.connect(server.door_of(launcher))
                if server.user_of(visitor) != os.getuid():
                    raise PermissionError("a process of another user has its name")
                told = json.loads(visitor.makefile().read())
            return HostServer(name=socket.gethostname(), address=address, port=told["port"], secret=told["secret"])
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline or (process is not None and process.poll()):
                reason = f"no server of checkpoints in memory starts on {socket.gethostname()} ({error})"
                raise RunError(f"checkpoint.memory_every: {reason}. Set it to 0.", scope="job") from None
        if process is None:
            process = _start(launcher)
        time.sleep(_POLL_SECONDS)


def _start(launcher: int) -> subprocess.Popen[bytes]:
    """Start a server in a session of its own: a launcher kills those of its ranks."""
    words = [sys.executable, "-m", server.__name__, str(launcher)]
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
