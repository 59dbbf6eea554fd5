"""MegatronCorpus: a dataset of Megatron-LM as a TokenCorpus. Nothing is copied: both splits are views of its .bin."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from toolkit.config.data_section import DataSection
from toolkit.data.megatron.index import DocumentOffsets, MegatronIndex, open_index
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.data.tokens.build_cache import BLOCK_TOKENS
from toolkit.data.tokens.token_cache import Split, TokenCorpus
from toolkit.data.tokens.tokenizer_pool import vocab_size as vocab_size_of
from toolkit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COUNTED_TOKENS = 1 << 24
"""Maximum number of tokens that are read for the entropy of single ones."""
_COUNTED_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class MegatronCorpus(TokenCorpus):
    """A dataset of Megatron-LM; the validation split are its last documents."""

    index: MegatronIndex
    section: DataSection
    offsets: dict[Split, NDArray[np.int64]]

    @override
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return tokenizers.load(self.section)

    @override
    def tokens(self, split: Split) -> NDArray[Any]:
        stream = self.index.stream()
        return stream[: self.train_tokens] if split == "train" else stream[self.train_tokens :]

    @override
    def document_offsets(self, split: Split) -> NDArray[np.int64]:
        return self.offsets[split]


def open_megatron(prefix: str, section: DataSection) -> MegatronCorpus:
    """Open the dataset of `prefix` and the tokenizer that made it. Raises DataError."""
    if "://" in section.source:
        reason = "a dataset of Megatron-LM is mapped into memory, which needs a local file"
        raise DataError.of("data.source", section.source, reason, "copy its .idx and .bin here")
    index = open_index(prefix)
    tokenizer = tokenizers.load(section)
    vocab_size = vocab_size_of(tokenizer)
    first = _first_held_out(index, section)
    offsets: dict[Split, NDArray[np.int64]] = {
        "train": _offsets(index, 0, first),
        "eval": _offsets(index, first, index.documents),
    }
    train_tokens = int(offsets["train"][-1])
    return MegatronCorpus(
        path=Path(prefix),
        tokenizer_vocab_size=vocab_size,
        eos_id=int(tokenizer.eos_token_id),
        dtype=index.dtype.str,
        train_tokens=train_tokens,
        eval_tokens=index.tokens - train_tokens,
        train_documents=len(offsets["train"]) - 1,
        eval_documents=len(offsets["eval"]) - 1,
        text_bytes=0,
        ends="ids as they are",
        unigram_entropy=_entropy(index, train_tokens, vocab_size),
        index=index,
        section=section,
        offsets=offsets,
    )


def _first_held_out(index: MegatronIndex, section: DataSection) -> int:
    """The first document of the validation split: those at the end, at least one and at least `BLOCK_TOKENS` tokens."""
    if not section.eval_fraction:
        return index.documents
    first = index.documents - max(1, round(section.eval_fraction * index.documents))
    all_offsets = DocumentOffsets(index, 0, index.documents)
    first = min(first, int(all_offsets.searchsorted(index.tokens - BLOCK_TOKENS, side="right")) - 1)
    if first < 1 or not all_offsets[first]:
        settings = (("data.eval_fraction", section.eval_fraction), ("data.source", section.source))
        reason = f"whole documents at the end are held out, {BLOCK_TOKENS:,} tokens at least, and nothing would be left"
        raise DataError.between(settings, reason, "use more text", ("data.eval_fraction", 0))
    return first


def _offsets(index: MegatronIndex, first: int, last: int) -> NDArray[np.int64]:
    """Return where documents begin, without the empty ones that Megatron-LM writes for empty texts."""
    offsets = DocumentOffsets(index, first, last)
    if index.may_be_empty:
        return np.unique(np.asarray(offsets))
    return cast("NDArray[np.int64]", offsets)


def _entropy(index: MegatronIndex, tokens: int, vocab_size: int) -> float:
    """Return the entropy of single tokens in nats. Raises DataError for ids that the tokenizer does not have.

    Known error: of more than 16 million tokens, blocks of so many are read, spread evenly.
    """
    stream = index.stream()
    spacing = max(_COUNTED_AT_ONCE, tokens * _COUNTED_AT_ONCE // _COUNTED_TOKENS)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, tokens, spacing):
        part = stream[start : min(start + _COUNTED_AT_ONCE, tokens)]
        outside = (part < 0) | (part >= vocab_size)
        if outside.any():
            place = start + int(np.argmax(outside))
            reason = f"token {place:,} is {stream[place]}, and the tokenizer has 0 to {vocab_size - 1:,}"
            raise DataError(f"{index.prefix}.bin: {reason}. Set data.tokenizer to the one that made the dataset.")
        counts += np.bincount(part, minlength=vocab_size)
    shares = counts[counts > 0] / max(1, counts.sum())
    return max(0.0, float(-(shares * np.log(shares)).sum()))
