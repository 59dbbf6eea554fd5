"""The token cache: a corpus as token ids on disk, built once and atomically.

    <cache_dir>/<source>-<tokenizer>-<fingerprint>/
        train.bin  eval.bin              raw little-endian ids, uint16 where they fit, else uint32
        train.trained  eval.trained      of chats and prompts, a byte for each token: whether it is trained on
        train_documents.npy  eval_…      where each document begins, and where the last one ends
        tokenizer/                       the tokenizer, as written by save_pretrained
        meta.json                        counts, and the entropy of single tokens

The fingerprint covers the source, the tokenizer with its chat template, eval_fraction, text_field, train_on and the
format, not seq_len: the same cache serves every sample length. Any number of processes may call `prepare` at once,
before any process group exists: under a file lock one of them builds and the others wait. The lock is released when
its process dies, so the next one takes over from a builder that was killed; its files have a temporary name and are
deleted.
"""

import contextlib
import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from toolkit.config.megatron_prefix import megatron_prefix
from toolkit.config.recipe import DataSection
from toolkit.data.documents.sources import Source, open_source
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.data.tokens.build_cache import TRAINED_SUFFIX, build
from toolkit.errors import DataError
from toolkit.files import cache_folder, expanded, published

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")

FORMAT = 2
_ROWS = 1
"""Version of how chats and prompts are encoded and masked."""
_LOCK_POLL_SECONDS = 0.5
_FAILURE_SECONDS = 3600


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
    """UTF-8 bytes of all the text, the validation split included."""
    unigram_entropy: float
    """Of the training tokens, in nats: the loss of a model that knows token frequencies only."""
    entropy_rate: float | None = None
    """Of the stream of tokens, in nats per token, if known (see `toolkit.data.documents.markov`)."""
    entropy_rate_in_documents: float | None = None
    """The same without the first token of each document."""
    trained_tokens: int | None = None
    """Tokens of the training split that are trained on, of chats and prompts; None for text, where all are."""

    @property
    def contents(self) -> str:
        """Identifies the contents: equal for equal text and tokenizer, in any directory."""
        facts = (self.train_tokens, self.eval_tokens, self.train_documents, self.eval_documents, self.text_bytes)
        trained = () if self.trained_tokens is None else (self.trained_tokens,)
        return repr((*facts, self.tokenizer_vocab_size, self.eos_id, self.unigram_entropy, *trained))

    def loss_floor(self, data: DataSection) -> float | None:
        """Return the lowest expected loss on unseen text, if known. Documents that do not attend to each other have no
        target for their first token.
        """
        documents_attend = data.packing == "packed" and not data.document_masking
        return self.entropy_rate if documents_attend else self.entropy_rate_in_documents

    @property
    def tokenizer_dir(self) -> Path:
        return self.path / "tokenizer"

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer

        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.tokenizer_dir)
        return loaded

    def tokens(self, split: Split) -> NDArray[Any]:
        if not self.token_count(split):
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self.path / f"{split}.bin", dtype=self.dtype, mode="r")

    def trained(self, split: Split) -> NDArray[np.uint8]:
        """Memory-map whether each token of chats and prompts is trained on."""
        if not self.token_count(split):
            return np.empty(0, dtype=np.uint8)
        return np.memmap(self.path / f"{split}{TRAINED_SUFFIX}", dtype=np.uint8, mode="r")

    def document_offsets(self, split: Split) -> NDArray[np.int64]:
        """Memory-map where each document begins, and where the last one ends."""
        offsets: NDArray[np.int64] = np.load(self.path / f"{split}_documents.npy", mmap_mode="r")
        return offsets

    def token_count(self, split: Split) -> int:
        return self.train_tokens if split == "train" else self.eval_tokens


def prepare(section: DataSection, *, progress: bool) -> TokenCorpus:
    """Open the token cache of `section`; build it first if it is missing. Raises DataError or RunError.

    A dataset of Megatron-LM is opened where it is.
    """
    if (prefix := megatron_prefix(section.source)) is not None:
        from toolkit.data.megatron.corpus import open_megatron

        return open_megatron(prefix, section)
    source = open_source(section)
    loaded = tokenizers.load(section) if tokenizers.bpe_entries(section) is None else None
    cache_dir = expanded(section.cache_dir) if section.cache_dir else cache_folder()
    folder = cache_dir / _name(section, source, loaded)
    if folder.is_dir():
        return _open(folder)
    started = time.time()
    failure = folder.with_name(f"{folder.name}.failed")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if folder.is_dir():
                return _open(folder)
            _raise_failure_since(started, failure)
            try:
                _build_atomically(folder, section, source, loaded, progress=progress)
            except DataError as error:
                failure.write_text(str(error), encoding="utf-8")
                raise
            failure.unlink(missing_ok=True)
    except OSError as error:
        reason = f"{error.filename or folder} cannot be written ({error.strerror})"
        advice = "set it or $DSTK_CACHE to a writable directory with enough space"
        raise DataError.of("data.cache_dir", section.cache_dir, reason, advice) from None
    return _open(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache, and delete its file: who waits for it finds the cache then, or why there is none.

    Reasons of failures that no rank can be waiting for any more are deleted too.
    """
    lock = folder.with_name(f"{folder.name}.lock")
    with FileLock(lock, poll_interval=_LOCK_POLL_SECONDS):
        try:
            for failure in folder.parent.glob("*.failed"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - failure.stat().st_mtime > _FAILURE_SECONDS:
                        failure.unlink()
            yield
        finally:
            lock.unlink(missing_ok=True)


def _name(section: DataSection, source: Source, loaded: "PreTrainedTokenizerBase | None") -> str:
    corpus = (FORMAT, source.fingerprint, tokenizers.identity(section, loaded))
    parts = [*corpus, section.eval_fraction, section.text_field]
    if section.format != "text":
        # The template is one of the tokenizer's files.
        parts += [_ROWS, section.format, section.train_on]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    source_name, tokenizer_name = (
        re.sub(r"[^\w.-]+", "_", Path(name).name)[:40] for name in (section.source, section.tokenizer)
    )
    return f"{source_name or 'text'}-{tokenizer_name or 'tokenizer'}-{digest}"


def _raise_failure_since(started: float, failure: Path) -> None:
    # Otherwise ranks that waited for a builder that failed would repeat its work one after the other, and fail too.
    with contextlib.suppress(FileNotFoundError):
        if failure.stat().st_mtime >= started:
            raise DataError(failure.read_text(encoding="utf-8"))


def _build_atomically(
    folder: Path, section: DataSection, source: Source, loaded: "PreTrainedTokenizerBase | None", *, progress: bool
) -> None:
    """Build it. Needs the lock: other temporary directories are of dead builders."""
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    with published(folder) as temporary:
        build(temporary, section, source, loaded, progress=progress)
        if open_source(section).fingerprint != source.fingerprint:
            advice = "run again when it is complete"
            raise DataError.of("data.source", section.source, "it changed while it was tokenized", advice)


def _open(folder: Path) -> TokenCorpus:
    advice = f"Delete {folder} to rebuild it."
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        corpus = TokenCorpus(path=folder, **meta)
        for split in SPLITS:
            length = len(corpus.tokens(split))
            if length != corpus.token_count(split) or length != corpus.document_offsets(split)[-1]:
                raise DataError(f"{folder / f'{split}.bin'}: not as long as meta.json says. {advice}")
            if corpus.trained_tokens is not None and len(corpus.trained(split)) != length:
                raise DataError(f"{folder / f'{split}{TRAINED_SUFFIX}'}: not as long as {split}.bin. {advice}")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder}: damaged token cache ({error}). {advice}") from None
    return corpus
