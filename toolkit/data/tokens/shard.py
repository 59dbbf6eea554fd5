"""A shard: the tokens of a part of a source, written so that a killed process goes on where it was.

    ids.bin        raw little-endian ids, in the order of the documents
    trained.bin    of chats and prompts, a byte for each token: whether it is trained on
    lengths.bin    the tokens of each document, int64
    weights.bin    the weight of each document, fp32, where rows have one
    tokenizer/     as written by save_pretrained
    progress.json  how much of these files is valid; what a killed process wrote after it is cut off
    manifest.json  the same of all of the part, and what it is of; written last

The whole corpus is a shard too, the only one: one process takes the same way as many machines.
"""

import contextlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from toolkit.data.documents import remote
from toolkit.data.documents.part import SourcePart
from toolkit.data.documents.sources import Source
from toolkit.data.documents.text_chunks import open_file
from toolkit.data.tokens.tokenizer import digest
from toolkit.data.tokens.tokenizer_pool import EncodedChunk, TokenizerJob, encode_chunks
from toolkit.errors import DataError
from toolkit.files import decode_json_object, sync
from toolkit.remote_files import is_url

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
TOKENIZER = "tokenizer"
IDS = "ids.bin"
TRAINED = "trained.bin"
LENGTHS = "lengths.bin"
WEIGHTS = "weights.bin"
BLOCK_TOKENS = 1 << 22
"""Tokens that are in memory when a shard is read."""
_COMMIT_TOKENS = 1 << 20


@dataclass(kw_only=True)
class Progress:
    """Progress of writing a shard: the chunks, documents and tokens that are written."""

    chunks: int = 0
    source_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    untrained: int = 0
    """Tokens that are not trained on."""
    unfinished: int = 0
    """Tokens of a document that continues in the next chunk: they count as tokens, but are no document yet."""
    checksums: dict[str, int] = field(default_factory=lambda: {IDS: 0, TRAINED: 0, LENGTHS: 0})
    """CRC-32 of each file."""
    sizes: dict[str, int] = field(default_factory=lambda: {IDS: 0, TRAINED: 0, LENGTHS: 0})
    """Bytes of each file."""


def write_shard(
    folder: Path,
    part: SourcePart,
    source: Source,
    job: TokenizerJob,
    of: dict[str, Any],
    *,
    workers: int,
    progress: bool,
) -> None:
    """Tokenize a part of `source` to `folder`, from where a killed process stopped. `of`: what the tokens are of."""
    if is_complete(str(folder), part, of):
        return
    done = _resumable(folder, part, of)
    if job.weight_field is not None:
        done.checksums.setdefault(WEIGHTS, 0)
        done.sizes.setdefault(WEIGHTS, 0)
    chunks = islice(source.chunks(part), done.chunks, None)
    encoded = encode_chunks(chunks, job, workers)
    left = source.size_bytes // part.count - done.source_bytes
    with _Files(folder, done) as files, _progress_bar(encoded, left, part, progress=progress) as results:
        committed = done.tokens
        for chunk in results:
            files.add(chunk)
            if done.tokens - committed >= _COMMIT_TOKENS:
                files.sync()
                _write_json(folder / PROGRESS, part, of, done)
                committed = done.tokens
        files.sync()
    _write_json(folder / MANIFEST, part, of, done)
    (folder / PROGRESS).unlink(missing_ok=True)


class _Files:
    """The files of a shard, open for appending."""

    def __init__(self, folder: Path, done: Progress) -> None:
        self._done = done
        self._files: dict[str, BinaryIO] = {}
        for name, size in done.sizes.items():
            path = folder / name
            path.touch()
            self._files[name] = path.open("r+b")
            self._files[name].truncate(size)
            self._files[name].seek(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, chunk: EncodedChunk) -> None:
        done = self._done
        lengths = chunk.lengths
        done.tokens += int(lengths.sum())
        if len(lengths):
            lengths[0] += done.unfinished
            done.unfinished = 0
        if chunk.continues:
            done.unfinished = int(lengths[-1])
            lengths = lengths[:-1]
        parts = [(IDS, chunk.ids), (TRAINED, chunk.trained), (LENGTHS, lengths.astype("<i8").tobytes())]
        if len(chunk.weights):
            parts.append((WEIGHTS, chunk.weights.astype("<f4").tobytes()))
        for name, data in parts:
            self._files[name].write(data)
            done.checksums[name] = zlib.crc32(data, done.checksums[name])
            done.sizes[name] += len(data)
        done.chunks += 1
        done.documents += len(lengths)
        done.text_bytes += chunk.text_bytes
        done.untrained += chunk.trained.count(0)
        done.source_bytes += chunk.size_bytes

    def sync(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())


def is_complete(place: str, part: SourcePart, of: dict[str, Any]) -> bool:
    """Whether there is a complete shard of this part, and of the same."""
    try:
        with open_file(f"{place}/{MANIFEST}") as file:
            return _is_of(decode_json_object(file.read()), part, of)
    except (DataError, ValueError):
        return False


def _is_of(content: dict[str, Any], part: SourcePart, of: dict[str, Any]) -> bool:
    return content.get("part") == str(part) and content.get("of") == of


def _resumable(folder: Path, part: SourcePart, of: dict[str, Any]) -> Progress:
    with contextlib.suppress(OSError, ValueError, TypeError):
        content = decode_json_object((folder / PROGRESS).read_bytes())
        done = Progress(**content["progress"])
        if _is_of(content, part, of) and all((folder / name).stat().st_size >= n for name, n in done.sizes.items()):
            return done
    return Progress()


def _write_json(path: Path, part: SourcePart, of: dict[str, Any], done: Progress) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"part": str(part), "of": of, "progress": asdict(done)}, indent=2) + "\n")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


class TokenShard:
    """A complete shard, open for reading, in a directory or at a URL."""

    def __init__(self, place: str, part: SourcePart) -> None:
        """Read the manifest. Raises DataError if it is not that of this part."""
        self.place = place
        self.part = part
        try:
            with open_file(f"{place}/{MANIFEST}") as file:
                content = decode_json_object(file.read())
            self.of = content["of"] if content["part"] == str(part) else {}
            self.counts = Progress(**content["progress"])
            self._dtype = np.dtype(self.of["encoding"]["dtype"])
        except (ValueError, TypeError, KeyError):
            raise self._damaged(f"{MANIFEST} is not that of this shard") from None

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer. Raises DataError if it is not what was written."""
        if is_url(self.place):
            remote.download(f"{self.place}/{TOKENIZER}", folder)
        else:
            shutil.copytree(Path(self.place) / TOKENIZER, folder, dirs_exist_ok=True)
        if digest(folder) != self.of["tokenizer"]:
            raise self._damaged(f"{TOKENIZER} is not what was written")

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each document, the unfinished last one left out."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self._blocks(LENGTHS, np.dtype("<i8"))])

    def weights(self) -> NDArray[np.float32]:
        """Return the weight of each document; empty where rows have none."""
        if WEIGHTS not in self.counts.sizes:
            return np.empty(0, dtype=np.float32)
        return np.concatenate([np.empty(0, dtype=np.float32), *self._blocks(WEIGHTS, np.dtype("<f4"))])

    def blocks(self) -> Iterator[tuple[NDArray[Any], NDArray[np.uint8] | None]]:
        """Yield the ids, and whether each is trained on, in blocks. Raises DataError where a file is damaged."""
        trained = self._blocks(TRAINED, np.dtype(np.uint8)) if self.counts.sizes[TRAINED] else None
        for ids in self._blocks(IDS, self._dtype):
            yield ids, None if trained is None else next(trained)

    def _blocks(self, name: str, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
        expected = self.counts.sizes[name]
        checksum = 0
        size = 0
        with open_file(f"{self.place}/{name}") as file:
            while size < expected:
                wanted = min(BLOCK_TOKENS * dtype.itemsize, expected - size)
                data = file.read(wanted)
                size += len(data)
                if len(data) < wanted:
                    raise self._damaged(f"{name} is truncated: {size} of {expected} bytes")
                checksum = zlib.crc32(data, checksum)
                yield np.frombuffer(data, dtype=dtype)
        if checksum != self.counts.checksums[name]:
            raise self._damaged(f"{name} is not what was written")

    def _damaged(self, reason: str) -> DataError:
        return DataError(f"{self.place}: {reason}. Delete it, and make it again with --shard {self.part}.")


@contextlib.contextmanager
def _progress_bar(
    chunks: Iterator[EncodedChunk], total: int, part: SourcePart, *, progress: bool
) -> Iterator[Iterator[EncodedChunk]]:
    """Show a progress bar if stderr is a terminal. Closes `chunks`, and so the workers, in any case."""
    with contextlib.closing(chunks), contextlib.ExitStack() as stack:  # type: ignore[type-var]
        if not (progress and sys.stderr.isatty()):
            yield chunks
            return
        from rich import progress as rich
        from rich.console import Console

        kinds = (rich.BarColumn, rich.DownloadColumn, rich.TransferSpeedColumn, rich.TimeRemainingColumn)
        label = f"tokenizing{f' shard {part}' * (part.count > 1)}"
        columns = (rich.TextColumn(label), *(kind() for kind in kinds))
        bar = stack.enter_context(rich.Progress(*columns, console=Console(stderr=True), transient=True))
        task = bar.add_task("", total=total)

        def advancing() -> Iterator[EncodedChunk]:
            for chunk in chunks:
                yield chunk
                bar.advance(task, chunk.size_bytes)

        yield advancing()
