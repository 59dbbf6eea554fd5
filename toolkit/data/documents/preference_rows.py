"""Rows of preference data: pairs of a chosen and a rejected completion, and completions with a label.

A completion and its prompt are texts, or lists of messages. The prompt of a pair may be implicit, as in the datasets of
Anthropic's HH and of UltraFeedback: it is then what the two completions begin with in common, as TRL takes it. Names of
columns are those of TRL, and those of Argilla's and Intel's datasets. A row whose prompt is not known is refused.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.config.data_section import Format
from toolkit.data.documents.row_fields import At, missing_field, read_message, read_tools
from toolkit.errors import DataError
from toolkit.units import with_article

_PROMPTS = ("prompt", "input", "question", "instruction")
"""Columns that may hold the prompt, of which `prompt` comes first."""
_SPELLINGS = {"chosen": "chosen_response", "rejected": "rejected_response"}
"""Another name of a column."""
PAIR_COLUMNS = ("chosen", "chosen_response", "rejected", "rejected_response", *_PROMPTS, "system", "tools")
UNPAIRED_COLUMNS = ("completion", "label", *_PROMPTS, "system", "tools")
_INSTRUCTING = ("system", "developer")


def read_pair(row: Mapping[str, Any], at: At) -> dict[str, Any]:
    """Return `prompt`, `chosen` and `rejected` of a row, and `tools` if it has some. Raises DataError."""
    chosen = _completion(row, "chosen", "preference", at)
    rejected = _completion(row, "rejected", "preference", at)
    if type(chosen) is not type(rejected):
        raise DataError(f"{at()}: chosen and rejected are not both texts or both lists of messages. Repair the row.")
    column = _prompt_column(row, type(chosen), at)
    prompt = row.get(column)
    is_implicit = prompt is None or (isinstance(prompt, str) and not isinstance(chosen, str))  # as in UltraFeedback
    if is_implicit:
        shared = _shared(chosen, rejected)
        document = {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    else:
        document = {"prompt": _prompt(prompt, column, chosen, at), "chosen": chosen, "rejected": rejected}
    for field in ("chosen", "rejected"):
        _check_answer(document[field], field, at)
    if is_implicit and not _asks(document["prompt"]):
        reason = "there is no prompt for chosen and rejected, and they do not begin with one"
        raise DataError(f"{at()}: {reason}. Add a column prompt of their type.")
    document["prompt"] = _with_system(row, document["prompt"], document["chosen"], at)
    return document | read_tools(row, at)


def read_unpaired(row: Mapping[str, Any], at: At) -> dict[str, Any]:
    """Return `prompt`, `completion` and `label` of a row, and `tools` if it has some. Raises DataError."""
    completion = _completion(row, "completion", "unpaired", at)
    column = _prompt_column(row, type(completion), at)
    if row.get(column) is None:
        raise missing_field("prompt", "unpaired", at)
    label = row.get("label")
    if label is None:
        raise missing_field("label", "unpaired", at)
    if label not in (True, False):
        raise DataError(f"{at()}: label is {label!r}. Write true for a desirable completion and false for another.")
    _check_answer(completion, "completion", at)
    prompt = _with_system(row, _prompt(row[column], column, completion, at), completion, at)
    return {"prompt": prompt, "completion": completion, "label": bool(label)} | read_tools(row, at)


def _prompt_column(row: Mapping[str, Any], kind: type, at: At) -> str:
    """Return the column that holds the prompt of completions of a type. Raises DataError where two may."""
    filled = [name for name in _PROMPTS if row.get(name)]
    if row.get("prompt") or not filled:
        return "prompt"
    first, *others = [name for name in filled if isinstance(row[name], kind)] or filled[:1]
    for other in others:
        if row[other] != row[first]:
            raise DataError(f"{at()}: the prompt may be {first} or {other}. Add prompt, with what is to be the prompt.")
    return first


def _with_system(row: Mapping[str, Any], prompt: Any, completion: Any, at: At) -> Any:
    """Put the system message of a row in front of its prompt, where that has none; texts with an empty line between."""
    system = row.get("system")
    if not system:
        return prompt
    message = read_message({"role": "system", "content": system}, "system", at)
    if isinstance(prompt, str):
        return f"{system}\n\n{prompt}"
    has_system = [*prompt, *completion][0]["role"] == "system"
    return prompt if has_system else [message, *prompt]


def _asks(prompt: Any) -> bool:
    """Whether there is more in a prompt than instructions of a system."""
    return bool(prompt) if isinstance(prompt, str) else any(turn["role"] not in _INSTRUCTING for turn in prompt)


def _completion(row: Mapping[str, Any], field: str, row_format: Format, at: At) -> Any:
    other = _SPELLINGS.get(field, field)
    column = other if row.get(field) is None else field
    value = row.get(column)
    if value is None:
        raise missing_field(field, row_format, at)
    return _text_or_messages(value, column, at)


def _text_or_messages(value: Any, field: str, at: At) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        kind = with_article(type(value).__name__)
        raise DataError(f"{at()}: {field} is {kind}. Write a text, or a list of messages with role and content.")
    return [read_message(turn, f"{field}[{number}]", at) for number, turn in enumerate(value)]


def _prompt(value: Any, column: str, completion: Any, at: At) -> Any:
    prompt = _text_or_messages(value, column, at)
    if type(prompt) is not type(completion):
        raise DataError(
            f"{at()}: {column} and completion are not both texts or both lists of messages. Repair the row."
        )
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
