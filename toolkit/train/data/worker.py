"""Worker: a process that reads pieces and tokenizes them. Started by `pool`, never by hand.

A fresh interpreter on one pipe: nothing is inherited from a process in which torch, CUDA or threads are running, the
caller's main module is not imported again, and when the parent dies, by whatever signal, the pipe ends and so do we.
"""

import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import DataError
from toolkit.train.data.encoder import Encoder, load_encoder
from toolkit.train.data.pieces import Piece


@dataclass(frozen=True, kw_only=True)
class Job:
    """How to tokenize."""

    tokenizer_dir: str
    split_special_tokens: bool
    eos_id: int
    dtype: str

    def open(self) -> "PieceEncoder":
        """Load the tokenizer."""
        encoder = load_encoder(Path(self.tokenizer_dir), self.dtype, split_special_tokens=self.split_special_tokens)
        return PieceEncoder(encoder, np.array([self.eos_id], dtype=self.dtype).tobytes())


@dataclass(frozen=True, kw_only=True)
class EncodedPiece:
    """The tokens of a piece; empty documents are left out."""

    ids: bytes
    """Raw ids, an end-of-text token after each document."""
    lengths: NDArray[np.int64]
    """Tokens of each document, its end-of-text token included."""
    text_bytes: int
    """UTF-8 bytes of the text."""
    continues: bool
    """The last document goes on in the next piece, and has no end-of-text token yet."""
    size_bytes: int
    """`Piece.size_bytes`."""


class PieceEncoder:
    """Piece -> EncodedPiece."""

    def __init__(self, encoder: Encoder, eos: bytes) -> None:
        self._encoder = encoder
        self._eos = eos

    def encode(self, piece: Piece) -> EncodedPiece:
        """Read and tokenize. Raises DataError for text that cannot be read."""
        texts = [text for text in piece.documents() if text]
        encoded = self._encoder.encode(texts) if texts else []
        parts = [part + self._eos for part in encoded]
        if piece.continues:
            parts[-1] = encoded[-1]
        return EncodedPiece(
            ids=b"".join(parts),
            lengths=np.array([len(part) // len(self._eos) for part in parts], dtype=np.int64),
            text_bytes=sum(len(text) if text.isascii() else len(text.encode()) for text in texts),
            continues=piece.continues,
            size_bytes=piece.size_bytes,
        )


def main() -> None:
    """Answer pieces until the pipe ends."""
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Connection(int(sys.argv[1])) as pipe:
            encoder = pipe.recv().open()
            while True:
                piece = pipe.recv()
                try:
                    answer: EncodedPiece | DataError = encoder.encode(piece)
                except DataError as error:
                    answer = error
                pipe.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
