"""A TCP proxy that breaks connections in the middle of an answer, a given number of times."""

import contextlib
import socket
import socketserver
import threading


class CuttingProxy(socketserver.ThreadingTCPServer):
    """Forwards to a port of this machine, and cuts `cuts` connections after `after_bytes` of what that answers."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int, *, after_bytes: int) -> None:
        self.port, self.after_bytes, self.cuts = port, after_bytes, 0
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(socketserver.BaseRequestHandler):
    server: CuttingProxy

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.port)) as upstream:
            threading.Thread(target=_forward, args=(self.request, upstream), daemon=True).start()
            answered = 0
            with contextlib.suppress(OSError):
                while data := upstream.recv(1 << 12):
                    answered += len(data)
                    if answered > self.server.after_bytes and self.server.cuts > 0:
                        self.server.cuts -= 1
                        return
                    self.request.sendall(data)


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
