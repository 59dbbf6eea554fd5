"""The token cache: a corpus as token ids on disk, built once, whole or not at all.

    <cache_dir>/<source>-<tokenizer>-<fingerprint>/
        train.bin  eval.bin              raw little-endian ids, uint16 where they fit, else uint32
        train_documents.npy  eval_…      where each document begins, and where the last one ends
        tokenizer/                       the tokenizer, as save_pretrained writes it
        meta.json                        counts, and the entropy of single tokens

The fingerprint covers the source, the tokenizer, eval_fraction, text_field and the format, not seq_len: the same cache
serves every sample length. Any number of processes may call `prepare` at once, before any process group exists: a file
lock lets one build and the others wait. A lock dies with its process, so the next one takes over from a builder that
was killed; what that left lies under a temporary name and is deleted.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from toolkit.errors import DataError
from toolkit.recipe import DataSection
from toolkit.train.data import tokenizer as tokenizers
from toolkit.train.data.build import build
from toolkit.train.data.sources import Source, open_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "eval"]
Packing = Literal["packed", "isolated", "padded"]
SPLITS: tuple[Split, ...] = ("train", "eval")
Tokens = NDArray[np.uint16] | NDArray[np.uint32]

FORMAT = 2
_LOCK_POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class TokenCorpus:
    """A tokenized corpus, open for reading."""

    path: Path
    tokenizer_vocab_size: int
    """Largest token id + 1: a model needs at least as many embeddings."""
    eos_id: int
    """The token after each document."""
    dtype: str
    train_tokens: int
    eval_tokens: int
    train_documents: int
    eval_documents: int
    text_bytes: int
    """UTF-8 bytes of all the text, held-out text included."""
    unigram_entropy: float
    """Of the training tokens, in nats: the loss of a model that knows frequencies and nothing else."""
    entropy_rate: float | None = None
    """Of the stream of tokens, in nats per token, where it is known (see `toolkit.train.data.markov`)."""
    entropy_rate_in_documents: float | None = None
    """The same without the first token of each document."""

    @property
    def contents(self) -> str:
        """What is in it, wherever it lies: equal for equal text and tokenizer."""
        facts = (self.train_tokens, self.eval_tokens, self.train_documents, self.eval_documents, self.text_bytes)
        return repr((*facts, self.tokenizer_vocab_size, self.eos_id, self.unigram_entropy))

    def loss_floor(self, packing: Packing) -> float | None:
        """The lowest loss that can be expected on unseen text, where it is known. Documents that do not see each other
        have no target for their first token.
        """
        return self.entropy_rate if packing == "packed" else self.entropy_rate_in_documents

    @property
    def tokenizer_dir(self) -> Path:
        """A directory for AutoTokenizer.from_pretrained."""
        return self.path / "tokenizer"

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer."""
        from transformers import AutoTokenizer

        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.tokenizer_dir)
        return loaded

    def tokens(self, split: Split) -> Tokens:
        """All ids of a split, mapped from disk."""
        if not self.token_count(split):
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self.path / f"{split}.bin", dtype=self.dtype, mode="r")

    def document_offsets(self, split: Split) -> NDArray[np.int64]:
        """Where each document begins, and where the last one ends, mapped from disk."""
        offsets: NDArray[np.int64] = np.load(self.path / f"{split}_documents.npy", mmap_mode="r")
        return offsets

    def token_count(self, split: Split) -> int:
        """Tokens of a split."""
        return self.train_tokens if split == "train" else self.eval_tokens


def prepare(section: DataSection, *, progress: bool) -> TokenCorpus:
    """Open the tokens of `section`, and build them first where they are missing. Raises DataError or RunError."""
    source = open_source(section)
    loaded = tokenizers.load(section) if tokenizers.bpe_entries(section) is None else None
    folder = _cache_dir(section) / _name(section, source, loaded)
    if folder.is_dir():
        return _open(folder)
    started = time.time()
    failure = folder.with_name(f"{folder.name}.failed")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock", poll_interval=_LOCK_POLL_SECONDS):
            if folder.is_dir():
                return _open(folder)
            _raise_failure_since(started, failure)
            try:
                _build_whole(folder, section, source, loaded, progress=progress)
            except DataError as error:
                failure.write_text(str(error), encoding="utf-8")
                raise
            failure.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"data.cache_dir: cannot write {error.filename or folder}: {error.strerror}. "
            "Set data.cache_dir or $DSTK_CACHE to a writable directory with enough space."
        ) from None
    return _open(folder)


def _cache_dir(section: DataSection) -> Path:
    return Path(section.cache_dir or os.environ.get("DSTK_CACHE") or "~/.cache/dstk").expanduser()


def _name(section: DataSection, source: Source, loaded: "PreTrainedTokenizerBase | None") -> str:
    parts = [
        FORMAT,
        source.fingerprint,
        tokenizers.identity(section, loaded),
        section.eval_fraction,
        section.text_field,
    ]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    source_name, tokenizer_name = (
        re.sub(r"[^\w.-]+", "_", Path(name).name)[:40] for name in (section.source, section.tokenizer)
    )
    return f"{source_name or 'text'}-{tokenizer_name or 'tokenizer'}-{digest}"


def _raise_failure_since(started: float, failure: Path) -> None:
    # Ranks that waited for a builder that failed would all repeat its work, one after the other, to fail the same way.
    with contextlib.suppress(FileNotFoundError):
        if failure.stat().st_mtime >= started:
            raise DataError(failure.read_text(encoding="utf-8"))


def _build_whole(
    folder: Path, section: DataSection, source: Source, loaded: "PreTrainedTokenizerBase | None", *, progress: bool
) -> None:
    """Build under a temporary name, then rename. Needs the lock: whatever has a temporary name is a dead builder's."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        build(temporary, section, source, loaded, progress=progress)
        if open_source(section).fingerprint != source.fingerprint:
            raise DataError(
                f"data.source={section.source} changed while it was tokenized. Run again when it is complete."
            )
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        temporary.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(folder: Path) -> TokenCorpus:
    advice = f"Delete {folder}, it is rebuilt then."
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        corpus = TokenCorpus(path=folder, **meta)
        for split in SPLITS:
            length = len(corpus.tokens(split))
            if length != corpus.token_count(split) or length != corpus.document_offsets(split)[-1]:
                raise DataError(f"{folder / f'{split}.bin'}: not as long as meta.json says. {advice}")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder}: damaged token cache ({error}). {advice}") from None
    return corpus
