"""hf:// and gs:// are read as files here: from servers of this machine that speak their protocols.

The one of gs:// needs `pip install gcsfs gcp-storage-emulator`.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hub_server import REPOSITORY, HubServer

pytestmark = pytest.mark.whole
CODE = """
import json, sys
from toolkit.config.data_section import DataSection
from toolkit.data.documents import remote, sources
from toolkit.data.tokens.token_cache import prepare
from toolkit.errors import DataError
sources.text_chunks.CHUNK_BYTES = sources.PART_BYTES = remote._FETCH_BYTES = 20_000
fields = {"workers": 2, "seq_len": 8, "eval_fraction": 0.2, "cache_dir": sys.argv[1], "tokenizer": sys.argv[2]}
fields |= json.loads(sys.argv[3])
for source in sys.argv[4:]:
    try:
        print(prepare(DataSection(source=source, **fields), progress=False).path)
    except DataError as error:
        print(error)
"""
FILES = ("a.jsonl", "b/c.jsonl", "b/d.txt")
SOURCES = ("a.jsonl", "b", "*.jsonl", "**/*.jsonl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of which each range is short, so that several are asked for."""
    for name in FILES:
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{name} {number}: ünd more" for number in range(3000)]
        path.write_text("".join((json.dumps({"text": line}) if "jsonl" in name else line) + "\n" for line in lines))
    return tmp_path


def built(folder: Path, sources: list[str], environment: Mapping[str, str], **fields: Any) -> list[str]:
    """The cache of each source, or why it is refused, by a process with workers of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GOOGLE_"))}
    command = [sys.executable, "-c", CODE, str(folder / "cache"), "bpe-300", json.dumps(fields), *sources]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=kept | environment)
    return done.stdout.splitlines()


def content(cache: str) -> dict[str, bytes]:
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in Path(cache).rglob("*.*")}


def check(folder: Path, root: str, environment: Mapping[str, str]) -> None:
    there = built(folder, [f"{root}/{name}" for name in SOURCES], environment)
    here = built(folder, [f"{folder}/there/{name}" for name in SOURCES], environment)
    assert not set(there) & set(here)
    assert [content(cache) for cache in there] == [content(cache) for cache in here]
    for wrong in (f"{root}/none.jsonl", f"{root}/none/*.jsonl", f"{root.rpartition('/')[0]}/none/a.jsonl"):
        (line,) = built(folder, [wrong], environment)
        assert line.startswith(f"data.source={wrong}: there is no"), line


def test_a_dataset_of_the_hub(folder: Path) -> None:
    with HubServer(folder / "there") as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        check(folder, f"hf://datasets/{REPOSITORY}", environment)
        ranges = [re.search(r"bytes=(\d+)-(\d+)", request) for request in hub.requests]
        lengths = [int(found[2]) - int(found[1]) for found in ranges if found]
        assert len(lengths) > 20
        assert max(lengths) < 1 << 16  # nothing is read ahead, and thrown away
        (revision,) = built(folder, [f"hf://datasets/{REPOSITORY}@main/a.jsonl"], environment)
        assert content(revision)


def test_the_first_rows_of_a_dataset_are_streamed_by_datasets(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"row {number}: ünd more words"}) + "\n" for number in range(3000)]
    for shard in range(3):
        file = tmp_path / "there" / "data" / f"train-{shard:05d}-of-00003.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(lines[shard * 1000 : (shard + 1) * 1000]))
    (tmp_path / "here.jsonl").write_text("".join(lines[:1500]))
    with HubServer(tmp_path / "there") as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        (streamed,) = built(tmp_path, [REPOSITORY], environment, stream_rows=1500)
        (refused,) = built(tmp_path, [REPOSITORY], environment, stream_rows=10, split="other")
    (stored,) = built(tmp_path, [str(tmp_path / "here.jsonl")], {})
    assert streamed != stored
    assert content(streamed) == content(stored)
    assert refused.startswith(f"data.source={REPOSITORY}: "), refused


@contextmanager
def google_storage(folder: Path) -> Iterator[str]:
    """A server with the files in the bucket `corpus`."""
    import gcsfs
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="corpus")
    server.start()
    try:
        url = "http://{}:{}".format(*server._api._httpd.socket.getsockname())
        files = gcsfs.GCSFileSystem(token="anon", endpoint_url=url)
        for name in FILES:
            files.pipe_file(f"corpus/{name}", (folder / name).read_bytes())
        yield url
    finally:
        server.stop()


def test_a_bucket_of_google(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else it asks for the kind of bucket by gRPC, which the server does not speak.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    with google_storage(folder / "there") as url:
        check(folder, "gs://corpus", {"STORAGE_EMULATOR_HOST": url})
