"""Rows of preference data: pairs of a chosen and a rejected completion, and completions with a label.

A completion and its prompt are texts, or lists of messages. The prompt of a pair may be implicit, as in the datasets of
Anthropic's HH and of UltraFeedback: it is then what the two completions begin with in common, as TRL takes it.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.config.data_section import Format
from toolkit.data.documents.row_fields import At, missing_field, read_message, read_tools
from toolkit.errors import DataError
from toolkit.units import with_article

PAIR_COLUMNS = ("chosen", "rejected", "prompt", "tools")
UNPAIRED_COLUMNS = ("completion", "label", "prompt", "tools")


def read_pair(row: Mapping[str, Any], at: At) -> dict[str, Any]:
    """Return `prompt`, `chosen` and `rejected` of a row, and `tools` if it has some. Raises DataError."""
    chosen = _completion(row, "chosen", "preference", at)
    rejected = _completion(row, "rejected", "preference", at)
    if type(chosen) is not type(rejected):
        raise DataError(f"{at()}: chosen and rejected are not both texts or both lists of messages. Repair the row.")
    prompt = row.get("prompt")
    if isinstance(prompt, str) and not isinstance(chosen, str):
        prompt = None  # UltraFeedback repeats the first message as a text
    if prompt is None:
        shared = _shared(chosen, rejected)
        document = {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    else:
        document = {"prompt": _prompt(prompt, chosen, at), "chosen": chosen, "rejected": rejected}
    for field in ("chosen", "rejected"):
        _check_answer(document[field], field, at)
    return document | read_tools(row, at)


def read_unpaired(row: Mapping[str, Any], at: At) -> dict[str, Any]:
    """Return `prompt`, `completion` and `label` of a row, and `tools` if it has some. Raises DataError."""
    completion = _completion(row, "completion", "unpaired", at)
    if row.get("prompt") is None:
        raise missing_field("prompt", "unpaired", at)
    label = row.get("label")
    if label is None:
        raise missing_field("label", "unpaired", at)
    if label not in (True, False):
        raise DataError(f"{at()}: label is {label!r}. Write true for a desirable completion and false for another.")
    _check_answer(completion, "completion", at)
    prompt = _prompt(row["prompt"], completion, at)
    return {"prompt": prompt, "completion": completion, "label": bool(label)} | read_tools(row, at)


def _completion(row: Mapping[str, Any], field: str, row_format: Format, at: At) -> Any:
    value = row.get(field)
    if value is None:
        raise missing_field(field, row_format, at)
    return _text_or_messages(value, field, at)


def _text_or_messages(value: Any, field: str, at: At) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        kind = with_article(type(value).__name__)
        raise DataError(f"{at()}: {field} is {kind}. Write a text, or a list of messages with role and content.")
    return [read_message(turn, f"{field}[{number}]", at) for number, turn in enumerate(value)]


def _prompt(value: Any, completion: Any, at: At) -> Any:
    prompt = _text_or_messages(value, "prompt", at)
    if type(prompt) is not type(completion):
        raise DataError(f"{at()}: prompt and completion are not both texts or both lists of messages. Repair the row.")
    return prompt


def _shared(chosen: Any, rejected: Any) -> int:
    """Count the characters or messages that both begin with. Each keeps one; a space before a word stays with it."""
    longest = min(len(chosen), len(rejected)) - 1
    count = 0
    while count < longest and chosen[count] == rejected[count]:
        count += 1
    return count - 1 if count and chosen[count - 1] == " " else count


def _check_answer(completion: Any, field: str, at: At) -> None:
    """Raise DataError for a completion without anything to train on."""
    if isinstance(completion, str):
        is_empty = not completion.strip()
    else:
        answers = [turn for turn in completion if turn["role"] == "assistant"]
        is_empty = not any(turn.get("tool_calls") or (turn["content"] or "").strip() for turn in answers)
    if is_empty:
        raise DataError(f"{at()}: {field} is empty: it has no answer to train on. Remove the row.")
