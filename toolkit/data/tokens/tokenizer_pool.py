"""TokenizerPool: tokenize chunks in several processes, and return the results in the order of the chunks.

A worker is a new interpreter on one pipe: it inherits nothing from a process in which torch, CUDA or threads are
running, does not import the caller's main module again, and exits when the parent dies, because the pipe closes.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from toolkit.config.data_section import DataSection, DroppedText, Format, TrainOn
from toolkit.data.documents.rows import Document, WeightedText
from toolkit.data.documents.text_chunks import TextChunk
from toolkit.data.documents.token_rows import TokenRow
from toolkit.data.tokens.conversation_encoder import ConversationEncoder
from toolkit.data.tokens.document_ends import DocumentEnds
from toolkit.data.tokens.encoder import Encoder, load_encoder
from toolkit.errors import DataError, RunError, ToolkitError
from toolkit.parent_process import end_with

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UINT16_ENTRIES = 1 << 16
# Results per worker that may wait for a slower one before them: bounds the memory of the parent.
_AHEAD = 4
_WORKER = "from toolkit.data.tokens.tokenizer_pool import run_worker; run_worker()"


@dataclass(frozen=True, kw_only=True)
class EncodedChunk:
    """The tokens of a chunk, without empty documents."""

    ids: bytes
    """Raw ids, with what is before and after each document."""
    lengths: NDArray[np.int64]
    """Tokens of each document, those before and after its text included."""
    trained: bytes = b""
    """A byte for each token that says whether it is trained on; nothing for text, where all are."""
    text_bytes: int
    """UTF-8 bytes of the text; of ids, 0."""
    weights: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """The weight of each document; empty where rows have none."""
    continues: bool
    """The last document continues in the next chunk, and has no end-of-text token yet."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class TokenizerJob:
    """The configuration of a worker."""

    tokenizer_dir: str
    split_special_tokens: bool
    eos_id: int
    dtype: str
    vocab_size: int
    before: tuple[int, ...] = ()
    """Ids before the text of a document."""
    after: tuple[int, ...] = ()
    """Ids after the text of a document."""
    ends: str = ""
    """Ids before and after a document, in words."""
    format: Format = "text"
    train_on: TrainOn = "assistant"
    dropped_text: DroppedText = "refuse"
    stops: tuple[int, ...] = ()
    """For chats, ids at which the model's generation stops, besides the end-of-text token."""
    weight_field: str | None = None
    """The field of a row that has its weight."""

    @classmethod
    def of(
        cls, section: DataSection, tokenizer: "PreTrainedTokenizerBase", folder: Path, *, stops: tuple[int, ...] = ()
    ) -> Self:
        """The configuration for a tokenizer that was saved to `folder`."""
        entries = vocab_size(tokenizer)
        ends = DocumentEnds.of(section, tokenizer)
        return cls(
            tokenizer_dir=str(folder),
            split_special_tokens=bool(getattr(tokenizer, "split_special_tokens", False)),
            eos_id=int(tokenizer.eos_token_id),
            dtype="<u2" if entries <= _UINT16_ENTRIES else "<u4",
            vocab_size=entries,
            before=ends.before,
            after=ends.after,
            ends=ends.describe(section, tokenizer),
            format=section.format,
            train_on=section.train_on,
            dropped_text=section.dropped_text,
            stops=stops,
            weight_field=section.weight_field,
        )

    def open(self) -> Callable[[TextChunk], EncodedChunk]:
        """Load the tokenizer; return a function that reads and tokenizes a chunk, and raises DataError."""
        if self.format == "pretokenized":
            return partial(_take_token_rows, self.dtype, self.vocab_size)
        if self.format != "text":
            encoder = ConversationEncoder(
                Path(self.tokenizer_dir),
                self.dtype,
                self.train_on,
                before=self.before,
                after=self.after,
                stops=self.stops,
                dropped_text=self.dropped_text,
            )
            return partial(_encode_conversations, encoder, self.weight_field)
        plain = load_encoder(Path(self.tokenizer_dir), self.dtype, split_special_tokens=self.split_special_tokens)
        before, after = (np.array(ids, dtype=self.dtype).tobytes() for ids in (self.before, self.after))
        return partial(_encode_chunk, plain, before, after, np.dtype(self.dtype).itemsize, self.weight_field)


def _encode_chunk(
    encoder: Encoder, before: bytes, after: bytes, itemsize: int, weight_field: str | None, chunk: TextChunk
) -> EncodedChunk:
    texts = [text for text in chunk.documents() if text and isinstance(text, str)]
    encoded = encoder.encode(texts) if texts else []
    # A text may begin with the BOS itself.
    parts = [part if part.startswith(before) else before + part for part in encoded]
    if chunk.is_continued:
        parts[0] = encoded[0]
    last = parts[-1:]
    parts = [part + after for part in parts]
    if chunk.continues:
        parts[-1:] = last
    return EncodedChunk(
        ids=b"".join(parts),
        lengths=np.array([len(part) // itemsize for part in parts], dtype=np.int64),
        text_bytes=sum(len(text) if text.isascii() else len(text.encode()) for text in texts),
        weights=_weights(texts, weight_field),
        continues=chunk.continues,
        size_bytes=chunk.size_bytes,
    )


def _weights(documents: Sequence[Document], weight_field: str | None) -> NDArray[np.float32]:
    """Return the weight of each document. Raises DataError for documents that are no rows."""
    if weight_field is None:
        return np.empty(0, dtype=np.float32)
    weights = [document.weight for document in documents if isinstance(document, WeightedText)]
    if len(weights) < len(documents):
        reason = "a text that is not a row of a table or of JSONL has no fields"
        raise DataError.of("data.weight_field", weight_field, reason, ("data.weight_field", None))
    return np.array(weights, dtype=np.float32)


def _encode_conversations(encoder: ConversationEncoder, weight_field: str | None, chunk: TextChunk) -> EncodedChunk:
    texts = chunk.documents()
    documents = []
    rows: list[Document] = []
    for text in texts:
        if isinstance(text, str):
            try:
                encoded = encoder.encode(text)
            except DataError as error:
                if isinstance(texts, Generator):
                    texts.throw(error)  # says which row it is
                raise
            documents += encoded
            rows += [text] * len(encoded)
    return EncodedChunk(
        ids=b"".join(document.ids for document in documents),
        lengths=np.array([len(document.trained) for document in documents], dtype=np.int64),
        trained=b"".join(document.trained.tobytes() for document in documents),
        text_bytes=sum(document.text_bytes for document in documents),
        weights=_weights(rows, weight_field),
        continues=False,
        size_bytes=chunk.size_bytes,
    )


def _take_token_rows(dtype: str, vocab_size: int, chunk: TextChunk) -> EncodedChunk:
    rows = [row for row in chunk.documents() if row and isinstance(row, TokenRow)]
    for row in rows:
        row.check(vocab_size)
    return EncodedChunk(
        ids=b"".join(row.ids.astype(dtype).tobytes() for row in rows),
        lengths=np.array([len(row.ids) for row in rows], dtype=np.int64),
        trained=b"".join(row.trained.tobytes() for row in rows),
        text_bytes=0,
        continues=False,
        size_bytes=chunk.size_bytes,
    )


def vocab_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the largest id + 1, which is more than the number of entries if ids have gaps."""
    return int(max(tokenizer.get_vocab().values())) + 1


def encode_chunks(chunks: Iterator[TextChunk], job: TokenizerJob, workers: int) -> Iterator[EncodedChunk]:
    """Encode chunks in order, with any number of workers. Raises what reading or tokenizing raised."""
    first = list(itertools.islice(chunks, 2))
    chunks = itertools.chain(first, chunks)
    if workers > 1 and len(first) == 2:
        with TokenizerPool(job, workers) as pool:
            yield from pool.encode(chunks)
    elif first:
        with tokenizers_parallelism_off():
            yield from map(job.open(), chunks)


@contextlib.contextmanager
def tokenizers_parallelism_off() -> Iterator[None]:
    """Keep `tokenizers` from starting threads, which would make it warn in every process forked later."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


class TokenizerPool:
    """Processes that run `run_worker`, each with one chunk at a time."""

    # Not concurrent.futures: its new processes run the caller's script again, which fails without a __main__ guard, and
    # of one that dies nobody learns the signal or the exit code.

    def __init__(self, job: TokenizerJob, workers: int) -> None:
        self._job = job
        self._count = workers
        self._workers: dict[Connection, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe, process in self._workers.items():
            pipe.close()
            process.kill()  # workers have no state
        for process in self._workers.values():
            process.wait()

    def encode(self, chunks: Iterator[TextChunk]) -> Iterator[EncodedChunk]:
        """Tokenize. A worker gets its next chunk after it has answered, so that neither side blocks the other."""
        idle: list[Connection] = []
        working: dict[Connection, int] = {}
        done: dict[int, EncodedChunk] = {}
        sent = returned = 0
        more = True
        while True:
            while more and sent - returned < _AHEAD * self._count and (idle or len(self._workers) < self._count):
                chunk = next(chunks, None)
                if chunk is None:
                    more = False
                    break
                pipe = idle.pop() if idle else self._start()
                self._send(pipe, chunk)
                working[pipe] = sent
                sent += 1
            if returned in done:
                yield done.pop(returned)
                returned += 1
            elif working:
                for ready in wait(list(working)):
                    assert isinstance(ready, Connection)
                    done[working.pop(ready)] = self._receive(ready)
                    idle.append(ready)
            else:
                return

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        # The same import path as the caller, however it was set.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
        command = [sys.executable, "-P", "-c", _WORKER, str(theirs.fileno()), str(os.getpid())]
        # They may reach every process of a job; the parent handles them. A worker inherits that they are blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        try:
            with theirs:
                unused = subprocess.DEVNULL
                self._workers[ours] = subprocess.Popen(
                    command, env=environment, pass_fds=[theirs.fileno()], stdin=unused, stdout=unused
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._send(ours, self._job)
        return ours

    def _send(self, pipe: Connection, message: TextChunk | TokenizerJob) -> None:
        try:
            pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(pipe) from None

    def _receive(self, pipe: Connection) -> EncodedChunk:
        try:
            answer: EncodedChunk | ToolkitError = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(pipe) from None
        if isinstance(answer, ToolkitError):
            raise answer
        return answer

    def _died(self, pipe: Connection) -> RunError:
        code = self._workers[pipe].wait()
        killed = f"was killed by signal {-code}, perhaps for lack of memory"
        reason = killed if code < 0 else f"ended with exit code {code}"
        return RunError(f"a process that tokenizes {reason}. Lower data.workers, or see its output above.")


def run_worker() -> None:
    """Encode chunks until the pipe closes; the arguments are its file descriptor and the process id of the parent."""
    end_with(int(sys.argv[2]))
    try:
        with Connection(int(sys.argv[1])) as pipe:
            encode = pipe.recv().open()
            while True:
                chunk = pipe.recv()
                try:
                    pipe.send(encode(chunk))
                except ToolkitError as error:
                    pipe.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
