"""DocumentEnds: the tokens before and after the text of a document: data.bos and data.separator.

What a tokenizer itself puts before a text is not in its config in any one way; it is measured on a text.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from toolkit.config.data_section import PREFERENCE_FORMATS, DataSection
from toolkit.errors import DataError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS = "eos"
NONE = "none"
_PROBE = "Once upon a time"


@dataclass(frozen=True, kw_only=True)
class DocumentEnds:
    """Ids; those of a chat are in its template, and rows of ids have their own."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, section: DataSection, tokenizer: "PreTrainedTokenizerBase") -> Self:
        """Find them. Raises DataError for a token that the tokenizer does not have."""
        if section.format in ("chat", "pretokenized"):
            return cls()
        return cls(before=_before(section, tokenizer), after=_after(section, tokenizer))

    def describe(self, section: DataSection, tokenizer: "PreTrainedTokenizerBase") -> str:
        """Say what is before and after the text of each document."""
        if section.format in ("chat", "pretokenized"):
            return "as the chat template writes them" if section.format == "chat" else "ids as they are"
        before, after = (" ".join(tokenizer.convert_ids_to_tokens([*ids])) for ids in (self.before, self.after))
        texts = f"begin with {before or 'the text'}, end with {after or 'the text'}"
        is_mixed = section.format in PREFERENCE_FORMATS
        return f"texts {texts}; chats as the chat template writes them" if is_mixed else texts


def identity(section: DataSection, tokenizer: "PreTrainedTokenizerBase | None") -> list[object]:
    """Return what a cache depends on besides the text and the tokenizer; empty where a document only ends in the EOS.

    A BPE that is trained here puts nothing before a text.
    """
    if tokenizer is None:
        is_plain = section.bos != "always" and section.separator == EOS
        return [] if is_plain else [section.bos == "always", section.separator]
    ends = DocumentEnds.of(section, tokenizer)
    is_plain = not ends.before and ends.after in ((), (tokenizer.eos_token_id,)) and section.separator == EOS
    return [] if is_plain else [ends.before, ends.after]


def _before(section: DataSection, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    if section.bos == "never":
        return ()
    if section.bos == "always":
        if tokenizer.bos_token_id is None:
            advice = (("data.bos", "never"), "set tokenizer.bos_token and save it again")
            raise DataError.of("data.bos", section.bos, "the tokenizer has no BOS token (bos_token)", *advice)
        return (int(tokenizer.bos_token_id),)
    whole = tokenizer(_PROBE)["input_ids"]
    plain = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return tuple(map(int, whole[: next(starts, 0)]))


def _after(section: DataSection, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    if section.separator == NONE:
        return ()
    if section.separator == EOS:
        return (int(tokenizer.eos_token_id),)
    tokens = tokenizer.get_vocab()
    if section.separator not in tokens:
        hint = nearest(section.separator, tokenizer.get_added_vocab()).strip()
        advice = ("data.separator", "eos, none or a token of the tokenizer")
        raise DataError.of("data.separator", section.separator, "it is not a token of the tokenizer", advice, hint)
    return (int(tokens[section.separator]),)
