"""A synthetic corpus with a known lowest loss: a first-order Markov chain over letters.

The end of a document is a state of the chain like the letters, and the next document begins from there. With a token
for each letter and the end-of-text token for that state, the whole stream of tokens is one Markov chain, in which only
the last token predicts the next. Its entropy rate (`EntropyRate`) is the lowest expected loss of any model on unseen
text: a loss below it is a bug in the loss, a loss that stays above it a bug in training.

Everything is computed in integers, so that every machine generates the same bytes: a transition's probability is a
multiple of 1/4096, drawn with 12 bits of PCG64's raw output, a stream that numpy guarantees for a seed.
"""

import hashlib
import string
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.data.documents.part import WHOLE, SourcePart
from toolkit.data.documents.text_chunks import LoadedTexts, TextChunk

LETTERS = string.ascii_lowercase
END = len(LETTERS)
"""The state after the last letter of a document and before the first one of the next: the end-of-text token."""
DOCUMENTS = 16_384

_CHAIN_SEED = 12
_TEXT_SEED = 1
_DRAW_BITS = 12
_END_SHARES = 64
"""Probability, in 4096ths, that a document ends after a letter: documents have 64 letters on average."""
_LETTER_SHARES = (2184, 896, 448, 224, 112, *[8] * 21)
"""Probabilities of the next letters, in 4096ths, the most likely first. None is zero: any letter can follow any
letter."""
_DRAWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class EntropyRate:
    """The conditional entropy of a token given the one before it, in nats per token.

    H = -sum_i pi_i sum_j P_ij ln P_ij, with P_ij the probability of j after i and pi the stationary distribution,
    pi = pi P. Source: Cover and Thomas, Elements of Information Theory, 2nd ed., section 4.2.
    Known error: none for the chain; the loss of the best model on n tokens scatters around H by about 1.3 / sqrt(n).
    """

    stream: float
    """Every token is a target: i goes over all states."""
    in_documents: float
    """The first letter of a document is no target: i only goes over letters, and pi is divided by 1 - pi_end."""
    states: int
    """Letters and the end-of-text state."""

    @classmethod
    def of(cls, transitions: NDArray[np.float64], *, end: int = END) -> "EntropyRate":
        """Compute it from transition probabilities, of which row `end` is the end-of-text state."""
        logarithms = np.log(transitions, out=np.zeros_like(transitions), where=transitions > 0)
        entropies = -(transitions * logarithms).sum(axis=1)
        share = stationary(transitions)
        letters = np.arange(len(share)) != end
        return cls(
            stream=float(share @ entropies),
            in_documents=float(share[letters] @ entropies[letters] / share[letters].sum()),
            states=len(share),
        )


def stationary(transitions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve pi P = pi and sum pi = 1: one of the equations (P^T - I) pi = 0 is redundant; the sum replaces it."""
    count = len(transitions)
    equations = transitions.T - np.eye(count)
    equations[-1] = 1.0
    solution: NDArray[np.float64] = np.linalg.solve(equations, np.eye(count)[-1])
    return solution


class MarkovSource:
    """About a million letters in one chunk."""

    def __init__(self) -> None:
        chance = np.random.PCG64(_CHAIN_SEED)
        self._next = [_row(state, chance) for state in range(END + 1)]
        self.fingerprint = hashlib.sha256(repr((_TEXT_SEED, DOCUMENTS, self._next)).encode()).hexdigest()
        self.size_bytes = DOCUMENTS * (1 << _DRAW_BITS) // _END_SHARES
        self.entropy_rate: EntropyRate | None = EntropyRate.of(self.transitions())

    def transitions(self) -> NDArray[np.float64]:
        """Return P[i, j], the probability of state j after state i; the end-of-text state is the last one."""
        counts = [np.bincount(np.frombuffer(row, dtype=np.uint8), minlength=END + 1) for row in self._next]
        return np.stack(counts) / (1 << _DRAW_BITS)

    def chunks(self, part: SourcePart = WHOLE) -> Iterator[TextChunk]:
        if not part.has(0, self.size_bytes):
            return
        texts = tuple(self._documents())
        yield LoadedTexts(texts=texts, size_bytes=sum(map(len, texts)))

    def _documents(self) -> Iterator[str]:
        chance = np.random.PCG64(_TEXT_SEED)
        text: list[str] = []
        state = END
        remaining = DOCUMENTS
        while True:
            for draw in (chance.random_raw(_DRAWS_AT_ONCE) >> np.uint64(64 - _DRAW_BITS)).tolist():
                state = self._next[state][draw]
                if state != END:
                    text.append(LETTERS[state])
                    continue
                yield "".join(text)
                text.clear()
                remaining -= 1
                if not remaining:
                    return


def _row(state: int, chance: np.random.PCG64) -> bytes:
    """Return the next state for each of the 4096 values that can be drawn after `state`."""
    order: list[int] = np.argsort(chance.random_raw(len(LETTERS))).tolist()
    letters = b"".join(bytes([letter]) * share for letter, share in zip(order, _LETTER_SHARES, strict=True))
    # A document has at least one letter: the probability of ending goes to the most likely first letter.
    return letters + bytes([order[0] if state == END else END]) * _END_SHARES
