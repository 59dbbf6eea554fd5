"""Encoder: text to token ids, exactly as the tokenizer does, but faster where that is safe.

A byte-level BPE splits text into words by a regular expression and then encodes each word by itself. Words repeat, so a
cache from word to ids does most of the work: about three times the tokens per second of the tokenizer. It is used for
ASCII text only, where Python's `re` and the tokenizer's own expression agree (no Unicode tables involved); only for
tokenizers whose split is one of those in `_ASCII_WORDS`; and only after both gave the same ids on `_probe`, which has
every triple of character classes. Everything else is encoded by the tokenizer.
"""

import json
import re
from collections.abc import Iterable
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

# GPT-2's split, which is built into `ByteLevel(use_regex=True)`, and those of GPT-4 / Llama 3 and of Qwen 2, each with
# its equivalent for ASCII.
_GPT2 = "byte-level"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_WORDS = {
    _GPT2: r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}": (
        rf"{_CONTRACTIONS}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{{1,3}}| ?[^\sA-Za-z0-9]+[\r\n]*|{_SPACES}"
    ),
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}": (
        rf"{_CONTRACTIONS}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|{_SPACES}"
    ),
}
# In all of these a single newline between two visible characters ends a word in any context. (The last of several does
# not: `\s+(?!\S)` looks ahead, and takes one newline less if a visible character follows.)
_LINES = re.compile(r"(?<=\S\n)(?=[!-~])")

_CACHE_ENTRIES = 200_000
_LONGEST_WORD = 64


def load_encoder(tokenizer_dir: Path, dtype: str, *, split_special_tokens: bool) -> "Encoder":
    """Choose the fastest exact encoder for the tokenizer saved in `tokenizer_dir`."""
    file = tokenizer_dir / "tokenizer.json"
    if not file.is_file():
        return SlowEncoder(tokenizer_dir, dtype)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = split_special_tokens
    plain = PlainEncoder(tokenizer, dtype)
    words = _ascii_words(json.loads(file.read_text(encoding="utf-8")))
    if words is None:
        return plain
    fast = CachedEncoder(plain, words)
    return fast if fast.encode([_probe()]) == plain.encode([_probe()]) else plain


class SlowEncoder:
    """Encodes with tokenizers that have no tokenizer.json: it calls transformers."""

    def __init__(self, tokenizer_dir: Path, dtype: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        self._dtype = dtype

    def encode(self, texts: list[str]) -> list[bytes]:
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [_raw(ids, self._dtype) for ids in encoded["input_ids"]]


class PlainEncoder:
    """Calls `tokenizers`, without offsets."""

    def __init__(self, tokenizer: Tokenizer, dtype: str) -> None:
        self.tokenizer = tokenizer
        self.dtype = dtype

    def encode(self, texts: list[str]) -> list[bytes]:
        return [
            _raw(encoding.ids, self.dtype)
            for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]


class WordCache(dict[str, bytes]):
    """Maps words to raw ids; filled on demand and bounded."""

    def __init__(self, plain: PlainEncoder) -> None:
        super().__init__()
        # The same model without any splitting: the input is one word.
        self._one_word = Tokenizer(plain.tokenizer.model)
        self._one_word.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._dtype = plain.dtype

    def __missing__(self, word: str) -> bytes:
        ids = _raw(self._one_word.encode(word, add_special_tokens=False).ids, self._dtype)
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _CACHE_ENTRIES:
                self.clear()
            self[word] = ids
        return ids


class CachedEncoder:
    """Looks ASCII words up in a cache and encodes everything else with the tokenizer."""

    def __init__(self, plain: PlainEncoder, words: re.Pattern[str]) -> None:
        self._plain = plain
        self._split = words.findall
        self._ids = WordCache(plain).__getitem__
        added = sorted(token.content for token in plain.tokenizer.get_added_tokens_decoder().values())
        self._added = re.compile("|".join(map(re.escape, added))) if added else None

    def encode(self, texts: list[str]) -> list[bytes]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> bytes:
        if self._added is not None and self._added.search(text):
            return self._plain.encode([text])[0]
        if text.isascii():
            return self._ascii(text)
        # Lines are independent of each other, see _LINES: only those with other characters need the tokenizer.
        runs = [(ascii, "".join(lines)) for ascii, lines in groupby(_LINES.split(text), key=str.isascii)]
        plain = iter(self._plain.encode([run for ascii, run in runs if not ascii]))
        return b"".join(self._ascii(run) if ascii else next(plain) for ascii, run in runs)

    def _ascii(self, text: str) -> bytes:
        return b"".join(map(self._ids, self._split(text)))


Encoder = SlowEncoder | PlainEncoder | CachedEncoder
"""`encode` returns the ids of each text, little-endian, as raw bytes; without special tokens around the text."""


def _ascii_words(spec: dict[str, Any]) -> re.Pattern[str] | None:
    """Return the expression that splits ASCII text into words for the tokenizer.json `spec`; None if unknown."""
    model = spec["model"]
    if model.get("type") != "BPE" or model.get("dropout") or (spec["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    match spec["pre_tokenizer"]:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            split = _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(split)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            pass
        case _:
            return None
    words = _ASCII_WORDS.get(split)
    return re.compile(words, re.ASCII) if words else None


def _probe() -> str:
    classes = ("a", "Z", "ll", "S", "7", " ", "\n", "\r", "\t", "\x0b", "\x1c", "\0", "'", "_", "!")
    return "".join(map("".join, product(classes, repeat=3)))


def _raw(ids: Iterable[int], dtype: str) -> bytes:
    return np.array(ids, dtype=dtype).tobytes()
