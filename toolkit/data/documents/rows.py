"""Rows: what a line of JSONL or a row of a table must have in each `data.format`, and the document that it becomes.

A text is its own document. A chat becomes JSON with `messages` in the roles of chat templates, and `tools` if it has
some; a prompt becomes JSON with `prompt` and `completion`, and preference data what `preference_rows.py` reads. Rows of
ids become a `TokenRow`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from toolkit.config.data_section import DataSection, Format
from toolkit.data.documents import preference_rows, token_rows
from toolkit.data.documents.row_fields import At, missing_field, read_message, read_tools
from toolkit.errors import DataError
from toolkit.units import with_article

if TYPE_CHECKING:
    import pyarrow


class WeightedText(str):
    """The document of a row that has a weight."""

    weight: float

    def __new__(cls, text: str, weight: float) -> "WeightedText":
        made = super().__new__(cls, text)
        made.weight = weight
        return made

    def __getnewargs__(self) -> tuple[str, float]:  # type: ignore[override]
        return str(self), self.weight


Document = str | token_rows.TokenRow
"""A WeightedText where rows have weights."""

_COLUMNS = {
    "chat": ("messages", "conversations", "system", "tools"),
    "prompt_completion": ("prompt", "completion"),
    "pretokenized": token_rows.COLUMNS,
    "preference": preference_rows.PAIR_COLUMNS,
    "unpaired": preference_rows.UNPAIRED_COLUMNS,
}
_NEEDED = {"chat": 2, "prompt_completion": 2, "pretokenized": 1, "preference": 2}
"""A table must have one of this many first columns."""


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """Reads the document of a row."""

    format: Format = "text"
    text_field: str = "text"
    weight_field: str | None = None

    @classmethod
    def of(cls, section: DataSection) -> Self:
        return cls(format=section.format, text_field=section.text_field, weight_field=section.weight_field)

    def columns(self, there: Iterable[str], at: str) -> list[str]:
        """Choose the columns of a table to read. Raises DataError if those that matter are missing."""
        there = list(there)
        if self.format == "text" and self.text_field not in there:
            raise missing_text_field(at, self.text_field, there)
        wanted = _COLUMNS.get(self.format, (self.text_field,))
        needed = wanted[: _NEEDED.get(self.format, 1)]
        if not set(needed) & set(there):
            raise missing_field(" or ".join(needed), self.format, lambda: at)
        if self.weight_field is not None and self.weight_field not in there:
            raise _missing_weight(self.weight_field, lambda: at)
        weight = () if self.weight_field is None else (self.weight_field,)
        return [name for name in dict.fromkeys((*wanted, *weight)) if name in there]

    def rows(self, table: "pyarrow.RecordBatch | pyarrow.Table") -> list[dict[str, Any]]:
        """The rows of a table that has the `columns`."""
        return token_rows.table_rows(table) if self.format == "pretokenized" else table.to_pylist()

    def read(self, row: Mapping[str, Any], at: At) -> Document | None:
        """Return the document; None for an empty text. Raises DataError for a row that is not of the format."""
        document = self._read(row, at)
        if self.weight_field is None or not isinstance(document, str):
            return document
        return WeightedText(document, _weight(row, self.weight_field, at))

    def _read(self, row: Mapping[str, Any], at: At) -> Document | None:
        if self.format == "text":
            if self.text_field not in row:
                raise missing_text_field(at(), self.text_field, row)
            return check_text(row[self.text_field], self.text_field, at=at)
        if self.format == "pretokenized":
            if row.get("input_ids") is None:
                raise missing_field("input_ids", self.format, at)
            return token_rows.read_tokens(row, at)
        return check_text(json.dumps(self._document(row, at), ensure_ascii=False), self.format, at=at)

    def _document(self, row: Mapping[str, Any], at: At) -> dict[str, Any]:
        if self.format == "chat":
            return _chat(row, at)
        if self.format == "preference":
            return preference_rows.read_pair(row, at)
        if self.format == "unpaired":
            return preference_rows.read_unpaired(row, at)
        return _prompt(row, at)


def _missing_weight(field: str, at: At) -> DataError:
    remedy = ("data.weight_field", "a column of numbers, or null")
    return DataError.of("data.weight_field", field, f"{at()} has no such field", remedy)


def _weight(row: Mapping[str, Any], field: str, at: At) -> float:
    """Return the weight of a row. Raises DataError unless it is a finite number of at least 0."""
    if field not in row:
        raise _missing_weight(field, at)
    weight = row[field]
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight < 0:
        raise DataError(f"{at()}: {field} is {weight!r}. A weight is a finite number of at least 0.")
    return float(weight)


def _chat(row: Mapping[str, Any], at: At) -> dict[str, Any]:
    field = "messages" if row.get("messages") is not None else "conversations"
    turns = row.get(field)
    if turns is None:
        raise missing_field("messages or conversations", "chat", at)
    if not isinstance(turns, list) or not turns:
        actual_type = "empty" if isinstance(turns, list) else f"{with_article(type(turns).__name__)}"
        raise DataError(f"{at()}: {field} is {actual_type}. A chat is a list of at least one turn.")
    messages = [read_message(turn, f"{field}[{number}]", at) for number, turn in enumerate(turns)]
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(f"{at()}: no turn is the assistant's, so nothing could be trained on. Remove the row.")
    system = row.get("system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, read_message({"role": "system", "content": system}, "system", at))
    return {"messages": messages} | read_tools(row, at)


def _prompt(row: Mapping[str, Any], at: At) -> dict[str, Any]:
    for field in ("prompt", "completion"):
        if row.get(field) is None:
            raise missing_field(field, "prompt_completion", at)
        if not isinstance(row[field], str):
            raise DataError(
                f"{at()}: {field} is {with_article(type(row[field]).__name__)}, not a text. See data.format=chat."
            )
    return {"prompt": row["prompt"], "completion": row["completion"]}


def check_text(value: object, text_field: str, *, at: At) -> str | None:
    """Return `value` if it can be tokenized; null is an empty document. Raises DataError for anything else."""
    if value is None:
        return None
    if not isinstance(value, str):
        reason = f"it is {with_article(type(value).__name__)} at {at()}, not a text"
        raise DataError.of("data.text_field", text_field, reason, ("data.text_field", "a column of texts"))
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{at()}: {text_field} has half a surrogate pair, which is not text. Repair that line."
            ) from None
    return value


def missing_text_field(at: str, text_field: str, columns: Iterable[str]) -> DataError:
    """Return the error for a missing text column."""
    there = " or ".join(map(str, columns))
    return DataError.of(
        "data.text_field", text_field, f"{at} has no such field", ("data.text_field", there or "another")
    )
