"""Over 100 hostile directories: each is rejected with one line, and without side effects.

Where a manifest guards the attacked file, it is forged to agree, so that the file itself must be rejected.
"""

import json
import os
import pickle
import shutil
import socket
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoint import forge_header, forge_manifest, save_tiny

from toolkit.checkpoint.manifest import FileRecord, read_manifest
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.select import select_checkpoint
from toolkit.errors import CheckpointError
from toolkit.files import read_regular

Attack = Callable[[Path], object]
NAMES = {
    "up": "../outside",
    "absolute": "/etc/passwd",
    "through": "optimizer/../../outside",
    "here": ".",
    "parent": "..",
    "nothing": "",
    "double": "optimizer//file",
    "backslash": "optimizer\\file",
    "newline": "model\nerror: all is well",
    "escape": "model\x1b[2J",
    "direction": "model\u202esrotcasnetefas",
    "nul": "model\x00.safetensors",
    "surrogate": "model\udcff",
    "endless": "x" * 5000,
    "number": 7,
    "null": None,
    "list": ["model.safetensors"],
}
MODEL, STATE = "model-00001-of-00002.safetensors", "optimizer/exp_avg-00001-of-00001.safetensors"
FILES = [MODEL, STATE, "model.safetensors.index.json", "trainer_state.json", "config.json", "manifest.json"]
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


class Payload:
    """What a pickle does when it is read."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/pickle-was-run",)


PICKLE = pickle.dumps(Payload())


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from toolkit.checkpoint.save import FileSizes

    sizes = FileSizes(max_file_bytes=850, min_file_bytes=1)
    saved = save_tiny(tmp_path_factory.mktemp("run"), 1, sizes=sizes)
    assert all((saved.path / file).is_file() for file in FILES)
    return saved.path


def manifest_with(checkpoint: Path, **changes: Any) -> None:
    """The fields changed, nothing fixed."""
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def manifest_naming(name: Any, checkpoint: Path) -> None:
    record = FileRecord(path=name, size=8, sha256="0" * 64)
    forge_manifest(checkpoint, files=[record])


def manifest_entry(change: Any, checkpoint: Path) -> None:
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    manifest_with(checkpoint, files=[files[0] | change if isinstance(change, dict) else change, *files[1:]])


def replaced_by(make: Attack, file: str, checkpoint: Path) -> None:
    (checkpoint / file).unlink()
    make(checkpoint / file)


def link_outside(path: Path) -> None:
    path.symlink_to(next(folder for folder in path.parents if folder.name == "attacked").parent / "outside")


def listening(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path must be short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def header(content: Any, checkpoint: Path, data: bytes = b"\0" * 8) -> None:
    forge_header(checkpoint / MODEL, content, data)
    forge_manifest(checkpoint)


def raw_file(content: bytes, file: str, checkpoint: Path) -> None:
    (checkpoint / file).write_bytes(content)
    if file != "manifest.json":
        forge_manifest(checkpoint)


def weight_map(change: Any, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = index["weight_map"] | change if isinstance(change, dict) else change
    path.write_text(json.dumps(index))
    forge_manifest(checkpoint)


def added_file(name: str, content: bytes, checkpoint: Path) -> None:
    (checkpoint / name).write_bytes(content)
    forge_manifest(checkpoint)


def optimizer_elsewhere(checkpoint: Path) -> None:
    (checkpoint / "optimizer").rename(checkpoint.parent / "moved")
    (checkpoint / "optimizer").symlink_to(checkpoint.parent / "moved")


def another_model(checkpoint: Path) -> None:
    save_file({"w": torch.zeros(2)}, checkpoint / STATE)
    forge_manifest(checkpoint)


DEEP = b"[" * 100_000
HEADERS: dict[str, Any] = {
    "beyond": {"a": TENSOR | {"data_offsets": [0, 4096], "shape": [1024]}},
    "short": {"a": TENSOR | {"data_offsets": [0, 4], "shape": [1]}},
    "overlap": {"a": TENSOR, "b": TENSOR},
    "gap": {"a": TENSOR | {"data_offsets": [4, 8], "shape": [1]}},
    "reversed": {"a": TENSOR | {"data_offsets": [8, 0]}},
    "negative": {"a": TENSOR | {"data_offsets": [-8, 0]}},
    "shape-lies": {"a": TENSOR | {"shape": [1 << 40]}},
    "shape-wraps": {"a": TENSOR | {"shape": [1 << 62, 1 << 62, 4]}},
    "shape-negative": {"a": TENSOR | {"shape": [-1, -2]}},
    "shape-float": {"a": TENSOR | {"shape": [2.0]}},
    "shape-true": {"a": TENSOR | {"shape": [True, 2]}},
    "shape-deep": {"a": TENSOR | {"shape": [1] * 100 + [2]}},
    "dtype-unknown": {"a": TENSOR | {"dtype": "OBJECT\n"}},
    "dtype-list": {"a": TENSOR | {"dtype": ["F32"]}},
    "no-offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "not-a-tensor": {"a": "F32"},
    "metadata": {"__metadata__": {"format": 7}, "a": TENSOR},
    "twice": b'{"a":' + json.dumps(TENSOR).encode() + b',"a":' + json.dumps(TENSOR).encode() + b"}",
    "newline": {"a\nb": TENSOR},
    "escape": {"\x1b[2Ja": TENSOR},
    "nameless": {"": TENSOR},
    "not-utf8": b'{"\xff":1}',
    "deep": DEEP,
    "empty": b"",
}
CASES: dict[str, Attack] = {
    **{f"manifest-names-{key}": partial(manifest_naming, name) for key, name in NAMES.items()},
    "manifest-names-itself": partial(manifest_naming, "manifest.json"),
    **{
        f"manifest-{key}": partial(manifest_entry, change)
        for key, change in {
            "size-negative": {"size": -1},
            "size-true": {"size": True},
            "size-text": {"size": "8"},
            "size-huge": {"size": 2**70},
            "sha-short": {"sha256": "00"},
            "sha-null": {"sha256": None},
            "sha-upper": {"sha256": "A" * 64},
            "entry-more": {"mode": "0777"},
            "entry-text": "model.safetensors",
        }.items()
    },
    **{
        f"manifest-{key}": lambda checkpoint, changes=changes: manifest_with(checkpoint, **changes)
        for key, changes in {
            "version-new": {"version": 99},
            "version-old": {"version": 0},
            "version-text": {"version": "1\nerror"},
            "step-other": {"step": 5},
            "step-text": {"step": "../5"},
            "step-negative": {"step": -1},
            "no-files": {"files": {}},
            "no-sha": {"sha256": ""},
        }.items()
    },
    "manifest-of-another-step": partial(forge_manifest, step=5),
    **{
        f"{file}-is-{key}": partial(replaced_by, make, file)
        for file in FILES
        for key, make in {
            "link": link_outside,
            "fifo": lambda path: os.mkfifo(path),
            "folder": lambda path: path.mkdir(),
            "socket": listening,
        }.items()
    },
    **{
        f"{file}-is-{key}": partial(raw_file, content, file)
        for file in FILES
        for key, content in {"pickle": PICKLE, "deep": DEEP, "binary": bytes(range(256)), "a-list": b"[]"}.items()
    },
    **{f"header-{key}": partial(header, content) for key, content in HEADERS.items()},
    "header-absurd-length": partial(raw_file, (2**63).to_bytes(8, "little") + b"{}", MODEL),
    "header-all-ones": partial(raw_file, b"\xff" * 64, MODEL),
    **{f"index-names-{key}": partial(weight_map, {"wte.weight": name}) for key, name in NAMES.items()},
    "index-more": partial(weight_map, {"a\nb": MODEL}),
    "index-list": partial(weight_map, [MODEL]),
    "index-empty": partial(weight_map, None),
    **{f"pickle-{name}": partial(added_file, name, PICKLE) for name in ("pytorch_model.bin", "rng.pt", "a.PKL")},
    "file-with-newline": lambda checkpoint: (checkpoint / "a\nerror: b").write_text(""),
    "file-with-escape": lambda checkpoint: (checkpoint / "a\x1b[2Jb").write_text(""),
    "file-not-utf8": lambda checkpoint: Path(os.fsdecode(bytes(checkpoint) + b"/a\xff")).write_text(""),
    "state-of-no-kind": partial(added_file, "optimizer/EXP-00001-of-00001.safetensors", b""),
    "optimizer-elsewhere": optimizer_elsewhere,
    "optimizer-of-another-model": another_model,
}


def everything_below(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(parent, name))
            found[os.path.join(parent, name)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def rejection_of(place: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as raised:
        select_checkpoint(place, **options)
    message = str(raised.value)
    assert message.isprintable(), message
    assert len(message) < 1000
    assert raised.value.exit_code == 2
    assert not Path("/tmp/pickle-was-run").exists()
    return message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", CASES.values(), ids=CASES.keys())
def test_a_hostile_checkpoint_is_rejected_on_one_line_without_side_effects(
    undamaged: Path, tmp_path: Path, attack: Attack
) -> None:
    (tmp_path / "outside").write_text("{}")
    checkpoint = tmp_path / "attacked" / "step-00000001"
    shutil.copytree(undamaged, checkpoint)
    attack(checkpoint)
    before = everything_below(tmp_path)
    rejection_of(checkpoint)
    assert "step-00000001 is damaged" in rejection_of(checkpoint.parent)
    assert everything_below(tmp_path) == before


def test_there_are_more_than_a_hundred_cases() -> None:
    assert len(CASES) > 100


LATEST: dict[str, Attack] = {
    **{f"{key}": lambda path, name=name: path.write_text(name) for key, name in list(NAMES.items())[:11]},
    "step-up": lambda path: path.write_text("step-00000001/../../outside"),
    "two-lines": lambda path: path.write_text("step-00000001\nstep-00000002"),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "fifo": lambda path: os.mkfifo(path),
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "sparse": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", LATEST.values(), ids=LATEST.keys())
def test_whatever_latest_says_the_newest_complete_checkpoint_is_selected(
    undamaged: Path, tmp_path: Path, attack: Attack
) -> None:
    shutil.copytree(undamaged, tmp_path / "step-00000001")
    attack(tmp_path / "latest")
    before = everything_below(tmp_path)
    chosen = select_checkpoint(tmp_path)
    assert (chosen.path, chosen.notices) == (tmp_path / "step-00000001", ())
    assert everything_below(tmp_path) == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "fifo", "file"])
def test_links_and_files_named_like_a_checkpoint_are_ignored(undamaged: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(undamaged, tmp_path / "run" / "step-00000001")
    path = tmp_path / "run" / "step-00000002"
    {"link": lambda: path.symlink_to(undamaged), "fifo": lambda: os.mkfifo(path), "file": lambda: path.touch()}[kind]()
    chosen = select_checkpoint(tmp_path / "run")
    assert (chosen.path.name, chosen.notices) == ("step-00000001", ())


def test_a_key_that_no_file_of_a_manifest_has_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path, 1).path
    manifest_entry({"mode": "0777"}, checkpoint)
    with pytest.raises(ValueError, match=r"files\.0\.mode"):
        read_manifest(checkpoint)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_hostile_index_is_rejected(tmp_path: Path, name: Any) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "outside")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "model.safetensors.index.json names" in rejection_of(model)
    with pytest.raises(CheckpointError):
        CheckpointReader(model)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [PICKLE, DEEP, b"", b"\xff" * 64], ids=["pickle", "deep", "empty", "ones"])
def test_hostile_weights_are_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    rejection_of(tmp_path)


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_an_inconsistent_header_is_rejected_without_a_manifest(tmp_path: Path, content: Any) -> None:
    forge_header(tmp_path / "model.safetensors", content, b"\0" * 8)
    rejection_of(tmp_path)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "file") == read_regular(tmp_path / "link", follow=True) == b"text"
    with pytest.raises(OSError, match="link is a symbolic link"):
        read_regular(tmp_path / "link")


def test_a_small_file_takes_no_more_memory_for_a_large_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text" * 2**19)
    tracemalloc.start()
    try:
        assert len(read_regular(tmp_path / "file", max_bytes=2**32)) == 2**21
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**24
    with pytest.raises(OSError, match="larger than 100 bytes"):
        read_regular(tmp_path / "file", max_bytes=100)


@pytest.mark.timeout(60)
def test_weights_that_are_a_fifo_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in rejection_of(tmp_path)
