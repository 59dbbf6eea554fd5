"""Rendering: the text that a tokenizer's chat template makes of a chat, and the parts that the template marks."""

import re
from typing import TYPE_CHECKING, Any

from toolkit.files import reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class UnmaskedError(Exception):
    """Why it is not known what is trained on."""


class DroppedTextError(UnmaskedError):
    """What a template leaves out of a chat."""


class Renderer:
    """Renders chats with the template of a tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def text(self, messages: list[Any], tools: Any, *, generation_prompt: bool = False) -> str:
        """Return the text alone. Raises UnmaskedError."""
        return self.render(messages, tools, generation_prompt=generation_prompt)[0]

    def render(
        self, messages: list[Any], tools: Any, *, generation_prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return the text, and the spans that the template marks by `{% generation %}`; None if it has no marks.

        Raises UnmaskedError if the template refuses the chat.
        """
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
            raise UnmaskedError(f"it does not render this chat: {reason_of(error)}") from None
        return texts[0], [(int(start), int(end)) for start, end in spans[0]] if marks else None
