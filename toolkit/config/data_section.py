"""DataSection: which text, how it becomes tokens, and how tokens become samples."""

from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import Field

from toolkit.config.section import Fraction, PositiveInt, Section, Text
from toolkit.errors import Setting
from toolkit.units import LARGEST_COUNT

Format = Literal["text", "chat", "prompt_completion", "pretokenized", "preference", "unpaired"]
TrainOn = Literal["assistant", "last_assistant", "each_assistant", "all"]
DroppedText = Literal["refuse", "allow"]
PREFERENCE_FORMATS: tuple[Format, ...] = ("preference", "unpaired")
"""Formats whose samples hold several sequences that a loss compares with each other."""
CONVERSATIONS: tuple[Format, ...] = ("chat", *PREFERENCE_FORMATS)
"""Formats that a chat template may render."""
_WHOLE_DOCUMENTS = (*CONVERSATIONS, "prompt_completion")


class CorpusSection(Section):
    """One text among several. A field that is null here has the value that it has in `data`."""

    path: Text
    """The text, in any form that `data.source` takes."""
    name: Text | None = None
    """The name in metrics; the default is the last part of the path."""
    subset: Text | None = None
    """Configuration name of a `datasets` dataset, for this text; null: `data.subset`."""
    split: Text | None = None
    """Split of a `datasets` dataset, for this text; null: `data.split`, or `validation` for a validation set."""
    stream_rows: PositiveInt | None = None
    """Rows to stream of a `datasets` dataset, for this text; null: `data.stream_rows`."""
    format: Format | None = None
    """Format of a row, for this text; null: `data.format`."""
    text_field: Text | None = None
    """The column or key that holds the text of a document, for this text; null: `data.text_field`."""
    train_on: TrainOn | None = None
    """Turns of a chat that are trained on, for this text; null: `data.train_on`."""
    dropped_text: DroppedText | None = None
    """Whether a chat may lose a part to its chat template, for this text; null: `data.dropped_text`."""

    @property
    def label(self) -> str:
        """The source's or validation set's name in metrics."""
        return self.name or PurePath(self.path).name or self.path


class SourceSection(CorpusSection):
    """One source of a mixture: what it is, and one of `weight`, `epochs` and `tokens`: how much of the run it is."""

    weight: Annotated[float, Field(ge=0)] | None = None
    """Share of the samples, relative to the other sources with a weight; 0 leaves it out."""
    epochs: Annotated[float, Field(gt=0, le=LARGEST_COUNT)] | None = None
    """Number of times that the run reads the source: its share follows from its size and the samples of the run."""
    tokens: Annotated[float, Field(ge=1, le=1e18)] | None = None
    """Tokens of the run that are from the source, not more than it has."""

    @property
    def budget(self) -> str | None:
        """The field that says how many samples of a run are from the source; None for a share of the rest."""
        if self.epochs is not None:
            return "epochs"
        return "tokens" if self.tokens is not None else None


class ValidationSection(CorpusSection):
    """One validation set: all of its text. `split` is `validation` unless it is given."""


class DataSection(Section):
    """The text, how it becomes tokens, and how tokens become samples."""

    source: Text = "stdlib"
    """`stdlib` (the source code of the running Python's standard library), `markov` (letters of a Markov chain of known
    entropy rate, for `bpe-257`), a file, directory, glob or URL of text, JSONL (plain, .gz, .zst), Parquet or Arrow, a
    saved dataset, the prefix of a dataset of Megatron-LM, or the name of a dataset for `datasets.load_dataset`."""
    sources: tuple[SourceSection, ...] | None = None
    """A mixture, instead of `source`: texts, each with a weight, a number of epochs or a number of tokens. The other
    fields of `data` hold for each of them that has no value of its own."""
    validation: tuple[ValidationSection, ...] | None = None
    """Validation sets, each with a loss of its own; nothing of the training text is held out then. The default is the
    `validation` split of a dataset that has one, else `eval_fraction` of the text."""
    subset: Text | None = None
    """Configuration name of a `datasets` dataset."""
    split: Text = "train"
    """Split of a `datasets` dataset."""
    stream_rows: PositiveInt | None = None
    """Number of first rows of a named `datasets` dataset that are read in its streaming mode, so that no more of it is
    downloaded and none of it is stored but its tokens; null: all rows, which `datasets` downloads first."""
    format: Format = "text"
    """Content of a row. `text`: a text. `chat`: a conversation (`messages` with role and content, or ShareGPT's
    `conversations`), rendered by the tokenizer's chat template. `prompt_completion`: the texts `prompt` and
    `completion`; the completion and its end-of-text token are trained on. `pretokenized`: `input_ids` of `tokenizer`,
    which are taken as they are, and maybe `labels`, -100 where a token is not trained on. `preference`: `prompt`,
    `chosen` and `rejected`, texts or lists of messages; a prompt that is left out is what both begin with. `unpaired`:
    `prompt`, `completion` and `label`, which is true for desirable completions. These need a `train.objective`."""
    train_on: TrainOn = "assistant"
    """Turns of a chat that are trained on. The others are read but are not targets. `each_assistant`: every turn of the
    assistant, as the last one of a document that ends with it, for templates that rewrite earlier turns."""
    dropped_text: DroppedText = "refuse"
    """Treatment of a chat of which the chat template leaves out a part: a content, a call of a tool, the tools, or a
    thought of a turn that is trained on. `refuse`: it is an error. `allow`: the rest is trained on."""
    text_field: Text = "text"
    """The column or key that holds the text of a document."""
    weight_field: Text | None = None
    """The column or key with the weight of a row, a number of at least 0: the losses of its targets, or the loss of the
    pair or completion, are multiplied by it; what they are divided by stays the same. null: all weigh 1. A validation
    loss weighs all alike."""
    tokenizer: Text = "bpe-4096"
    """A Hugging Face tokenizer directory or hub name; `bpe-N` trains a byte-level BPE of N entries on the corpus;
    `bpe-257` has no merges, and so a token for each byte."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Whether a text begins with the tokenizer's BOS token. `auto`: as the tokenizer itself does it. Chat templates
    write their own."""
    separator: Text = "eos"
    """What follows each text: `eos`, the tokenizer's end-of-text token; `none`; or another token by its text, such as
    `<|endoftext|>` where the end-of-text token is the one that ends a turn."""
    seq_len: PositiveInt
    """Tokens in a sample."""
    packing: Literal["packed", "padded"] = "packed"
    """`packed`: documents follow each other, each ended by `separator`. `padded`: a sample holds one document
    or a part of a longer one; the rest of the sample is padding and not trained on. With `format` chat or
    prompt_completion, `packed` fills samples with whole documents and implies `document_masking`, which
    pretokenized rows must set if their labels leave tokens out. Both completions of a pair are in one sample."""
    document_masking: bool = False
    """Packed documents do not attend to each other: each starts at position 0 and sees only itself."""
    overlong: Literal["truncate", "drop", "split"] = "truncate"
    """What becomes of a chat, a prompt with its completion or a row with labels that has more than seq_len + 1 tokens:
    its end is cut off, it is left out, or it becomes several samples. Of a pair that is longer than seq_len the ends of
    both completions are cut off, or it is left out."""
    eval_fraction: Fraction = 0.01
    """Share of the corpus held out for the validation loss, unless it has a `validation` split."""
    workers: PositiveInt | None = None
    """Processes that tokenize; the default is the number of cores of this machine."""
    cache_dir: Text | None = None
    """Directory for the token cache; the default is $DSTK_CACHE or ~/.cache/dstk."""

    def of(self, corpus: CorpusSection) -> Self:
        """The section of one source or validation set alone, as if it were `source`."""
        overrides = corpus.model_dump(exclude={"path", "name", "weight", "epochs", "tokens"}, exclude_none=True)
        if isinstance(corpus, ValidationSection):
            overrides = {"split": "validation", "eval_fraction": 0.0, "weight_field": None} | overrides
        return self.model_copy(update={"source": corpus.path, "sources": None, "validation": None} | overrides)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the sources of a mixture."""
        return tuple(source.label for source in self.sources or ())

    @property
    def parts(self) -> tuple[Self, ...]:
        """The section of each source. Validation sets leave nothing to hold out."""
        whole = self.model_copy(update={"validation": None, "eval_fraction": 0.0}) if self.validation else self
        return tuple(map(whole.of, self.sources)) if self.sources else (whole,)

    @staticmethod
    def place(index: int) -> str:
        """A source of a mixture, in messages."""
        return f"data.sources[{index}]"

    @property
    def masks_documents(self) -> bool:
        """Whether samples hold several documents that do not attend to each other."""
        if self.format in PREFERENCE_FORMATS:
            return True
        return self.packing == "packed" and (self.document_masking or self._conversation is not None)

    @property
    def masking(self) -> tuple[Setting, Setting]:
        """The setting that asks for document masking, and one that does without."""
        if self.format in PREFERENCE_FORMATS:
            return ("data.format", self.format), ("data.format", "chat")
        if self._conversation is not None:
            return self._conversation, ("data.packing", "padded")
        return ("data.document_masking", self.document_masking), ("data.document_masking", False)

    @property
    def _conversation(self) -> Setting | None:
        """The setting that makes conversations of one of the texts: packed, they do not attend to each other."""
        formats: list[tuple[str, str | None]] = []
        if self.sources is None:
            formats.append(("data.format", self.format))
        formats += [(f"{self.place(index)}.format", text.format) for index, text in enumerate(self.sources or ())]
        formats += [
            (f"data.validation[{index}].format", text.format) for index, text in enumerate(self.validation or ())
        ]
        settings = (("data.format", self.format) if value is None else (field, value) for field, value in formats)
        return next((setting for setting in settings if setting[1] in _WHOLE_DOCUMENTS), None)
