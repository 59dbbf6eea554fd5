"""Token rows: what a row of data.format=pretokenized holds: ids, and which of them its labels train on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import DataError
from toolkit.units import with_article

if TYPE_CHECKING:
    import pyarrow

COLUMNS = ("input_ids", "labels")
NOT_TRAINED = -100
"""The label of a token that is not trained on, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """The tokens of one document."""

    ids: NDArray[np.int64]
    trained: NDArray[np.uint8]
    """Whether each is trained on."""
    at: Callable[[], str]
    """A function that says where the row is, for messages."""

    def __bool__(self) -> bool:
        return len(self.ids) > 0

    def check(self, vocab_size: int) -> None:
        """Raise DataError for an id that the tokenizer does not have."""
        if self and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < vocab_size:
            outside = int(self.ids[(self.ids < 0) | (self.ids >= vocab_size)][0])
            reason = f"the id {outside} is not one of the tokenizer's, which are 0 to {vocab_size - 1:,}"
            raise DataError(f"{self.at()}: {reason}. Set data.tokenizer to the one that made the ids.")


def read_tokens(row: Mapping[str, Any], at: Callable[[], str]) -> TokenRow:
    """Read `input_ids`, and `labels` if there are some. Raises DataError for anything but integers that agree."""
    ids = _integers(row["input_ids"], "input_ids", at)
    labels = row.get("labels")
    trained = np.ones(len(ids), dtype=np.uint8)
    if labels is not None:
        labels = _integers(labels, "labels", at)
        if len(labels) != len(ids):
            raise DataError(f"{at()}: {len(labels):,} labels for {len(ids):,} input_ids. Write one for each.")
        trained = (labels != NOT_TRAINED).astype(np.uint8)
        if len(wrong := np.flatnonzero((labels != ids) & (trained > 0))):
            place = int(wrong[0])
            reason = f"labels[{place}] is {labels[place]}, and input_ids[{place}] is {ids[place]}"
            advice = f"A label is the id at its own place, or {NOT_TRAINED} where it is not trained on"
            raise DataError(f"{at()}: {reason}. {advice}.")
    return TokenRow(ids=ids, trained=trained, at=at)


def table_rows(table: "pyarrow.RecordBatch | pyarrow.Table") -> list[dict[str, Any]]:
    """Take the rows out of a table, with views of its integers: no id becomes a Python object."""
    columns = {name: [_values(cell) for cell in table.column(name)] for name in table.schema.names}
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _values(cell: Any) -> Any:
    import pyarrow

    values = getattr(cell, "values", None)
    if values is None or values.null_count or not pyarrow.types.is_integer(values.type):
        return cell.as_py()
    return values.to_numpy()


def _integers(value: Any, field: str, at: Callable[[], str]) -> NDArray[np.int64]:
    if isinstance(value, np.ndarray):
        return value.astype(np.int64, copy=False)
    if not isinstance(value, list):
        raise DataError(f"{at()}: {field} is {with_article(type(value).__name__)}. It must be a list of integers.")
    if wrong := {type(entry).__name__ for entry in value} - {"int"}:
        raise DataError(f"{at()}: {field} has a {min(wrong)} in it. It must be a list of integers.")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise DataError(f"{at()}: {field} has a number of more than 64 bits. Ids are smaller.") from None
