"""Where a chat template writes the turns that are trained on: a conversation's text, and its trained spans.

A template with `{% generation %}` marks them itself. For any other, the conversation is rendered up to a turn of the
assistant with the generation prompt (what the model is given), and up to its end (what it is to answer): the difference
is the turn, if each is the beginning of the next and of the whole. A template that rewrites earlier turns breaks
that; it is refused, and never masked by a guess. So is one that ends no turn, or leaves out calls of tools.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.config.data_section import DataSection, TrainOn
from toolkit.errors import DataError
from toolkit.files import reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUOTED = 40
"""Characters of a conversation that an error quotes."""


def check_tokenizer(section: DataSection, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise DataError for a tokenizer that cannot make documents of `section.format`."""
    if section.format == "chat" and section.train_on == "each_assistant" and section.eval_fraction:
        both = (("data.train_on", section.train_on), ("data.eval_fraction", section.eval_fraction))
        reason = "turns of one chat would be in both the training and the validation text"
        raise DataError.between(both, reason, "give data.validation", ("data.eval_fraction", 0))
    given = (("data.tokenizer", section.tokenizer), ("data.format", section.format))
    if not tokenizer.is_fast:
        reason = "it does not say which characters a token has, as the mask of trained tokens needs"
        raise DataError.between(given, reason, "use a tokenizer with a tokenizer.json")
    if section.format == "chat" and not tokenizer.chat_template:
        reason = "the tokenizer has no chat template"
        advice = "use that of the instruction-tuned model, or put a chat_template.jinja into the tokenizer's directory"
        raise DataError.between(given, reason, advice)


class _UnmaskedError(Exception):
    """Why it is not known what is trained on."""


class ChatTemplate:
    """The template of a tokenizer, and which turns are trained on."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", train_on: TrainOn) -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        # Tokens that only templates write: a turn ends with the last of them, whatever white space follows.
        closing = sorted({*tokenizer.get_added_vocab(), str(tokenizer.eos_token)}, key=len, reverse=True)
        self._closed = re.compile(f"(?:{'|'.join(map(re.escape, closing))})(?=\\s*\\Z)")

    def render(self, chat: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Return the text of a chat and its trained spans. Raises DataError if the template cannot say which."""
        messages = chat["messages"]
        try:
            return self._spans(messages, chat.get("tools"))
        except _UnmaskedError as problem:
            first = next((message["content"] for message in messages if message["content"]), "")[:_QUOTED]
            advice = "Change the template, the row, or data.train_on."
            raise DataError(f"the chat template, at the chat that begins {first!r}: {problem}. {advice}") from None

    def _spans(self, messages: list[Any], tools: Any) -> tuple[str, list[Span]]:
        text, marked = self._render(messages, tools)
        self._check_tool_calls(messages, tools, text)
        if self._train_on == "all":
            return text, [(0, len(text))]
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if marked is not None:
            if not marked or len(marked) % len(turns):
                raise _UnmaskedError(f"it marks {len(marked)} parts of {len(turns)} turns for {{% generation %}}")
            return text, marked[-(len(marked) // len(turns)) :] if self._train_on != "assistant" else marked
        wanted = turns[-1:] if self._train_on != "assistant" else turns
        return text, [self._turn(messages, tools, number, text) for number in wanted]

    def _turn(self, messages: list[Any], tools: Any, number: int, whole: str) -> Span:
        """What the model answers with at `number`: from the generation prompt to the token that ends the turn."""
        before, _ = self._render(messages[:number], tools)
        given, _ = self._render(messages[:number], tools, generation_prompt=True)
        answered = whole if number + 1 == len(messages) else self._render(messages[: number + 1], tools)[0]
        # Some templates end every chat without a generation prompt with an end-of-text token: it is no part of a turn.
        eos = str(self._tokenizer.eos_token)
        if before.endswith(eos) and not given.startswith(before):
            answered = answered.removesuffix(eos)
        if not whole.startswith(answered):
            raise _UnmaskedError("it renders a turn differently when others follow")
        if not answered.startswith(given):
            raise _UnmaskedError("its generation prompt is not how it begins a turn of the assistant")
        answer, content = answered[len(given) :], messages[number]["content"] or ""
        if given == before:
            self._check_ignored_prompt(before, answered, answer[: max(0, answer.find(content.strip()))].strip())
        if "</think>" in content and "</think>" not in answer:
            raise _UnmaskedError("it leaves out the thought of a turn")
        end = self._closed.search(answer)
        if end is None:
            raise _UnmaskedError("it ends a turn without a special token, so the model would not learn to stop")
        return len(given), len(given) + end.end()

    def _check_ignored_prompt(self, before: str, answered: str, lead: str) -> None:
        """Raise _UnmaskedError for a template without generation prompt that has something like one in its turns."""
        if lead:
            raise _UnmaskedError(f"it ignores add_generation_prompt and writes {lead!r} before an answer")
        closing = self._closed.search(before)
        if closing and answered.endswith(after := before[closing.start() :]):
            raise _UnmaskedError(f"it ignores add_generation_prompt and writes {after.strip()!r} after each turn")

    def _check_tool_calls(self, messages: list[Any], tools: Any, text: str) -> None:
        """Raise _UnmaskedError for a call that the template leaves out: the model would learn to answer nothing."""
        for number, message in enumerate(messages):
            calls = message.get("tool_calls") or []
            for one in range(len(calls)):
                others = calls[:one] + calls[one + 1 :]
                fewer = {**message, "tool_calls": others}
                if not others:
                    del fewer["tool_calls"]
                try:
                    without, _ = self._render([*messages[:number], fewer, *messages[number + 1 :]], tools)
                except _UnmaskedError:
                    continue  # it reads the call
                if without == text:
                    raise _UnmaskedError("it leaves out a call of a tool")

    def _render(
        self, messages: list[Any], tools: Any, *, generation_prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return the text, and the spans that the template marks, if it does. No messages are rendered as well, as a
        chat that begins with the assistant needs."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(tools=tools)
        marks = _MARKERS.search(template) is not None
        try:
            texts, spans = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=generation_prompt,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise _UnmaskedError(f"it does not render this chat: {reason_of(error)}") from None
        return texts[0], [(int(start), int(end)) for start, end in spans[0]] if marks else None
