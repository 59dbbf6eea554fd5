"""Corpora: the token caches of a recipe, one for each source and one for each validation set of its own.

Each text has the cache that it would have alone, so that a mixture can get another source, or other weights, and no
text is tokenized again. All have one tokenizer. A `bpe-N` is trained on all sources together, in a folder beside the
caches; with other sources it is another tokenizer, and so are the caches.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from toolkit.config.data_section import CorpusSection, DataSection
from toolkit.config.megatron_prefix import megatron_prefix
from toolkit.config.mixture_rules import about
from toolkit.data.documents.markov import EntropyRate
from toolkit.data.documents.part import WHOLE, SourcePart
from toolkit.data.documents.sources import Source, open_source
from toolkit.data.documents.text_chunks import TextChunk
from toolkit.data.documents.validation_split import validation_split
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.data.tokens.build_cache import empty_text
from toolkit.data.tokens.token_cache import Corpus, Split, TokenCorpus, prepare
from toolkit.errors import DataError
from toolkit.files import cache_folder, expanded, published

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OpenText(NamedTuple):
    """A tokenized text, and the section that says how it becomes samples."""

    section: DataSection
    corpus: TokenCorpus
    split: Split = "train"


@dataclass(frozen=True, kw_only=True)
class Corpora:
    """The tokenized texts that a recipe trains on and is validated with.

    `sources` and `validation` are by name; a single source and the part that it holds out have the empty name.
    """

    sources: Mapping[str, OpenText]
    validation: Mapping[str, OpenText]
    finds_validation: bool = False
    """Whether a dataset's `validation` split was found."""

    @classmethod
    def of(cls, section: DataSection, corpus: TokenCorpus) -> Self:
        """A single source, with what it holds out for validation."""
        return cls(sources={"": OpenText(section, corpus)}, validation={"": OpenText(section, corpus, "eval")})

    @property
    def first(self) -> TokenCorpus:
        """The corpus of the first source: all have the same tokenizer."""
        return next(iter(self.sources.values())).corpus

    @property
    def contents(self) -> str:
        """Identifies the training text: equal for equal texts and tokenizer, in any directory."""
        return " ".join(text.corpus.contents for text in self.sources.values())

    @property
    def all_contents(self) -> str:
        """Identifies all texts, of validation sets too."""
        return " ".join([self.contents, *(text.corpus.contents for text in self.validation.values())])

    @property
    def tokenizer_vocab_size(self) -> int:
        """The largest token id + 1."""
        return self.first.tokenizer_vocab_size

    @property
    def eos_id(self) -> int:
        """The token after each document."""
        return self.first.eos_id

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.first.tokenizer()

    @property
    def train_tokens(self) -> int:
        """Training tokens of all sources."""
        return sum(text.corpus.train_tokens for text in self.sources.values())

    @property
    def eval_tokens(self) -> int:
        """Tokens of all validation sets."""
        return sum(text.corpus.token_count(text.split) for text in self.validation.values())

    @property
    def leaves_tokens_out(self) -> bool:
        """Whether some tokens are not trained on, and samples hold whole documents."""
        return any(text.corpus.trained_tokens is not None for text in self.sources.values())

    @property
    def unigram_entropy(self) -> float | None:
        """The loss of a model that knows the token frequencies of a single source only."""
        return self.first.unigram_entropy if len(self.sources) == 1 else None

    def loss_floor(self, data: DataSection) -> float | None:
        """The lowest expected loss on unseen text, if known, of a single source."""
        return self.first.loss_floor(data) if len(self.sources) == 1 else None


class NamedSource(NamedTuple):
    """A source to be tokenized."""

    name: str
    section: DataSection
    held_out: DataSection | None
    """The dataset's `validation` split, where there is one."""
    place: str
    corpus_section: CorpusSection | None
    """Section of the recipe about the source; None for `data.source`."""


def named_sources(data: DataSection, *, progress: bool) -> list[NamedSource]:
    """Find the sources of a recipe and their tokenizer: a `bpe-N` for several is trained. Raises DataError."""
    if data.sources is not None and tokenizers.bpe_entries(data) is not None:
        data = data.model_copy(update={"tokenizer": _train_for_all(data, progress=progress)})
    sources = []
    for index, (name, section) in enumerate(zip(data.labels or ("",), data.parts, strict=True)):
        place = data.place(index)
        corpus_section = data.sources[index] if data.sources else None
        with fields_of(place, corpus_section):
            held_out = None if data.validation else validation_split(section)
        if held_out is not None:
            section = section.model_copy(update={"eval_fraction": 0.0})
        sources.append(NamedSource(name, section, held_out, place, corpus_section))
    return sources


def prepare_all(data: DataSection, *, progress: bool, validates: bool = True) -> Corpora:
    """Open the token caches of all sources and validation sets; build first what is missing.

    Validation sets that are texts of their own are left out unless the run `validates`. What is wrong with any of the
    texts is found before the first is tokenized, as far as it shows without reading it. Raises DataError or RunError.
    """
    _check_texts(data, validates=validates)
    sources: dict[str, OpenText] = {}
    validation: dict[str, OpenText] = {}
    named = named_sources(data, progress=progress)
    for name, section, held_out, place, corpus_section in named:
        with fields_of(place, corpus_section):
            corpus = prepare(section, progress=progress)
            sources[name] = OpenText(section, corpus)
            if held_out is None and corpus.eval_tokens:
                validation[name] = OpenText(section, corpus, "eval")
            elif held_out is not None and validates:
                held_out = _with_tokenizer(held_out, corpus)
                validation[name] = OpenText(held_out, prepare(held_out, progress=progress))
    for index, text in enumerate(data.validation or () if validates else ()):
        with fields_of(f"data.validation[{index}]", text):
            section = _with_tokenizer(data.of(text), next(iter(sources.values())).corpus)
            validation[text.label] = OpenText(section, prepare(section, progress=progress))
    finds_validation = any(source.held_out is not None for source in named)
    return Corpora(sources=sources, validation=validation, finds_validation=finds_validation)


def _check_texts(data: DataSection, *, validates: bool) -> None:
    """Raise DataError for a text that is missing, has a first row that is not of its format, or does not fit its
    tokenizer: tokenizing those before it may take hours."""
    texts: list[tuple[str, CorpusSection | None, DataSection]] = []
    for index, section in enumerate(data.parts):
        texts.append((data.place(index), data.sources[index] if data.sources else None, section))
    for index, text in enumerate(data.validation or () if validates else ()):
        texts.append((f"data.validation[{index}]", text, data.of(text)))
    if len(texts) == 1:
        return  # it is opened now in any case
    for place, corpus_section, section in texts:
        with fields_of(place, corpus_section):
            _check_text(section)


def _check_text(section: DataSection) -> None:
    trains_tokenizer = tokenizers.bpe_entries(section) is not None
    if megatron_prefix(section.source) is not None:
        if not trains_tokenizer:
            prepare(section, progress=False)  # is opened where it is
        return
    if trains_tokenizer:
        source = open_source(section)
    else:
        corpus = Corpus.of(section)
        if corpus.cache.is_dir():
            return
        source = corpus.source
    chunk = next(iter(source.chunks()), None)
    if chunk is None:
        raise empty_text(section)
    next(iter(chunk.documents()), None)


def _with_tokenizer(section: DataSection, corpus: TokenCorpus) -> DataSection:
    """The section with the tokenizer of a corpus, where it would otherwise train one of its own."""
    if tokenizers.bpe_entries(section) is None:
        return section
    return section.model_copy(update={"tokenizer": str(corpus.tokenizer_dir)})


@contextmanager
def fields_of(place: str, text: CorpusSection | None) -> Iterator[None]:
    """Let an error about `data.source` name the field of the source or validation set that it is about."""
    try:
        yield
    except DataError as error:
        if text is None or not error.refusals:
            raise
        raise DataError([about(refusal, place, text) for refusal in error.refusals]) from None


class _AllSources:
    """The documents of all sources, one after the other."""

    def __init__(self, data: DataSection) -> None:
        self._sources: list[Source] = []
        for index, text in enumerate(data.sources or ()):
            with fields_of(data.place(index), text):
                self._sources.append(open_source(data.of(text)))
        self.size_bytes = sum(source.size_bytes for source in self._sources)
        self.fingerprint = " ".join(source.fingerprint for source in self._sources)
        self.entropy_rate: EntropyRate | None = None

    def chunks(self, part: SourcePart = WHOLE) -> Iterator[TextChunk]:
        for source in self._sources:
            yield from source.chunks(part)


def _train_for_all(data: DataSection, *, progress: bool) -> str:
    """Train a BPE on all sources, once for all ranks; return its directory."""
    sources = _AllSources(data)
    facts = [sources.fingerprint, tokenizers.identity(data, None), [part.text_field for part in data.parts]]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    cache_dir = expanded(data.cache_dir) if data.cache_dir else cache_folder()
    folder = cache_dir / f"tokenizer-{data.tokenizer}-{digest}"
    corpus = Corpus(section=data, source=sources, loaded=None, cache=folder)
    if not folder.is_dir():
        with corpus.locked(folder, progress=progress):
            if not folder.is_dir():
                with published(folder) as temporary:
                    tokenizers.load_or_train(data, sources).save_pretrained(temporary)
    return str(folder)
