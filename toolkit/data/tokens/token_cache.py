"""The token cache: a corpus as token ids on disk, built once and atomically.

    <cache_dir>/<source>-<tokenizer>-<fingerprint>/
        train.bin  eval.bin              raw little-endian ids, uint16 where they fit, else uint32
        train.trained  eval.trained      of chats and prompts, a byte for each token: whether it is trained on
        train_documents.npy  eval_…      where each document begins, and where the last one ends
        train_weights.npy  eval_…        the weight of each document, where rows have one
        tokenizer/                       the tokenizer, as written by save_pretrained
        meta.json                        counts, and the entropy of single tokens

The fingerprint covers the source, the tokenizer with its chat template and the tokens at which generation stops,
eval_fraction, text_field, weight_field, train_on, dropped_text and the format, not seq_len: the same cache serves every
sample length. Any number of processes may call `prepare` at once, before any process group exists: under a file lock
one of them builds and the others wait. The lock is released when its process dies, so the next one takes over from a
builder that was killed, and goes on where it was (`shard.py`).
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from toolkit.config.data_section import CONVERSATIONS, PREFERENCE_FORMATS, DataSection
from toolkit.config.megatron_prefix import megatron_prefix
from toolkit.data.documents.part import WHOLE, SourcePart
from toolkit.data.documents.rows import RowReader
from toolkit.data.documents.sources import Source, open_source
from toolkit.data.tokens import document_ends
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.data.tokens.build_cache import TRAINED_SUFFIX, WEIGHTS_SUFFIX, build
from toolkit.data.tokens.shard import TOKENIZER, TokenShard, write_shard
from toolkit.data.tokens.stop_tokens import generation_stops
from toolkit.data.tokens.tokenizer_pool import TokenizerJob
from toolkit.errors import DataError
from toolkit.files import cache_folder, expanded, published, read_json_object, reason_of
from toolkit.remote_files import is_url, without_query

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")

FORMAT = 2
_ROWS = 1
"""Version of how chats and prompts are encoded and masked."""
_CHATS = 2
"""Version of which chats are refused, and of which of their tokens are trained on."""
_COMPARED = 1
"""Version of which columns are read of rows with completions that are compared."""
_LOCK_POLL_SECONDS = 0.5
_SILENT_SECONDS = 5.0
"""Seconds of waiting without a message: another rank of this run is often the one that makes the cache."""
_FAILURE_SECONDS = 3600


@dataclass(frozen=True, kw_only=True)
class TokenCorpus:
    """A tokenized corpus, open for reading."""

    path: Path
    tokenizer_vocab_size: int
    """Largest token id + 1: a model needs at least as many embeddings."""
    eos_id: int
    """The tokenizer's end-of-text token."""
    dtype: str
    train_tokens: int
    eval_tokens: int
    train_documents: int
    eval_documents: int
    text_bytes: int
    """UTF-8 bytes of all the text, the validation split included."""
    unigram_entropy: float
    """Entropy of the training tokens, in nats: the loss of a model that knows token frequencies only."""
    entropy_rate: float | None = None
    """Entropy rate of the stream of tokens, in nats per token; None if unknown (see
    `toolkit.data.documents.markov`)."""
    entropy_rate_in_documents: float | None = None
    """Entropy rate without the first token of each document; None if unknown."""
    ends: str = ""
    """Tokens before and after the text of each document, in words."""
    trained_tokens: int | None = None
    """Tokens of the training split that are trained on, of chats and prompts; None for text, where all are."""
    weight_sum: float | None = None
    """Sum of the weights of the documents of the training split; None where rows have none."""

    @property
    def contents(self) -> str:
        """Identifies the contents: equal for equal text and tokenizer, in any directory."""
        facts = (self.train_tokens, self.eval_tokens, self.train_documents, self.eval_documents, self.text_bytes)
        trained = () if self.trained_tokens is None else (self.trained_tokens,)
        weights = () if self.weight_sum is None else (self.weight_sum,)
        return repr((*facts, self.tokenizer_vocab_size, self.eos_id, self.unigram_entropy, *trained, *weights))

    def loss_floor(self, data: DataSection) -> float | None:
        """Return the lowest expected loss on unseen text, if known. Documents that do not attend to each other have no
        target for their first token.
        """
        documents_attend = data.packing == "packed" and not data.document_masking
        return self.entropy_rate if documents_attend else self.entropy_rate_in_documents

    @property
    def tokenizer_dir(self) -> Path:
        return self.path / TOKENIZER

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        try:
            return tokenizers.open_saved(self.tokenizer_dir)
        except Exception as error:
            advice = f"Delete {self.path} to rebuild it."
            raise DataError(f"{self.path}: damaged token cache ({reason_of(error)}). {advice}") from None

    def tokens(self, split: Split) -> NDArray[Any]:
        if not self.token_count(split):
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self.path / f"{split}.bin", dtype=self.dtype, mode="r")

    def trained(self, split: Split) -> NDArray[np.uint8]:
        """Memory-map whether each token of chats and prompts is trained on."""
        if not self.token_count(split):
            return np.empty(0, dtype=np.uint8)
        return np.memmap(self.path / f"{split}{TRAINED_SUFFIX}", dtype=np.uint8, mode="r")

    def weights(self, split: Split) -> NDArray[np.float32] | None:
        """Read the weight of each document; None where rows have none."""
        if self.weight_sum is None:
            return None
        weights: NDArray[np.float32] = np.load(self.path / f"{split}{WEIGHTS_SUFFIX}")
        return weights

    def document_offsets(self, split: Split) -> NDArray[np.int64]:
        """Memory-map where each document begins, and where the last one ends."""
        offsets: NDArray[np.int64] = np.asarray(np.load(self.path / f"{split}_documents.npy", mmap_mode="r"))
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
    corpus = Corpus.of(section)
    folder = corpus.cache
    if folder.is_dir():
        return open_cache(folder)
    failure = folder.with_name(f"{folder.name}.failed")
    earlier = _version_of(failure)
    with corpus.locked(folder, progress=progress):
        if folder.is_dir():
            return open_cache(folder)
        _raise_failure_since(earlier, failure)
        partial = folder.with_name(f".{folder.name}.partial")
        try:
            with corpus.removed_on_failure(partial):
                corpus.tokenize(partial, WHOLE, progress=progress)
                corpus.publish([TokenShard(str(partial), WHOLE)])
        except DataError as error:
            failure.write_text(str(error), encoding="utf-8")
            raise
        shutil.rmtree(partial, ignore_errors=True)
        failure.unlink(missing_ok=True)
    return open_cache(folder)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text that is to be tokenized, and the place where its tokens go."""

    section: DataSection
    source: Source
    loaded: "PreTrainedTokenizerBase | None"
    """The tokenizer; None if it has yet to be trained."""
    cache: Path
    """The directory of its token cache."""
    stops: tuple[int, ...] = ()
    """For chats, ids at which the model's generation stops, besides the end-of-text token."""

    @classmethod
    def of(cls, section: DataSection) -> Self:
        """Open the source and the tokenizer. Raises DataError."""
        if megatron_prefix(section.source) is not None:
            raise DataError.of("data.source", section.source, "it is tokenized already, and read where it is")
        if section.cache_dir and is_url(section.cache_dir):
            reason = "it must be on a file system, because ranks map the token cache into memory"
            raise DataError.of("data.cache_dir", section.cache_dir, reason, "name a directory")
        source = open_source(section)
        loaded = tokenizers.load(section) if tokenizers.bpe_entries(section) is None else None
        stops = generation_stops(section.tokenizer) if section.format in CONVERSATIONS else ()
        folder = expanded(section.cache_dir) if section.cache_dir else cache_folder()
        name = _name(section, source, loaded, stops)
        return cls(section=section, source=source, loaded=loaded, cache=folder / name, stops=stops)

    def save_tokenizer(self, folder: Path) -> Path:
        """Save the tokenizer in the directory of a shard, after training it if it has to be; return where it is."""
        for leftover in folder.glob(f".{TOKENIZER}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        saved = folder / TOKENIZER
        if not saved.is_dir():
            with published(saved) as temporary:
                (self.loaded or tokenizers.load_or_train(self.section, self.source)).save_pretrained(temporary)
        return saved

    def job(self, saved: Path) -> tuple[TokenizerJob, dict[str, Any]]:
        """Return what workers do with the tokenizer that is saved there, and what their tokens are of."""
        tokenizer = self.loaded or tokenizers.open_saved(saved)
        job = TokenizerJob.of(self.section, tokenizer, saved, stops=self.stops)
        fields = {key: value for key, value in asdict(job).items() if key != "tokenizer_dir"}
        rows = asdict(RowReader.of(self.section))
        if self.section.weight_field is None:  # shards of before there were weights stay valid
            del fields["weight_field"], rows["weight_field"]
        settings = json.loads(json.dumps(fields))
        of = {"source": self.source.fingerprint, "tokenizer": tokenizers.digest(saved), "format": FORMAT}
        of |= {"rows": rows, "encoding": settings}
        return job, of

    def tokenize(self, folder: Path, part: SourcePart, *, progress: bool) -> None:
        """Write the shard of a part to `folder`, or what is missing of it."""
        job, of = self.job(self.save_tokenizer(folder))
        workers = self.section.workers or os.cpu_count() or 1
        write_shard(folder, part, self.source, job, of, workers=workers, progress=progress)
        if open_source(self.section).fingerprint != self.source.fingerprint:
            advice = "run again when it is complete"
            raise DataError.of("data.source", self.section.source, "it changed while it was tokenized", advice)

    def publish(self, shards: Sequence[TokenShard]) -> None:
        """Make the cache from all shards. Needs the lock: other temporary directories are of dead processes."""
        for leftover in self.cache.parent.glob(f".{self.cache.name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        with published(self.cache) as temporary:
            build(temporary, self.section, shards, self.source.entropy_rate)
            shards[0].copy_tokenizer(temporary / TOKENIZER)

    @contextlib.contextmanager
    def locked(self, folder: Path, *, progress: bool) -> Iterator[None]:
        """Hold the lock of `folder`. Raises DataError where the operating system does not let us write."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder, progress=progress):
                yield
        except OSError as error:
            reason = f"{error.filename or folder} cannot be written ({error.strerror})"
            advice = "set it or $DSTK_CACHE to a writable directory with enough space"
            raise DataError.of("data.cache_dir", self.section.cache_dir, reason, advice) from None

    @contextlib.contextmanager
    def removed_on_failure(self, folder: Path) -> Iterator[None]:
        """Remove `folder` if the text is refused or the disk is full; an interrupted process leaves it to the next."""
        try:
            yield
        except (DataError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextlib.contextmanager
def _locked(folder: Path, *, progress: bool) -> Iterator[None]:
    """Hold the lock of a directory, and delete its file: who waits for it finds the directory, or why there is none.

    Reasons of failures of other caches that no rank can be waiting for any more are deleted too.
    """
    path = folder.with_name(f"{folder.name}.lock")
    lock = FileLock(path, poll_interval=_LOCK_POLL_SECONDS)
    try:
        lock.acquire(timeout=_SILENT_SECONDS)
    except Timeout:
        if progress:
            print(f"another process makes {folder}: waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        for failure in folder.parent.glob("*.failed"):
            with contextlib.suppress(FileNotFoundError):
                if failure.stem != folder.name and time.time() - failure.stat().st_mtime > _FAILURE_SECONDS:
                    failure.unlink()
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def _name(
    section: DataSection, source: Source, loaded: "PreTrainedTokenizerBase | None", stops: tuple[int, ...]
) -> str:
    corpus = (FORMAT, source.fingerprint, tokenizers.identity(section, loaded))
    parts = [*corpus, section.eval_fraction, section.text_field]
    if section.format != "text":
        # The template is one of the tokenizer's files.
        parts += [_ROWS, section.format, section.train_on]
    if section.format in CONVERSATIONS:
        parts += [_CHATS, section.dropped_text, stops]
    if section.format in PREFERENCE_FORMATS:
        parts.append({"compared": _COMPARED})
    parts += document_ends.identity(section, loaded)
    if section.weight_field is not None:
        parts.append({"weight_field": section.weight_field})
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    source_name, tokenizer_name = (
        re.sub(r"[^\w.-]+", "_", Path(without_query(name)).name)[:40] for name in (section.source, section.tokenizer)
    )
    return f"{source_name or 'text'}-{tokenizer_name or 'tokenizer'}-{digest}"


def _version_of(failure: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written again; None where there is none. Clocks of hosts are not compared."""
    try:
        status = failure.stat()
    except OSError:  # that nothing can be read there is said where it is written
        return None
    return status.st_ino, status.st_mtime_ns


def _raise_failure_since(earlier: tuple[int, int] | None, failure: Path) -> None:
    # Otherwise ranks that waited for a builder that failed would repeat its work one after the other, and fail too.
    with contextlib.suppress(FileNotFoundError):
        if _version_of(failure) not in (None, earlier):
            raise DataError(failure.read_text(encoding="utf-8"))


def open_cache(folder: Path) -> TokenCorpus:
    """Open a token cache. Raises DataError if it is damaged."""
    advice = f"Delete {folder} to rebuild it."
    try:
        corpus = TokenCorpus(path=folder, **read_json_object(folder / "meta.json"))
        for path in folder.iterdir():
            if not (path.is_file() or path.is_dir()):
                raise OSError(f"{path.name} is not a regular file")
        for split in SPLITS:
            length = len(corpus.tokens(split))
            if length != corpus.token_count(split) or length != corpus.document_offsets(split)[-1]:
                raise DataError(f"{folder / f'{split}.bin'}: not as long as meta.json says. {advice}")
            if corpus.trained_tokens is not None and len(corpus.trained(split)) != length:
                raise DataError(f"{folder / f'{split}{TRAINED_SUFFIX}'}: not as long as {split}.bin. {advice}")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder}: damaged token cache ({reason_of(error)}). {advice}") from None
    return corpus
