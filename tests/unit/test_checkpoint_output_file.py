"""Past the page cache or through it, aligned or not: the same bytes, the same digest."""

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.checkpoint import output_file, plain_file
from toolkit.checkpoint.host_memory import PAGE_BYTES, host_memory
from toolkit.checkpoint.output_file import OutputFile

SIZES = (PAGE_BYTES, 3 * PAGE_BYTES, PAGE_BYTES + 7)


def contents(offset: int = 0) -> list[memoryview]:
    """Pieces as a stream has them: all but the last whole pages; `offset` bytes off a page of memory."""
    made = []
    for size in SIZES:
        piece = host_memory(size + PAGE_BYTES)[offset : offset + size]
        piece.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
        made.append(memoryview(piece.numpy()))  # type: ignore[arg-type]
    return made


def written(folder: Path, pieces: list[memoryview]) -> bool:
    """Write, check, and tell whether the file began in direct mode."""
    file = OutputFile(folder, "file")
    was_direct = bool(fcntl.fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT)
    for piece in pieces:
        file.hash(piece)
        file.write(piece)
    record = file.finish()
    content = (folder / "file").read_bytes()
    assert content == b"".join(pieces)
    assert (record.path, record.size) == ("file", len(content))
    assert record.sha256 == hashlib.sha256(content).hexdigest()
    return was_direct


def test_whole_pages_and_a_rest_are_written(tmp_path: Path) -> None:
    written(tmp_path, contents())


def test_a_file_system_without_direct_writes_does_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert not written(tmp_path, contents())


def test_memory_that_is_not_aligned_goes_the_slow_way(tmp_path: Path) -> None:
    written(tmp_path, contents(offset=1))


def test_a_file_system_that_refuses_half_way_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all = plain_file.write_all

    def refuse_after_a_page(descriptor: int, content: memoryview) -> None:
        if len(content) > PAGE_BYTES and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            write_all(descriptor, content[:PAGE_BYTES])
            raise OSError(errno.EINVAL, "Invalid argument")
        write_all(descriptor, content)

    monkeypatch.setattr(output_file, "write_all", refuse_after_a_page)
    written(tmp_path, contents())


def test_any_other_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output_file, "write_all", fail)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, contents())
