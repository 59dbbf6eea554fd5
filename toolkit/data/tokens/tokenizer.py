"""The tokenizer: an existing one, or a byte-level BPE trained on the corpus (`bpe-N`)."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from toolkit.config.data_section import DataSection, Format
from toolkit.data.documents.sources import Source
from toolkit.data.tokens.chat_template import check_tokenizer
from toolkit.data.tokens.tokenizer_pool import tokenizers_parallelism_off
from toolkit.errors import DataError
from toolkit.files import expanded, reason_of
from toolkit.units import LARGEST_COUNT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
# Text that a bpe-N is trained on, spread over the corpus: more changes few merges, and costs seconds per mebibyte.
TRAINING_BYTES = 16 << 20
# 256 bytes and the end-of-text token.
_FIELD = "data.tokenizer"
_MIN_ENTRIES = 257
# Saving a tokenizer takes time and memory of its largest id, whether or not the ids before it are in use.
_MOST_ENTRIES = 1 << 24
_TRAINER_VERSION = 1

_TOKENIZER_FILES = ("tokenizer*.json", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.bpe", "tekken.json")
# What save_pretrained writes about where the tokenizer came from.
_PROVENANCE = ("is_local", "local_files_only", "name_or_path")


def load_or_train(section: DataSection, source: Source) -> "PreTrainedTokenizerBase":
    """Load or train the tokenizer of `section`. Raises DataError if there is none, or it has no end-of-text token."""
    entries = bpe_entries(section)
    if entries is None:
        return load(section)
    return train(entries, source, row_format=section.format)


def bpe_entries(section: DataSection) -> int | None:
    """Return N of `bpe-N`, None for other tokenizers. Raises DataError if N is out of range."""
    match = re.fullmatch(r"bpe-([0-9]+)", section.tokenizer)
    if match is None:
        return None
    entries = int(match[1])
    if entries < _MIN_ENTRIES:
        reason = f"a byte-level BPE has at least {_MIN_ENTRIES} entries (256 bytes and {END_OF_TEXT})"
        raise DataError.of(_FIELD, section.tokenizer, reason, (_FIELD, f"bpe-{_MIN_ENTRIES} or more"))
    if entries > LARGEST_COUNT:
        reason = f"a tokenizer has {LARGEST_COUNT} entries at most"
        raise DataError.of(_FIELD, section.tokenizer, reason, "write a smaller N in bpe-N")
    return entries


def load(section: DataSection) -> "PreTrainedTokenizerBase":
    """Load a tokenizer directory or hub name through AutoTokenizer, without running code that comes with it."""
    from transformers import AutoTokenizer

    name = section.tokenizer
    path = expanded(name)
    if not path.exists() and name.startswith((".", "/", "~")):
        reason = "there is no such directory"
        raise DataError.of(_FIELD, name, reason, f"check the path (it is relative to {os.getcwd()})")
    if path.exists() and not path.is_dir():
        advice = "give the directory of tokenizer.save_pretrained, a hub name, or bpe-N"
        raise DataError.of(_FIELD, name, "it is not a directory", advice)
    if path.is_dir() and not any(next(path.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        advice = "give one made by tokenizer.save_pretrained, or bpe-N"
        raise DataError.of(_FIELD, name, "the directory has no tokenizer files", advice)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path) if path.is_dir() else name, trust_remote_code=False
        )
    except Exception as error:
        advice = "give a tokenizer directory, a hub name, or bpe-N"
        raise DataError.of(_FIELD, name, f"it could not be loaded ({reason_of(error)})", advice) from None
    if tokenizer.eos_token_id is None:
        reason = "it has no end-of-text token (eos_token), which separates documents"
        raise DataError.of(_FIELD, name, reason, "set tokenizer.eos_token and save it again, or use bpe-N")
    largest = max(tokenizer.get_vocab().values())
    if largest >= _MOST_ENTRIES:
        reason = f"it has the id {largest}, and ids below {_MOST_ENTRIES} are allowed"
        raise DataError.of(_FIELD, name, reason, "repair its tokenizer.json, or use bpe-N")
    if section.format not in ("text", "pretokenized"):
        check_tokenizer(section, tokenizer)
    return tokenizer


def train(entries: int, source: Source, *, row_format: Format = "text") -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE of `entries` entries, fewer if the text has too few pairs. Deterministic."""
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with tokenizers_parallelism_off():
        bpe.train_from_iterator(sample_texts(source, row_format=row_format), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        # Decoding restores every byte.
        clean_up_tokenization_spaces=False,
    )


def sample_texts(source: Source, limit_bytes: int = TRAINING_BYTES, *, row_format: Format = "text") -> Iterator[str]:
    """Yield the texts of every k-th chunk of the corpus, with k such that the sum is about `limit_bytes`."""
    every = max(1, -(-source.size_bytes // limit_bytes))
    remaining = limit_bytes
    for number, chunk in enumerate(source.chunks()):
        if number % every:
            continue
        for text in chunk.documents():
            if remaining <= 0:
                return
            assert isinstance(text, str)  # ids are not for a tokenizer that is trained here
            for part in _texts(text, row_format):
                remaining -= len(part)
                yield part


def _texts(document: str, row_format: Format) -> list[str]:
    """Return the texts that a document is tokenized as; none where it is messages, which another place refuses."""
    if row_format == "text":
        return [document]
    content = json.loads(document)
    completions = [content[field] for field in ("completion", "chosen", "rejected") if field in content]
    if not all(isinstance(part, str) for part in (content["prompt"], *completions)):
        return []
    return [content["prompt"] + completion for completion in completions]


def identity(section: DataSection, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Identify what the ids depend on besides the corpus: the files of a loaded tokenizer, the training of a BPE."""
    if tokenizer is None:
        return f"{section.tokenizer} trainer {_TRAINER_VERSION} tokenizers {tokenizers.__version__}"
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return digest(Path(folder))


def digest(folder: Path) -> str:
    """Identify a tokenizer by the files of save_pretrained, without where it came from."""
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            hasher.update(f"{path.name}\0".encode() + _content(path) + b"\0")
    return hasher.hexdigest()


def open_saved(folder: Path) -> "PreTrainedTokenizerBase":
    """Load what `save_pretrained` wrote."""
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


def _content(path: Path) -> bytes:
    if path.name != "tokenizer_config.json":
        return path.read_bytes()
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return json.dumps({key: config[key] for key in sorted(config) if key not in _PROVENANCE}).encode()
