"""A server that answers what huggingface_hub asks of a dataset: facts, lists of files, and ranges of them."""

import hashlib
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "org/crawl"
_SHA = "0" * 40


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, *arguments: Any, folder: Path, requests: list[str]) -> None:
        self.folder, self.requests = folder, requests
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.requests.append(f"{self.path} {self.headers.get('Range', '')}")
        path = unquote(urlsplit(self.path).path)
        facts, files = f"/api/datasets/{REPOSITORY}", f"/datasets/{REPOSITORY}/resolve/"
        if path in (facts, f"{facts}/revision/main", f"{facts}/revision/{_SHA}"):
            return self.answer({"id": REPOSITORY, "sha": _SHA, "siblings": []})
        if path.startswith(f"{facts}/tree/"):
            below = self.folder / path.removeprefix(f"{facts}/tree/").partition("/")[2]
            recursive = parse_qs(urlsplit(self.path).query).get("recursive") == ["true"]
            found = sorted(below.glob("**/*" if recursive else "*"))
            return self.answer([self.entry(one) for one in found]) if below.is_dir() else self.missing()
        file = self.folder / path.removeprefix(files).partition("/")[2]
        return self.send_range(file.read_bytes()) if path.startswith(files) and file.is_file() else self.missing()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        """Facts of single paths."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = parse_qs(body).get("paths") or json.loads(body)["paths"]
        found = [self.folder / name for name in ([wanted] if isinstance(wanted, str) else wanted)]
        self.answer([self.entry(path) for path in found if path.exists()])

    def entry(self, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(self.folder))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": _SHA}
        data = path.read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def send_range(self, data: bytes) -> None:
        start, _, end = self.headers.get("Range", f"bytes=0-{len(data)}").removeprefix("bytes=").partition("-")
        self.reply(206 if "Range" in self.headers else 200, data[int(start) : int(end) + 1])

    def answer(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), "application/json")

    def missing(self) -> None:
        self.reply(404, b"", error="EntryNotFound" if REPOSITORY in self.path else "RepoNotFound")

    def reply(self, status: int, data: bytes, kind: str = "application/octet-stream", error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class HubServer:
    """Serves a folder as the dataset REPOSITORY. `requests` are those that were made."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        handler = partial(_Handler, folder=folder, requests=self.requests)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
