"""The files of the token cache from the shards of a corpus, with memory that does not grow with the text.

The shards are read once, in their order. Only eight bytes per document stay in memory.

The validation split is a function of the lengths of the documents alone. Whole documents are held out, chosen by a hash
of their index, so that appending documents moves none of the others. If that were fewer than 20 documents, their share
of the tokens would be random: then blocks of 2,048 tokens are held out instead, chosen by a hash of theirs.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config.data_section import DataSection
from toolkit.data.documents.markov import EntropyRate
from toolkit.data.permutation import mix
from toolkit.data.tokens.sequence_marks import TRAINED
from toolkit.data.tokens.shard import TokenShard
from toolkit.errors import DataError

TRAINED_SUFFIX = ".trained"
"""Suffix of the files that say of each token whether it is trained on."""
WEIGHTS_SUFFIX = "_weights.npy"
"""Suffix of the files that say how much each document weighs."""
Segments = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Ends of the segments of the stream, and whether each is in the validation split."""
BLOCK_TOKENS = 2048
MIN_VALIDATION_DOCUMENTS = 20
_SPLITS = ("train", "eval")


def build(folder: Path, section: DataSection, shards: Sequence[TokenShard], rate: EntropyRate | None) -> None:
    """Write all files of the cache but the tokenizer to `folder`, from all shards of a corpus of this entropy rate."""
    encoding = shards[0].of["encoding"]
    ends = document_ends(shards)
    if not len(ends):
        raise empty_text(section)
    whole = section.format != "text"
    if section.format == "pretokenized":
        whole = any(shard.counts.untrained for shard in shards)
    masked = whole
    whole = whole or section.weight_field is not None  # a part of a document has no place for its weight
    segment_ends, is_eval = choose_validation(ends, section.eval_fraction, name=section.source, whole=whole)
    counts = _write_splits(folder, shards, (segment_ends, is_eval), vocab_size=encoding["vocab_size"], masked=masked)
    text_bytes = sum(shard.counts.text_bytes for shard in shards)
    # Each token must be one symbol of the source, to whose symbols its entropy rate refers.
    symbols = (text_bytes + len(ends), int(np.count_nonzero(counts.sum(axis=0))))
    if rate is not None and symbols != (int(ends[-1]), rate.states):
        settings = (("data.tokenizer", section.tokenizer), ("data.source", section.source))
        reason = "a token must be one letter, or the entropy rate of the tokens is not known"
        raise DataError.between(settings, reason, ("data.tokenizer", "bpe-257"))
    lengths = np.diff(segment_ends, prepend=0)
    for name, wanted in zip(_SPLITS, (~is_eval, is_eval), strict=True):
        np.save(folder / f"{name}_documents.npy", np.concatenate([[0], np.cumsum(lengths[wanted])]).astype(np.int64))
    weights = _document_weights(shards)
    if len(weights):
        for name, wanted in zip(_SPLITS, (~is_eval, is_eval), strict=True):
            np.save(folder / f"{name}{WEIGHTS_SUFFIX}", weights[wanted])
    train_tokens = int(lengths[~is_eval].sum())
    meta: dict[str, Any] = {
        "tokenizer_vocab_size": encoding["vocab_size"],
        "eos_id": encoding["eos_id"],
        "dtype": encoding["dtype"],
        "train_tokens": train_tokens,
        "eval_tokens": int(ends[-1]) - train_tokens,
        "train_documents": int((~is_eval).sum()),
        "eval_documents": int(is_eval.sum()),
        "text_bytes": text_bytes,
        "ends": encoding["ends"],
        "unigram_entropy": _entropy(counts[0]),
    }
    if len(weights):
        meta["weight_sum"] = float(weights[~is_eval].astype(np.float64).sum())
    if masked:
        meta["trained_tokens"] = int(counts[0].sum())
    if rate is not None:
        meta["entropy_rate"] = rate.stream
        meta["entropy_rate_in_documents"] = rate.in_documents
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def empty_text(section: DataSection) -> DataError:
    """The error for a source without any text."""
    remedy = ("data.source", "a text that is not empty")
    return DataError.of("data.source", section.source, "every document is empty", remedy)


def document_ends(shards: Sequence[TokenShard]) -> NDArray[np.int64]:
    """Return where each document ends in the stream of all shards. One may begin in a shard and end in a later one."""
    lengths = [np.empty(0, dtype=np.int64)]
    unfinished = 0
    for shard in shards:
        lengths.append(shard.lengths())
        if len(lengths[-1]):
            lengths[-1][0] += unfinished
            unfinished = 0
        unfinished += shard.counts.unfinished
    documents = np.concatenate(lengths)
    return np.cumsum(documents[documents > 0])


def _document_weights(shards: Sequence[TokenShard]) -> NDArray[np.float32]:
    """Return the weight of each document that has tokens; empty where rows have none."""
    parts = [np.empty(0, dtype=np.float32)]
    for shard in shards:
        weights = shard.weights()
        if len(weights):
            parts.append(weights[shard.lengths() > 0])
    return np.concatenate(parts)


def choose_validation(ends: NDArray[np.int64], fraction: float, *, name: str, whole: bool = False) -> Segments:
    """Split the stream into segments, and choose those of the validation split.

    `ends` are the ends of the documents; `whole`: none of them is ever split. At least the tokens of one block are held
    out, and never everything. Raises DataError if the corpus (`name`) has too few tokens for that.
    """
    total = int(ends[-1])
    if fraction == 0:
        return ends, np.zeros(len(ends), dtype=np.bool_)
    if total < 2 * BLOCK_TOKENS:
        settings = (("data.eval_fraction", fraction), ("data.source", name))
        reason = f"it has {total:,} tokens, and {2 * BLOCK_TOKENS:,} are needed to hold out a part"
        raise DataError.between(settings, reason, "use more text", ("data.eval_fraction", 0))
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


def _write_splits(
    folder: Path, shards: Sequence[TokenShard], segments: Segments, *, vocab_size: int, masked: bool
) -> NDArray[np.int64]:
    """Write the tokens of both splits, and which are trained on; return how often each id is trained on, [2, v]."""
    ends, is_eval = segments
    last = np.flatnonzero(np.append(is_eval[1:] != is_eval[:-1], True))
    ends, is_eval = ends[last], is_eval[last]  # adjacent segments of one split together
    counts = np.zeros((len(_SPLITS), vocab_size), dtype=np.int64)
    position = 0
    with ExitStack() as stack:
        suffixes = (".bin", TRAINED_SUFFIX)[: 1 + masked]
        paths = [folder / f"{name}{suffix}" for suffix in suffixes for name in _SPLITS]
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for ids, trained in (block for shard in shards for block in shard.blocks()):
            first, stop = np.searchsorted(ends, (position, position + len(ids) - 1), side="right")
            edges = np.clip(ends[first : stop + 1], position, position + len(ids))
            held_out = np.repeat(is_eval[first : stop + 1], np.diff(edges, prepend=position))
            for split, wanted in enumerate((~held_out, held_out)):
                chosen = ids[wanted]
                chosen.tofile(files[split])
                if trained is not None and masked:
                    trained[wanted].tofile(files[split + len(_SPLITS)])
                    chosen = chosen[trained[wanted] == TRAINED]
                counts[split] += np.bincount(chosen, minlength=vocab_size)
            position += len(ids)
    return counts


def _entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of single tokens in nats, of those that are trained on: H = -sum p ln p, p = count / total."""
    shares = counts[counts > 0] / max(1, counts.sum())
    return max(0.0, float(-(shares * np.log(shares)).sum()))
