"""A source behind a URL becomes the cache of the same files here; what a server refuses is one line."""

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from cutting_proxy import CuttingProxy
from fsspec.registry import _registry
from moto.server import ThreadedMotoServer
from refusals import refused

from toolkit import remote_files
from toolkit.config.data_section import DataSection
from toolkit.data.documents import remote, sources
from toolkit.data.documents.part import SourcePart
from toolkit.data.documents.sources import open_source
from toolkit.data.tokens import shard as shard_files
from toolkit.data.tokens.shard import TokenShard
from toolkit.data.tokens.shards import make_shard, merge_shards
from toolkit.data.tokens.token_cache import TokenCorpus, prepare
from toolkit.errors import DataError, RunError

TEXTS = [f"document {n}: " + f"word{n % 7} ünd {n * n} more\n" * (n % 40) for n in range(150)] + ["", "last"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
BUCKET = "corpus"


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedMotoServer]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def s3(server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the server, on an empty bucket. Processes that tokenize find the server by their environment."""
    monkeypatch.setattr(remote_files, "_FIRST_WAIT_SECONDS", 0.01)
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing"),
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    forget_connections()
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=found["Key"])
    yield client
    forget_connections()


def forget_connections() -> None:
    remote_files.forget_connections()


def parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path, row_group_size=20)


def arrow(path: Path) -> None:
    table = pyarrow.table({"text": TEXTS})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(LINES)),
    "a.parquet": parquet,
    "a.arrow": arrow,
    "long.txt": lambda path: path.write_text("a line of text\n" * 2000),
    "b/c.txt": lambda path: path.write_text(TEXTS[30]),
}
SOURCES = {
    **{name: ([name], name) for name in WRITERS if name != "b/c.txt"},
    "directory": (["a.jsonl", "a.parquet", "b/c.txt"], ""),
    "directory of text": (["long.txt", "b/c.txt"], ""),
    "glob": (["a.jsonl", "a.jsonl.gz", "long.txt"], "*.jsonl*"),
    "glob of directories": (["long.txt", "b/c.txt"], "**/*.txt"),
}


def upload(s3: Any, folder: Path, names: list[str]) -> None:
    for name in (*names, ".hidden.jsonl", "notes.bin"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        WRITERS.get(name, lambda path: path.write_text("nothing"))(folder / name)
        s3.upload_file(str(folder / name), BUCKET, f"text/{name}")


def section(source: str, folder: Path, **fields: Any) -> DataSection:
    defaults = {"tokenizer": "bpe-300", "workers": 1, "seq_len": 8, "cache_dir": str(folder / "cache")}
    return DataSection(source=source, eval_fraction=0.2, **{**defaults, **fields})


def built(source: str, folder: Path, **fields: Any) -> TokenCorpus:
    return prepare(section(source, folder, **fields), progress=False)


def content(corpus: TokenCorpus) -> dict[str, bytes]:
    return {path.relative_to(corpus.path).as_posix(): path.read_bytes() for path in corpus.path.rglob("*.*")}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.text_chunks, "CHUNK_BYTES", 9000)
    monkeypatch.setattr(sources, "PART_BYTES", 4000)
    monkeypatch.setattr(remote, "_FETCH_BYTES", 10_000)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", SOURCES)
def test_the_cache_is_that_of_the_same_files_here(kind: str, s3: Any, tmp_path: Path) -> None:
    names, pattern = SOURCES[kind]
    upload(s3, tmp_path / "text", names)
    there = built(f"s3://{BUCKET}/text/{pattern}".rstrip("/"), tmp_path)
    here = built(f"{tmp_path}/text/{pattern}".rstrip("/"), tmp_path)
    assert there.path != here.path
    assert content(there) == content(here)


@pytest.mark.usefixtures("small_chunks")
def test_processes_that_tokenize_read_for_themselves(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    s3.upload_file(str(tmp_path / "a.jsonl"), BUCKET, "a.jsonl")
    there = built(f"s3://{BUCKET}/a.jsonl", tmp_path, workers=2)
    assert content(there) == content(built(str(tmp_path / "a.jsonl"), tmp_path))


def test_shards_behind_a_url_are_merged(s3: Any, tmp_path: Path) -> None:
    upload(s3, tmp_path / "text", ["a.jsonl", "a.parquet"])
    source, place = f"s3://{BUCKET}/text", f"s3://{BUCKET}/shards"
    for number in (2, 1):
        made = make_shard(
            section(source, tmp_path / str(number)), SourcePart(number=number, count=2), folder=place, progress=False
        )
        assert isinstance(made, TokenShard)
        assert not list((tmp_path / str(number) / "cache").rglob("*.bin"))
    merged = merge_shards(section(source, tmp_path / "merged"), folder=place)
    assert content(merged) == content(built(source, tmp_path))
    key = next(
        one["Key"] for one in s3.list_objects_v2(Bucket=BUCKET)["Contents"] if "00002-of-00002/ids" in one["Key"]
    )
    s3.put_object(Bucket=BUCKET, Key=key, Body=b"short")
    with pytest.raises(DataError, match=r"00002-of-00002: ids\.bin is truncated: 5 of [0-9]+ bytes"):
        merge_shards(section(source, tmp_path / "again"), folder=place)
    assert not list((tmp_path / "again").rglob("*.bin"))


def test_a_shard_that_cannot_be_uploaded_is_kept(s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    upload(s3, tmp_path / "text", ["a.jsonl"])
    data, part = section(str(tmp_path / "text"), tmp_path), SourcePart(number=1, count=2)
    with refused(RunError, "--shards"):
        make_shard(data, part, folder="s3://no-such-bucket/shards", progress=False)
    monkeypatch.setattr(shard_files, "encode_chunks", lambda *_: pytest.fail("tokenized again"))
    make_shard(data, part, folder=f"s3://{BUCKET}/shards", progress=False)
    assert not list((tmp_path / "cache").rglob("*.bin"))


@pytest.mark.usefixtures("small_chunks")
def test_a_file_behind_https_is_read_in_ranges(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_bytes(LINES)
    with http_server(tmp_path / "text", ranges=True) as url:
        assert content(built(f"{url}/a.jsonl?key=secret", tmp_path)) == content(
            built(f"{tmp_path}/text/a.jsonl", tmp_path)
        )
        assert not [path for path in (tmp_path / "cache").iterdir() if "secret" in path.name]
        with refused(DataError, "data.source"):
            built(f"{url}/missing.jsonl", tmp_path)
    with http_server(tmp_path / "text", ranges=False) as url, pytest.raises(DataError, match="sends no parts of files"):
        built(
            f"{url}/a.jsonl",
            tmp_path / "other",
            tokenizer=str(built(f"{tmp_path}/text/a.jsonl", tmp_path).tokenizer_dir),
        )


class RangeHandler(SimpleHTTPRequestHandler):
    ranges = True

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        data, wanted = (Path(self.directory) / "a.jsonl").read_bytes(), self.headers.get("Range")
        if self.ranges and wanted:
            start, end = wanted.removeprefix("bytes=").split("-")
            data = data[int(start) : int(end) + 1]
        if "missing" in self.path:
            self.send_error(404)
            return
        self.send_response(206 if self.ranges and wanted else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_HEAD(self) -> None:
        self.send_error(404) if "missing" in self.path else super().do_HEAD()


class http_server:  # noqa: N801
    def __init__(self, folder: Path, *, ranges: bool) -> None:
        handler = type("Handler", (RangeHandler,), {"ranges": ranges})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("s3://no-such-bucket/a.jsonl", "there is no such bucket"),
        ("s3://no-such-bucket/*.jsonl", "there is no"),
        (f"s3://{BUCKET}/missing.jsonl", "there is no such file or directory"),
        (f"s3://{BUCKET}/missing/*.jsonl", "there is no file"),
        ("s3://", "cannot be read"),
        ("s3://B@d bucket!/x", "cannot be read"),
        ("warp://corpus/a.jsonl", "Protocol not known: warp"),
    ],
)
def test_what_is_not_there_is_one_line(source: str, reason: str, tmp_path: Path) -> None:
    with refused(DataError, "data.source") as found:
        built(source, tmp_path)
    assert reason in found[0].reason, found[0].reason
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("https", "aiohttp")])
def test_a_package_that_is_missing_is_named_with_its_command(
    protocol: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, protocol, raising=False)
    with refused(DataError, "data.source", remedy=f"run pip install {package}"):
        built(f"{protocol}://{BUCKET}/a.jsonl", tmp_path)


def denies_after(server: ThreadedMotoServer, requests: bytes) -> None:
    """The server checks who asks, after so many requests; it knows nobody."""
    url = "http://{}:{}/moto-api/reset-auth".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(url, data=requests, headers={"Content-Type": "text/plain"})).read()


def test_denied_access_is_one_line(s3: Any, server: ThreadedMotoServer, tmp_path: Path) -> None:
    upload(s3, tmp_path / "text", ["a.jsonl"])
    denies_after(server, b"0")
    try:
        for source in (f"s3://{BUCKET}/text/a.jsonl", f"s3://{BUCKET}/text", f"s3://{BUCKET}/text/*.jsonl"):
            with refused(DataError, "data.source") as found:
                built(source, tmp_path)
            assert found[0].reason == "access is denied"
    finally:
        denies_after(server, b"Infinity")
    assert not (tmp_path / "cache").exists()


def test_missing_credentials_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with refused(DataError, "data.source") as found:
        built(f"s3://{BUCKET}/a.jsonl", tmp_path)
    assert "there are no credentials" in found[0].reason


def test_a_server_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
    with pytest.raises(RunError, match=f"s3://{BUCKET}/a.jsonl: the connection failed 4 times") as caught:
        built(f"s3://{BUCKET}/a.jsonl", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def proxy(s3: Any, server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingProxy]:
    with CuttingProxy(server.get_host_and_port()[1], after_bytes=20_000) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        forget_connections()
        yield proxy
        proxy.shutdown()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_connections_that_break_are_made_again(
    name: str, proxy: CuttingProxy, s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(proxy, "after_bytes", 1500)
    upload(s3, tmp_path / "text", [name])
    here = built(f"{tmp_path}/text/{name}", tmp_path)
    proxy.cuts = 3
    assert content(built(f"s3://{BUCKET}/text/{name}", tmp_path)) == content(here)
    assert proxy.cuts == 0


@pytest.mark.usefixtures("small_chunks")
def test_connections_that_always_break_keep_what_was_made(
    proxy: CuttingProxy, s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shard_files, "_COMMIT_TOKENS", 300)
    upload(s3, tmp_path / "text", ["a.jsonl"])
    here = built(f"{tmp_path}/text/a.jsonl", tmp_path)
    source, encode = f"s3://{BUCKET}/text/a.jsonl", shard_files.encode_chunks

    def broken(chunks: Iterator[Any], *rest: Any) -> Iterator[Any]:
        for number, chunk in enumerate(encode(chunks, *rest)):
            if number == 3:
                proxy.cuts, proxy.after_bytes = 10**9, 3000
            yield chunk

    monkeypatch.setattr(shard_files, "encode_chunks", broken)
    with pytest.raises(RunError, match="the connection failed 4 times") as caught:
        built(source, tmp_path, tokenizer=str(here.tokenizer_dir))
    assert "\n" not in str(caught.value)
    (progress,) = (tmp_path / "cache").rglob("progress.json")
    assert json.loads(progress.read_text())["progress"]["chunks"] == 4
    proxy.cuts = 0
    monkeypatch.setattr(shard_files, "encode_chunks", encode)
    assert (
        built(source, tmp_path, tokenizer=str(here.tokenizer_dir)).tokens("train").tolist()
        == here.tokens("train").tolist()
    )


def test_a_file_that_changes_while_it_is_tokenized_is_refused(
    s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    upload(s3, tmp_path / "text", ["a.jsonl"])
    encode = shard_files.encode_chunks

    def changing(*arguments: Any) -> Iterator[Any]:
        yield from encode(*arguments)
        s3.put_object(Bucket=BUCKET, Key="text/a.jsonl", Body=LINES.replace(b"more", b"less"))  # of the same length

    monkeypatch.setattr(shard_files, "encode_chunks", changing)
    with refused(DataError, "data.source") as found:
        built(f"s3://{BUCKET}/text/a.jsonl", tmp_path)
    assert "it changed while it was tokenized" in found[0].reason
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".failed"]


def test_a_bad_line_is_named_by_its_position(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="a.jsonl", Body=b'{"text": "x"}\n{broken\n')
    with pytest.raises(DataError, match=rf"s3://{BUCKET}/a.jsonl: line at byte 14: not a JSON object"):
        built(f"s3://{BUCKET}/a.jsonl", tmp_path)


def test_a_truncated_archive_is_named(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="a.jsonl.gz", Body=gzip.compress(LINES)[:-9])
    with pytest.raises(DataError, match=rf"s3://{BUCKET}/a.jsonl.gz: damaged or truncated"):
        built(f"s3://{BUCKET}/a.jsonl.gz", tmp_path)


def test_a_cache_directory_behind_a_url_is_refused(tmp_path: Path) -> None:
    with refused(DataError, "data.cache_dir"):
        built(str(tmp_path), tmp_path, cache_dir="s3://bucket/cache")


def test_the_fingerprint_follows_the_content(s3: Any) -> None:
    prints = []
    for body in (LINES, LINES, LINES.replace(b"more", b"less")):
        s3.put_object(Bucket=BUCKET, Key="a.jsonl", Body=body)
        data = DataSection(source=f"s3://{BUCKET}/*.jsonl", seq_len=8)
        prints.append(open_source(data).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_fsspec_is_imported_for_urls_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    code = f"""
import sys
from toolkit.config.data_section import DataSection
from toolkit.data.documents.sources import open_source
assert list(open_source(DataSection(source={str(tmp_path / "a.txt")!r}, seq_len=8)).chunks())
print(*sorted({{"fsspec", "s3fs", "aiohttp", "torch", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout == "\n"
