"""An S3 server in this process (moto), and a proxy before it that denies, fails, slows down or cuts off requests."""

import contextlib
import http.client
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import pytest
from moto.server import ThreadedMotoServer

from toolkit import remote_files

_ERROR = (
    "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{code} was asked for</Message></Error>"
)
STATUS = {"AccessDenied": 403, "EntityTooLarge": 400, "SlowDown": 503, "InternalError": 500, "XMinioStorageFull": 507}
"""Codes of S3, and the HTTP status of each."""
CUT = "cut"
"""The fault that closes a connection in the middle of the request."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that came: `sent` and `answered` are bytes of the bodies."""

    method: str
    path: str
    sent: int
    answered: int
    status: int


class S3Proxy(ThreadingHTTPServer):
    """Forwards to a server at `port`. `fault` returns of method and path a code of STATUS, CUT, seconds, or None."""

    daemon_threads = True

    def __init__(self, port: int, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.port = port
        self.fault: Callable[[str, str], str | float | None] = lambda method, path: None
        self.requests: list[Request] = []
        super().__init__(address, _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def of(self, method: str, part: str = "") -> list[Request]:
        """The requests of a method whose path has this part."""
        return [request for request in self.requests if request.method == method and part in request.path]


class _Handler(BaseHTTPRequestHandler):
    server: S3Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def forward(self) -> None:
        fault = self.server.fault(self.command, self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length // 2 if fault == CUT else length)
        if fault == CUT:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(fault, float):
            time.sleep(fault)
        if isinstance(fault, str):
            status = STATUS[fault]
            answer = b"" if self.command == "HEAD" else _ERROR.format(code=fault).encode()
            headers = [("Content-Type", "application/xml")]
        else:
            upstream = http.client.HTTPConnection("127.0.0.1", self.server.port)
            upstream.request(self.command, self.path, body, dict(self.headers))
            reply = upstream.getresponse()
            status = reply.status
            answer = reply.read()
            headers = reply.getheaders()
            upstream.close()
        seen = Request(method=self.command, path=self.path, sent=len(body), answered=len(answer), status=status)
        self.server.requests.append(seen)
        with contextlib.suppress(OSError):
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            stated = next((value for name, value in headers if name.lower() == "content-length"), "0")
            self.send_header("Content-Length", stated if self.command == "HEAD" else str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815


def environment(endpoint: str) -> dict[str, str]:
    """The variables by which a process finds the server."""
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
    region = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    return {"AWS_ENDPOINT_URL": endpoint} | keys | region


@contextlib.contextmanager
def s3_server(address: tuple[str, int] = ("127.0.0.1", 0)) -> Iterator[S3Proxy]:
    """A server, and the proxy before it at an address and port, 0 being a free one."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    proxy = S3Proxy(server.get_host_and_port()[1], address)
    yield proxy
    proxy.shutdown()
    server.stop()


@contextlib.contextmanager
def found_server(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, bucket: str) -> Iterator[S3Proxy]:
    """Have this process and its ranks find the server, which has an empty bucket, and wait little where it fails."""
    for name, value in environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_files, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(remote_files, "_PART_ATTEMPTS", 2)
    remote_files.forget_connections()
    _make_bucket(proxy, bucket)
    yield proxy
    remote_files.forget_connections()


def _make_bucket(proxy: S3Proxy, name: str) -> None:
    proxy.fault = lambda method, path: None
    reset = urllib.request.Request(f"http://127.0.0.1:{proxy.port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).read()
    boto3.client("s3").create_bucket(Bucket=name)
    proxy.requests.clear()
