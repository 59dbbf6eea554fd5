"""Write a corpus as a dataset of Megatron-LM: the same bytes as its own IndexedDatasetBuilder.

The text is tokenized to a shard, as for the token cache, so that what was interrupted goes on. The files then have
temporary names until they are complete; the .idx, by which a dataset is found, is renamed last.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from toolkit.config.data_section import DataSection
from toolkit.config.megatron_prefix import SUFFIXES, megatron_prefix
from toolkit.data.documents.part import WHOLE
from toolkit.data.megatron.index import DTYPES, HEADER, MAGIC, VERSION
from toolkit.data.tokens.build_cache import document_ends
from toolkit.data.tokens.shard import TokenShard
from toolkit.data.tokens.shards import open_shards
from toolkit.data.tokens.token_cache import Corpus
from toolkit.errors import DataError
from toolkit.files import expanded, published, reason_of, sync

_UINT16 = 8
_INT32 = 4
_UINT16_ENTRIES = 65_500
"""Megatron-LM takes 16 bits for vocabularies that are smaller than this."""
_TOKENIZER = "_tokenizer"
_LONGEST = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class MegatronFiles:
    """The files that were written, and their content."""

    prefix: Path
    tokenizer: Path
    documents: int
    tokens: int
    dtype: str


def write_megatron(
    section: DataSection, prefix: str, *, merge: bool = False, shards: str | None = None, progress: bool
) -> MegatronFiles:
    """Tokenize `section`, or `merge` its shards, to PREFIX.bin and PREFIX.idx, and the tokenizer beside them.

    Raises DataError.
    """
    place = check(section, prefix.removesuffix(".idx").removesuffix(".bin"))
    corpus = Corpus.of(section)
    if merge:
        return _write(place, section, open_shards(corpus, shards))
    partial = corpus.cache.with_name(f".{corpus.cache.name}.megatron.partial")
    with corpus.locked(partial, progress=progress):
        with corpus.removed_on_failure(partial):
            corpus.tokenize(partial, WHOLE, progress=progress)
        written = _write(place, section, [TokenShard(str(partial), WHOLE)])
        shutil.rmtree(partial)
    return written


def check(section: DataSection, prefix: str) -> Path:
    """Return where the files go. Raises DataError for what cannot be written there."""
    place = expanded(prefix)
    if section.format not in ("text", "pretokenized"):
        reason = "a dataset of Megatron-LM does not say which tokens are trained on"
        raise DataError.of("data.format", section.format, reason, ("data.format", "text or pretokenized"))
    if megatron_prefix(section.source) is not None:
        raise DataError.of("data.source", section.source, "it is a dataset of Megatron-LM already", "name text")
    for suffix in (*SUFFIXES, _TOKENIZER):
        if os.path.lexists(f"{place}{suffix}"):
            raise DataError.of("--output", f"{place}{suffix}", "it exists", "delete it, or name another prefix")
    return place


def _write(place: Path, section: DataSection, shards: Sequence[TokenShard]) -> MegatronFiles:
    if any(shard.counts.untrained for shard in shards):
        reason = "labels leave tokens out, and a dataset of Megatron-LM does not say which"
        raise DataError.of("data.source", section.source, reason, "leave labels out")
    ends = document_ends(shards)
    lengths = np.diff(ends, prepend=0)
    if not len(ends) or lengths.max() > _LONGEST:
        reason = "every document is empty" if not len(ends) else f"a document has more than {_LONGEST:,} tokens"
        raise DataError.of("data.source", section.source, reason, "check data.source")
    code = _UINT16 if shards[0].of["encoding"]["vocab_size"] < _UINT16_ENTRIES else _INT32
    tokenizer = Path(f"{place}{_TOKENIZER}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _complete(place) as temporary:
            with temporary(".bin") as file:
                for ids, _ in (block for shard in shards for block in shard.blocks()):
                    file.write(ids.astype(DTYPES[code]).tobytes())
            with temporary(".idx") as file:
                _write_index(file, code, lengths, ends)
            with published(tokenizer) as folder:
                shards[0].copy_tokenizer(folder)
    except OSError as error:
        reason = f"{error.filename or place} cannot be written ({reason_of(error)})"
        raise DataError.of("--output", str(place), reason, "name a prefix in a writable directory") from None
    dtype = np.dtype(DTYPES[code]).name
    return MegatronFiles(prefix=place, tokenizer=tokenizer, documents=len(ends), tokens=int(ends[-1]), dtype=dtype)


def _write_index(file: BinaryIO, code: int, lengths: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Each document is one sequence."""
    count = len(lengths)
    itemsize = np.dtype(DTYPES[code]).itemsize
    file.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
    file.write(lengths.astype("<i4").tobytes())
    file.write(((ends - lengths) * itemsize).astype("<i8").tobytes())
    file.write(np.arange(count + 1, dtype="<i8").tobytes())


@contextmanager
def _complete(place: Path) -> Iterator[Callable[[str], BinaryIO]]:
    """Open files of this prefix under temporary names, and rename them in their order when all are complete."""
    names: dict[Path, Path] = {}

    def temporary(suffix: str) -> BinaryIO:
        path = place.with_name(f".{place.name}.{os.getpid()}{suffix}.tmp")
        names[path] = Path(f"{place}{suffix}")
        return path.open("wb")

    try:
        yield temporary
        for path in names:
            sync(path)
        for path, final in names.items():
            path.rename(final)
        sync(place.parent)
    finally:
        for path in names:
            path.unlink(missing_ok=True)
