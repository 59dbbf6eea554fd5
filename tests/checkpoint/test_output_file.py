"""Past the page cache or through it, aligned or not: the same bytes and digest."""

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.checkpoint import names, rank_writer
from toolkit.checkpoint.rank_writer import OutputFile
from toolkit.checkpoint.tensor_source import PAGE_BYTES, host_memory

SIZES = (PAGE_BYTES, 3 * PAGE_BYTES, PAGE_BYTES + 7)


def contents(offset: int = 0) -> list[memoryview]:
    """Buffers as a pipeline has them: all but the last are full pages; `offset` bytes off a page of memory."""
    made = []
    for size in SIZES:
        buffer = host_memory(size + PAGE_BYTES)[offset : offset + size]
        buffer.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
        made.append(memoryview(buffer.numpy()))  # type: ignore[arg-type]
    return made


def written(folder: Path, buffers: list[memoryview]) -> bool:
    """Write, check, and tell whether the file began in direct mode."""
    file = OutputFile(folder, "file")
    was_direct = bool(fcntl.fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT)
    for buffer in buffers:
        file.hash(buffer)
        file.write(buffer)
    record = file.finish()
    content = (folder / "file").read_bytes()
    assert content == b"".join(buffers)
    assert (record.path, record.size) == ("file", len(content))
    assert record.sha256 == hashlib.sha256(content).hexdigest()
    return was_direct


def test_pages_and_a_remainder_are_written(tmp_path: Path) -> None:
    written(tmp_path, contents())


def test_a_file_system_without_direct_writes_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert not written(tmp_path, contents())


def test_unaligned_memory_is_written_through_the_page_cache(tmp_path: Path) -> None:
    written(tmp_path, contents(offset=1))


def test_a_file_system_that_rejects_direct_writes_midway_continues_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all = names.write_all

    def refuse_after_a_page(descriptor: int, content: memoryview) -> None:
        if len(content) > PAGE_BYTES and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            write_all(descriptor, content[:PAGE_BYTES])
            raise OSError(errno.EINVAL, "Invalid argument")
        write_all(descriptor, content)

    monkeypatch.setattr(rank_writer, "write_all", refuse_after_a_page)
    written(tmp_path, contents())


def test_any_other_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rank_writer, "write_all", fail)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, contents())
