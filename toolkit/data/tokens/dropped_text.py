"""What a chat template leaves out of a chat: a call of a tool, the content of a message, the tools, or a thought.

A template that does not know a role or a field writes nothing for it, and says nothing. So each part is changed: where
the text of the chat stays the same, the template leaves the part out. For contents, tools and thoughts this depends on
the place and the kind of a message and not on its words, so each kind is looked at once, and not in each row.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from toolkit.data.tokens.rendering import DroppedTextError, Renderer, UnmaskedError

_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold a thought, by the names that templates have for it."""
_THOUGHT_END = "</think>"
_MORE = " and more"
"""What a part is changed by."""
_QUOTED = 40
"""Characters of a content that an error quotes."""


class DroppedTextCheck:
    """Finds what the template of `renderer` leaves out."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._written: set[Hashable] = set()
        """The kinds of parts that the template writes."""

    def check_chat(self, messages: list[Any], tools: Any, text: str) -> None:
        """Look at the calls of tools, the contents and the tools of a chat that is rendered as `text`.

        Raises DroppedTextError for the first part that is left out.
        """
        for number, message in enumerate(messages):
            self._check_calls(messages, tools, text, number, message.get("tool_calls") or [])
        for number, message in enumerate(messages):
            content = message["content"]
            if not (content and content.strip()):
                continue
            changed = {**message, "content": content + _MORE}
            if self._is_new_and_left_out("content", messages, tools, text, number, changed):
                beside = " beside a call of a tool" if message.get("tool_calls") else ""
                begins = repr(content.strip()[:_QUOTED])
                raise DroppedTextError(
                    f"it leaves out the content of the {message['role']} message{beside} that begins {begins}"
                )
        if tools:
            roles = [message["role"] for message in messages]
            kind = ("tools", roles[0], roles[-1], frozenset(roles))
            if kind not in self._written and self._is_rendered_as(text, messages, None):
                raise DroppedTextError("it leaves out the tools")
            self._written.add(kind)

    def check_thoughts(self, messages: list[Any], tools: Any, text: str, turns: Sequence[int]) -> None:
        """Look at the thoughts of the turns that are trained on. Raises DroppedTextError for one that is left out.

        Many templates leave out those of earlier turns, which the model does not see either when it answers.
        """
        for number in turns:
            for name, changed in _other_thoughts(messages[number]):
                if self._is_new_and_left_out(name, messages, tools, text, number, changed):
                    raise DroppedTextError("it leaves out the thought of a turn")

    def _check_calls(self, messages: list[Any], tools: Any, text: str, number: int, calls: list[Any]) -> None:
        """Raise DroppedTextError for a call that is left out: the model would learn to answer nothing.

        Each row is looked at: a template may write the first of several calls, or calls of one form, alone.
        """
        for index in range(len(calls)):
            others = calls[:index] + calls[index + 1 :]
            fewer = {**messages[number], "tool_calls": others}
            if not others:
                del fewer["tool_calls"]
            if self._is_rendered_as(text, _replaced(messages, number, fewer), tools):
                raise DroppedTextError("it leaves out a call of a tool")

    def _is_new_and_left_out(
        self, part: str, messages: list[Any], tools: Any, text: str, number: int, changed: dict[str, Any]
    ) -> bool:
        """Whether a part of a kind that was not looked at before is left out; `changed`: the message with another."""
        kind = (part, _kind(messages, number), bool(tools))
        if kind in self._written:
            return False
        if self._is_rendered_as(text, _replaced(messages, number, changed), tools):
            return True
        self._written.add(kind)
        return False

    def _is_rendered_as(self, text: str, messages: list[Any], tools: Any) -> bool:
        try:
            return self._renderer.text(messages, tools) == text
        except UnmaskedError:
            return False  # the template reads what was changed


def _replaced(messages: list[Any], number: int, message: dict[str, Any]) -> list[Any]:
    return [*messages[:number], message, *messages[number + 1 :]]


def _kind(messages: list[Any], number: int) -> Hashable:
    """What a template may decide by whether it writes a part of a message."""
    message = messages[number]
    before = messages[number - 1]["role"] if number else None
    after = messages[number + 1]["role"] if number + 1 < len(messages) else None
    fields = frozenset(name for name, value in message.items() if value)
    has_thought = _THOUGHT_END in (message["content"] or "")
    # A template may have room for one system message, and take the last.
    instructions = sum(other["role"] in ("system", "developer") for other in messages)
    return number == 0, before, message["role"], after, fields, has_thought, instructions


def _other_thoughts(message: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The message with another thought, for each way in which it has one."""
    fields = [name for name in _THOUGHT_FIELDS if isinstance(message.get(name), str) and message[name].strip()]
    if fields:
        # One thought under several names is for several templates, each of which reads one of them.
        yield "thought", {**message, **{name: message[name] + _MORE for name in fields}}
    content = message["content"] or ""
    if _THOUGHT_END in content:
        yield "thought in content", {**message, "content": content.replace(_THOUGHT_END, _MORE + _THOUGHT_END, 1)}
