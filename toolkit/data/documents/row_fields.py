"""Fields that rows of several formats have: turns of a conversation, tools, and the message for one that is missing."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.config.data_section import Format
from toolkit.errors import DataError
from toolkit.units import with_article

At = Callable[[], str]
"""A function that says where the row is, for messages."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def read_message(turn: Any, name: str, at: At) -> dict[str, Any]:
    """A turn with `role` and `content`, and what else the template may read. Tables fill missing keys with null."""
    if not isinstance(turn, dict):
        raise DataError(
            f"{at()}: {name} is {with_article(type(turn).__name__)}. A turn is an object with role and content."
        )
    fields = {key: value for key, value in turn.items() if value is not None}
    role = fields.pop("role", fields.pop("from", None))
    content = fields.pop("content", fields.pop("value", None))
    role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise DataError(f"{at()}: {name} has the role {role!r}. Roles are {', '.join(_ROLES)}; ShareGPT's human, gpt.")
    if not (isinstance(content, str) or (content is None and fields.get("tool_calls"))):
        raise DataError(f"{at()}: the content of {name} is {with_article(type(content).__name__)}, not a text.")
    return {"role": role, "content": content, **fields}


def read_tools(row: Mapping[str, Any], at: At) -> dict[str, Any]:
    """Return the tools of a row as `tools`, a list of JSON schemas; empty where it has none. Raises DataError."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise DataError(f"{at()}: tools is not JSON. Write a list of JSON schemas.") from None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{at()}: tools is not a list of objects. Write a list of JSON schemas.")
    return {"tools": tools} if tools else {}


def missing_field(field: str, row_format: Format, at: At) -> DataError:
    """Return the error for a row without a field that its format needs."""
    return DataError(f"{at()}: there is no {field}, which data.format={row_format} needs. Add it, or set data.format.")
