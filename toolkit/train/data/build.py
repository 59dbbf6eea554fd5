"""Build: tokenize a source into the files of the token cache, with memory that does not grow with the text.

First all tokens go to one file as the workers deliver them; when their number is known, the split copies them into
train.bin and eval.bin. Only eight bytes a document stay in memory.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import DataError
from toolkit.recipe import DataSection
from toolkit.train.data import tokenizer as tokenizers
from toolkit.train.data.markov import EntropyRate
from toolkit.train.data.pool import encode_pieces
from toolkit.train.data.sources import Source
from toolkit.train.data.split import held_out
from toolkit.train.data.worker import EncodedPiece, Job

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COPY_TOKENS = 1 << 22
_UINT16_ENTRIES = 1 << 16


def build(
    folder: Path, section: DataSection, source: Source, loaded: "PreTrainedTokenizerBase | None", *, progress: bool
) -> None:
    """Write every file of the cache into `folder`. `loaded` is None where the tokenizer has yet to be trained."""
    tokenizer = loaded or tokenizers.load_or_train(section, source)
    tokenizer.save_pretrained(folder / "tokenizer")
    vocab_size = tokenizers.vocab_size(tokenizer)
    job = Job(
        tokenizer_dir=str(folder / "tokenizer"),
        split_special_tokens=bool(getattr(tokenizer, "split_special_tokens", False)),
        eos_id=int(tokenizer.eos_token_id),
        dtype="<u2" if vocab_size <= _UINT16_ENTRIES else "<u4",
    )
    encoded = encode_pieces(source.pieces(), job, section.workers or os.cpu_count() or 1)
    whole = folder / "all.bin"
    with _shown(encoded, source.size_bytes, progress=progress) as pieces:
        ends, text_bytes = _write(pieces, whole)
    if not len(ends):
        raise DataError(f"data.source={section.source} has no text: every document is empty. Check data.source.")
    segment_ends, is_eval = held_out(ends, section.eval_fraction, name=section.source)
    stream = np.memmap(whole, dtype=job.dtype, mode="r")
    if source.entropy_rate is not None:
        _check_symbols(section, source.entropy_rate, stream, symbols=text_bytes + len(ends))
    for name, wanted in (("train", ~is_eval), ("eval", is_eval)):
        _copy(stream, segment_ends, wanted, folder / f"{name}.bin")
        lengths = np.diff(segment_ends, prepend=0)[wanted]
        np.save(folder / f"{name}_documents.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    whole.unlink()
    train_tokens = int(np.diff(segment_ends, prepend=0)[~is_eval].sum())
    meta = {
        "tokenizer_vocab_size": vocab_size,
        "eos_id": job.eos_id,
        "dtype": job.dtype,
        "train_tokens": train_tokens,
        "eval_tokens": int(ends[-1]) - train_tokens,
        "train_documents": int((~is_eval).sum()),
        "eval_documents": int(is_eval.sum()),
        "text_bytes": text_bytes,
        "unigram_entropy": _entropy(folder / "train.bin", job.dtype, vocab_size),
    }
    if source.entropy_rate is not None:
        meta["entropy_rate"] = source.entropy_rate.stream
        meta["entropy_rate_in_documents"] = source.entropy_rate.in_documents
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _check_symbols(section: DataSection, rate: EntropyRate, stream: NDArray[np.uint16], *, symbols: int) -> None:
    """Raise DataError unless each token is one symbol of the source: its entropy rate is that of its symbols."""
    if len(stream) != symbols or len(np.unique(stream)) != rate.states:
        raise DataError(
            f"data.tokenizer={section.tokenizer} with data.source={section.source}: a token must be one letter, else "
            "the entropy rate of the tokens is not known. Set data.tokenizer=bpe-257: a token is a byte."
        )


def _write(pieces: Iterator[EncodedPiece], path: Path) -> tuple[NDArray[np.int64], int]:
    """Append the pieces to `path`: where each document ends, and the bytes of the text."""
    lengths: list[NDArray[np.int64]] = []
    text_bytes = unfinished = 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece.ids)
            text_bytes += piece.text_bytes
            documents = piece.lengths
            if len(documents):
                documents[0] += unfinished
                unfinished = 0
            if piece.continues:
                unfinished, documents = int(documents[-1]), documents[:-1]
            lengths.append(documents)
    return np.cumsum(np.concatenate([np.empty(0, dtype=np.int64), *lengths])), text_bytes


def _copy(stream: NDArray[np.uint16], ends: NDArray[np.int64], wanted: NDArray[np.bool_], path: Path) -> None:
    """Copy the wanted segments of `stream`, neighbours in one go."""
    changes = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
    edges = np.concatenate([[0], ends])[changes]
    with path.open("wb") as file:
        for start, end in edges.reshape(-1, 2).tolist():
            for begin in range(start, end, _COPY_TOKENS):
                stream[begin : min(begin + _COPY_TOKENS, end)].tofile(file)


def _entropy(path: Path, dtype: str, vocab_size: int) -> float:
    """Entropy in nats of the distribution of single tokens: H = -sum p ln p, with p = count / total."""
    stream = np.memmap(path, dtype=dtype, mode="r")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(stream), _COPY_TOKENS):
        counts += np.bincount(stream[start : start + _COPY_TOKENS], minlength=vocab_size)
    shares = counts[counts > 0] / len(stream)
    return max(0.0, float(-(shares * np.log(shares)).sum()))


@contextlib.contextmanager
def _shown(pieces: Iterator[EncodedPiece], total: int, *, progress: bool) -> Iterator[Iterator[EncodedPiece]]:
    """`pieces`, with a bar on stderr when that is a terminal. Closes them, and the workers behind, in any case."""
    with contextlib.closing(pieces), contextlib.ExitStack() as stack:  # type: ignore[type-var]
        if not (progress and sys.stderr.isatty()):
            yield pieces
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("tokenizing"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        task = bar.add_task("", total=total)

        def advancing() -> Iterator[EncodedPiece]:
            for piece in pieces:
                yield piece
                bar.advance(task, piece.size_bytes)

        yield advancing()
