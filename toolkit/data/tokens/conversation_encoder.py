"""ConversationEncoder: chats, prompts with completions, and pairs of completions, to ids and a mask of the trained."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from toolkit.config.data_section import DroppedText, TrainOn
from toolkit.data.tokens.chat_template import ChatTemplate
from toolkit.data.tokens.sequence_marks import BEGINS, BEGINS_DESIRABLE, TRAINED
from toolkit.errors import DataError


@dataclass(frozen=True, kw_only=True)
class EncodedDocument:
    """The tokens of a document."""

    ids: bytes
    """Raw ids."""
    trained: NDArray[np.uint8]
    """Whether each is trained on, and where sequences begin (`sequence_marks.py`)."""
    text_bytes: int


class ConversationEncoder:
    """Encodes documents of `toolkit.data.documents.rows`."""

    def __init__(
        self,
        tokenizer_dir: Path,
        dtype: str,
        train_on: TrainOn,
        *,
        before: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
        stops: tuple[int, ...] = (),
        dropped_text: DroppedText = "refuse",
    ) -> None:
        """`before` and `after` are those of a prompt with its completion; a template has its own.

        `stops`: ids at which the model's generation stops, besides the end-of-text token.
        """
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer_dir)
        self._template = ChatTemplate(loaded, train_on, stops=stops, dropped_text=dropped_text)
        self._has_template = bool(loaded.chat_template)
        self._each = train_on == "each_assistant"
        self._before = list(before)
        self._after = list(after)
        self._dtype = dtype
        self._tokenizer: Tokenizer = loaded.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, document: str) -> list[EncodedDocument]:
        """Encode one document; a chat of which each turn is trained on becomes one up to each."""
        content: dict[str, Any] = json.loads(document)
        if "chosen" in content:
            return [self._encode_pair(content)]
        if "label" in content:
            mark = BEGINS_DESIRABLE if content["label"] else BEGINS
            return [self._encode_sequence(content, "completion", mark)]
        turns = content.get("messages", [])
        ends = [number + 1 for number, turn in enumerate(turns) if self._each and turn["role"] == "assistant"]
        parts = [content | {"messages": turns[:end]} for end in ends] or [content]
        return [self._encode(part) for part in parts]

    def _encode_pair(self, content: dict[str, Any]) -> EncodedDocument:
        """Encode both completions, each after the prompt, as one document."""
        parts = [self._encode_sequence(content, field, BEGINS) for field in ("chosen", "rejected")]
        return EncodedDocument(
            ids=b"".join(part.ids for part in parts),
            trained=np.concatenate([part.trained for part in parts]),
            text_bytes=sum(part.text_bytes for part in parts),
        )

    def _encode_sequence(self, content: dict[str, Any], field: str, mark: int) -> EncodedDocument:
        """Encode a completion after its prompt. Raises DataError where no token of it can be trained on."""
        prompt = content["prompt"]
        if isinstance(prompt, str):
            encoded = self._encode({"prompt": prompt, "completion": content[field]})
        elif not self._has_template:
            reason = "is a list of messages, and the tokenizer has no chat template"
            raise DataError(f"{field} {reason}. Use the tokenizer of the instruction-tuned model, or rows of texts.")
        else:
            chat = {"messages": prompt + content[field], "tools": content.get("tools")}
            encoded = self._encode(chat, first_turn=len(prompt))
        encoded.trained[0] = mark
        if not (encoded.trained == TRAINED).any():
            raise DataError(
                f"{field} has no token after its first one to train on. Give it a prompt, or remove the row."
            )
        return encoded

    def _encode(self, content: dict[str, Any], first_turn: int = 0) -> EncodedDocument:
        """A token is trained on if it has a character of a trained span."""
        if "messages" in content:
            text, spans = self._template.render(content, first_turn)
            opening, closing = [], []  # the template begins the first turn and ends the last one
        else:
            text = content["prompt"] + content["completion"]
            spans = [(len(content["prompt"]), len(text))]
            closing = self._after
            opening = self._before
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        # A tokenizer may trim white space off the beginning of a token's offsets, but not its end; one of spaces alone
        # then begins where it ends. If the text begins with it, both are 0.
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        ends = np.maximum(ends, 1)
        begins = np.minimum(begins, ends - 1)
        trained = np.zeros(len(ends), dtype=np.bool_)
        for start, end in spans:
            trained |= (start < ends) & (begins < end)
        if encoding.ids[: len(opening)] == opening:
            opening = []  # the prompt begins with the BOS itself
        trained = np.concatenate([np.zeros(len(opening)), trained, np.ones(len(closing))])
        return EncodedDocument(
            ids=np.array([*opening, *encoding.ids, *closing], dtype=self._dtype).tobytes(),
            trained=trained.astype(np.uint8),
            text_bytes=len(text.encode()),
        )
