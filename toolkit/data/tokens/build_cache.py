"""Tokenize a source into the files of the token cache, with memory that does not grow with the text.

First all tokens go to one file in the order of the chunks; when their number is known, they are copied to train.bin and
eval.bin. Only eight bytes per document stay in memory.

The validation split is a function of the lengths of the documents alone. Whole documents are held out, chosen by a hash
of their index, so that appending documents moves none of the others. If that were fewer than 20 documents, their share
of the tokens would be random: then blocks of 2,048 tokens are held out instead, chosen by a hash of theirs.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config.recipe import DataSection
from toolkit.data.documents.markov import EntropyRate
from toolkit.data.documents.sources import Source
from toolkit.data.permutation import mix
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.data.tokens.tokenizer_pool import EncodedChunk, TokenizerJob, encode_chunks
from toolkit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COPY_TOKENS = 1 << 22
_UINT16_ENTRIES = 1 << 16
TRAINED_SUFFIX = ".trained"
"""Of the files that say of each token whether it is trained on."""
Segments = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Where each segment of the stream ends, and whether it is in the validation split."""
BLOCK_TOKENS = 2048
MIN_VALIDATION_DOCUMENTS = 20


def build(
    folder: Path, section: DataSection, source: Source, loaded: "PreTrainedTokenizerBase | None", *, progress: bool
) -> None:
    """Write all files of the cache to `folder`. `loaded` is None if the tokenizer has yet to be trained."""
    tokenizer = loaded or tokenizers.load_or_train(section, source)
    tokenizer.save_pretrained(folder / "tokenizer")
    vocab_size = tokenizers.vocab_size(tokenizer)
    job = TokenizerJob(
        tokenizer_dir=str(folder / "tokenizer"),
        split_special_tokens=bool(getattr(tokenizer, "split_special_tokens", False)),
        eos_id=int(tokenizer.eos_token_id),
        dtype="<u2" if vocab_size <= _UINT16_ENTRIES else "<u4",
        vocab_size=vocab_size,
        format=section.format,
        train_on=section.train_on,
    )
    encoded = encode_chunks(source.chunks(), job, section.workers or os.cpu_count() or 1)
    all_tokens = folder / "all.bin"
    with _progress_bar(encoded, source.size_bytes, progress=progress) as chunks:
        ends, text_bytes = _write(chunks, all_tokens)
    if not len(ends):
        raise DataError.of("data.source", section.source, "every document is empty", "check data.source")
    trained = all_tokens.with_suffix(TRAINED_SUFFIX)
    mask = np.memmap(trained, dtype=np.uint8, mode="r") if section.format != "text" else None
    if section.format == "pretokenized" and mask is not None and mask.all():
        mask = None
    whole = mask is not None
    segment_ends, is_eval = choose_validation(ends, section.eval_fraction, name=section.source, whole=whole)
    stream = np.memmap(all_tokens, dtype=job.dtype, mode="r")
    if source.entropy_rate is not None:
        _check_symbols(section, source.entropy_rate, stream, symbols=text_bytes + len(ends))
    for name, wanted in (("train", ~is_eval), ("eval", is_eval)):
        _copy(stream, segment_ends, wanted, folder / f"{name}.bin")
        if mask is not None:
            _copy(mask, segment_ends, wanted, folder / f"{name}{TRAINED_SUFFIX}")
        lengths = np.diff(segment_ends, prepend=0)[wanted]
        np.save(folder / f"{name}_documents.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    all_tokens.unlink()
    trained.unlink()
    train_tokens = int(np.diff(segment_ends, prepend=0)[~is_eval].sum())
    meta: dict[str, Any] = {
        "tokenizer_vocab_size": vocab_size,
        "eos_id": job.eos_id,
        "dtype": job.dtype,
        "train_tokens": train_tokens,
        "eval_tokens": int(ends[-1]) - train_tokens,
        "train_documents": int((~is_eval).sum()),
        "eval_documents": int(is_eval.sum()),
        "text_bytes": text_bytes,
    }
    mask = np.memmap(folder / f"train{TRAINED_SUFFIX}", dtype=np.uint8, mode="r") if whole else None
    meta["unigram_entropy"] = _entropy(folder / "train.bin", job.dtype, vocab_size, mask)
    if mask is not None:
        meta["trained_tokens"] = int(np.count_nonzero(mask))
    if source.entropy_rate is not None:
        meta["entropy_rate"] = source.entropy_rate.stream
        meta["entropy_rate_in_documents"] = source.entropy_rate.in_documents
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _check_symbols(section: DataSection, rate: EntropyRate, stream: NDArray[np.uint16], *, symbols: int) -> None:
    """Raise DataError unless each token is one symbol of the source, to whose symbols its entropy rate refers."""
    if len(stream) != symbols or len(np.unique(stream)) != rate.states:
        given = (("data.tokenizer", section.tokenizer), ("data.source", section.source))
        reason = "a token must be one letter, or the entropy rate of the tokens is not known"
        raise DataError.between(given, reason, ("data.tokenizer", "bpe-257"))


def _write(chunks: Iterator[EncodedChunk], path: Path) -> tuple[NDArray[np.int64], int]:
    """Write the tokens of all chunks, and beside them which are trained on; return the ends of documents, and the bytes
    of the text."""
    lengths: list[NDArray[np.int64]] = []
    text_bytes = unfinished = 0
    with path.open("wb") as file, path.with_suffix(TRAINED_SUFFIX).open("wb") as trained:
        for chunk in chunks:
            file.write(chunk.ids)
            trained.write(chunk.trained)
            text_bytes += chunk.text_bytes
            documents = chunk.lengths
            if len(documents):
                documents[0] += unfinished
                unfinished = 0
            if chunk.continues:
                unfinished, documents = int(documents[-1]), documents[:-1]
            lengths.append(documents)
    return np.cumsum(np.concatenate([np.empty(0, dtype=np.int64), *lengths])), text_bytes


def choose_validation(ends: NDArray[np.int64], fraction: float, *, name: str, whole: bool = False) -> Segments:
    """Split the stream into segments, and choose those of the validation split.

    `ends` are the ends of the documents; `whole`: none of them is ever split. At least the tokens of one block are held
    out, and never everything. Raises DataError if the corpus (`name`) has too few tokens for that.
    """
    total = int(ends[-1])
    if fraction == 0:
        return ends, np.zeros(len(ends), dtype=np.bool_)
    if total < 2 * BLOCK_TOKENS:
        given = (("data.eval_fraction", fraction), ("data.source", name))
        reason = f"it has {total:,} tokens, and {2 * BLOCK_TOKENS:,} are needed to hold out a part"
        raise DataError.between(given, reason, "use more text", ("data.eval_fraction", 0))
    by_document = whole or fraction * len(ends) >= MIN_VALIDATION_DOCUMENTS
    return _documents(ends, fraction) if by_document else _blocks(ends, fraction)


def _documents(ends: NDArray[np.int64], fraction: float) -> Segments:
    lengths = np.diff(ends, prepend=0)
    hashes = mix(np.arange(len(ends), dtype=np.uint64))
    chosen = hashes < np.uint64(int(fraction * 2**64))
    if lengths[chosen].sum() < BLOCK_TOKENS:
        # A document has at least one token, so the first BLOCK_TOKENS documents by hash always suffice.
        count = min(BLOCK_TOKENS, len(ends))
        first = np.argpartition(hashes, count - 1)[:count]
        first = first[np.argsort(hashes[first])]
        enough = int(np.searchsorted(np.cumsum(lengths[first]), BLOCK_TOKENS)) + 1
        chosen[first[:enough]] = True
    if chosen.all():
        chosen[np.argmax(hashes)] = False
    return ends, chosen


def _blocks(ends: NDArray[np.int64], fraction: float) -> Segments:
    blocks = int(ends[-1]) // BLOCK_TOKENS
    hashes = mix(np.arange(blocks, dtype=np.uint64))
    chosen = hashes < np.uint64(int(fraction * 2**64))
    chosen[np.argmin(hashes)] = True
    if chosen.all():
        chosen[np.argmax(hashes)] = False
    # The last, incomplete block stays in the training split.
    chosen = np.append(chosen, False)
    boundaries = (np.flatnonzero(chosen[1:] != chosen[:-1]) + 1) * BLOCK_TOKENS
    segment_ends = np.union1d(ends, boundaries)
    starts = np.concatenate([[0], segment_ends[:-1]])
    return segment_ends, chosen[starts // BLOCK_TOKENS]


def _copy(stream: NDArray[Any], ends: NDArray[np.int64], wanted: NDArray[np.bool_], path: Path) -> None:
    """Copy the wanted segments of `stream`, adjacent ones together."""
    changes = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
    edges = np.concatenate([[0], ends])[changes]
    with path.open("wb") as file:
        for start, end in edges.reshape(-1, 2).tolist():
            for begin in range(start, end, _COPY_TOKENS):
                stream[begin : min(begin + _COPY_TOKENS, end)].tofile(file)


def _entropy(path: Path, dtype: str, vocab_size: int, trained: NDArray[np.uint8] | None) -> float:
    """Return the entropy of single tokens in nats, of those that are trained on: H = -sum p ln p, p = count / total."""
    stream = np.memmap(path, dtype=dtype, mode="r")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(stream), _COPY_TOKENS):
        part = stream[start : start + _COPY_TOKENS]
        if trained is not None:
            part = part[trained[start : start + _COPY_TOKENS] > 0]
        counts += np.bincount(part, minlength=vocab_size)
    shares = counts[counts > 0] / max(1, counts.sum())
    return max(0.0, float(-(shares * np.log(shares)).sum()))


@contextlib.contextmanager
def _progress_bar(chunks: Iterator[EncodedChunk], total: int, *, progress: bool) -> Iterator[Iterator[EncodedChunk]]:
    """Show a progress bar if stderr is a terminal. Closes `chunks`, and so the workers, in any case."""
    with contextlib.closing(chunks), contextlib.ExitStack() as stack:  # type: ignore[type-var]
        if not (progress and sys.stderr.isatty()):
            yield chunks
            return
        from rich import progress as rich
        from rich.console import Console

        kinds = (rich.BarColumn, rich.DownloadColumn, rich.TransferSpeedColumn, rich.TimeRemainingColumn)
        columns = (rich.TextColumn("tokenizing"), *(kind() for kind in kinds))
        bar = stack.enter_context(rich.Progress(*columns, console=Console(stderr=True), transient=True))
        task = bar.add_task("", total=total)

        def advancing() -> Iterator[EncodedChunk]:
            for chunk in chunks:
                yield chunk
                bar.advance(task, chunk.size_bytes)

        yield advancing()
