"""Trained turns of chats by a chat template: a conversation's text, and the spans of it that are trained on.

A template with `{% generation %}` marks them itself. For any other, the conversation is rendered up to a turn of the
assistant with the generation prompt (what the model is given), and up to its end (what it is to answer): the difference
is the turn, if each is the beginning of the next and of the whole. A template that rewrites earlier turns breaks
that; it is refused, and never masked by a guess. So is one that ends a turn with nothing at which generation stops, or
leaves out a part of the chat (`dropped_text.py`).
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.config.data_section import DataSection, DroppedText, TrainOn
from toolkit.data.tokens.dropped_text import DroppedTextCheck
from toolkit.data.tokens.rendering import DroppedTextError, Renderer, Span, UnmaskedError
from toolkit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUOTED = 40
"""Characters of a conversation that an error quotes."""
_QUESTION, _ANSWER = "Which words are these?", "These are plain words."
"""Texts of a chat by which a template is asked how it writes a plain turn."""


def check_tokenizer(section: DataSection, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise DataError for a tokenizer that cannot make documents of `section.format`."""
    if section.format == "chat" and section.train_on == "each_assistant" and section.eval_fraction:
        both = (("data.train_on", section.train_on), ("data.eval_fraction", section.eval_fraction))
        reason = "turns of one chat would be in both the training and the validation text"
        raise DataError.between(both, reason, "give data.validation", ("data.eval_fraction", 0))
    settings = (("data.tokenizer", section.tokenizer), ("data.format", section.format))
    if not tokenizer.is_fast:
        reason = "it does not say which characters a token has, as the mask of trained tokens needs"
        raise DataError.between(settings, reason, "use a tokenizer with a tokenizer.json")
    if section.format == "chat" and not tokenizer.chat_template:
        reason = "the tokenizer has no chat template"
        advice = "use that of the instruction-tuned model, or put a chat_template.jinja into the tokenizer's directory"
        raise DataError.between(settings, reason, advice)


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """The text before a turn of the assistant, as the model sees it in generation."""

    text: str
    """The rendered messages before the turn, with the generation prompt."""
    ignores_prompt: bool
    """Whether the generation prompt is empty."""
    has_end: bool
    """Whether a chat without a generation prompt ends with an end-of-text token, which is no part of a turn."""


class ChatTemplate:
    """The template of a tokenizer, and which turns are trained on."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        train_on: TrainOn,
        *,
        stops: Iterable[int] = (),
        dropped_text: DroppedText = "refuse",
    ) -> None:
        """`stops`: ids at which generation stops, besides the end-of-text token."""
        self._renderer = Renderer(tokenizer)
        self._eos = str(tokenizer.eos_token)
        self._train_on = train_on
        self._dropped = DroppedTextCheck(self._renderer) if dropped_text == "refuse" else None
        self._stops = {self._eos, *(str(tokenizer.decode([token])) for token in stops)}
        """The texts of tokens at which generation stops."""
        self._ends: set[str] = set()
        """Tokens that the template puts after every turn, as far as they were met."""
        # Tokens that only templates write: a turn ends with such, whatever white space follows.
        written = sorted({*tokenizer.get_added_vocab(), *self._stops}, key=len, reverse=True)
        written = [re.escape(token) for token in written if token in self._stops or token.strip()]
        self._token = re.compile("|".join(written))
        self._ending = re.compile(rf"(?:(?:{'|'.join(written)})\s*)+\Z")

    def render(self, chat: Mapping[str, Any], first_turn: int = 0) -> tuple[str, list[Span]]:
        """Return the text of a chat and its trained spans. Raises DataError if the template cannot say which.

        Messages before `first_turn` are a prompt, of which nothing is trained on.
        """
        messages = chat["messages"]
        try:
            return self._spans(messages, chat.get("tools"), first_turn)
        except UnmaskedError as problem:
            first = next((message["content"] for message in messages if message["content"]), "")[:_QUOTED]
            advice = "Change the template, the row, or data.train_on."
            if isinstance(problem, DroppedTextError):
                advice = "Change the template or the row, or set data.dropped_text to allow."
            raise DataError(f"the chat template, at the chat that begins {first!r}: {problem}. {advice}") from None

    def _spans(self, messages: list[Any], tools: Any, first_turn: int) -> tuple[str, list[Span]]:
        text, marked = self._renderer.render(messages, tools)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        trained = turns if self._train_on in ("assistant", "all") else turns[-1:]
        trained = [number for number in trained if number >= first_turn]
        if self._dropped is not None:
            self._dropped.check_chat(messages, tools, text)
        if self._train_on == "all":
            spans = [(0, len(text))]
        elif marked is not None:
            spans = _marked_turns(marked, len(turns), len(trained))
        else:
            spans = [self._turn(messages, tools, number, text) for number in trained]
        if self._dropped is not None:
            self._dropped.check_thoughts(messages, tools, text, trained)
        return text, spans

    def _turn(self, messages: list[Any], tools: Any, number: int, whole: str) -> Span:
        """What the model answers with at `number`: from the generation prompt to the token that ends the turn."""
        answered = whole
        if number + 1 < len(messages):
            answered = self._renderer.text(messages[: number + 1], tools)
        prompt = self._prompt(messages[:number], tools) if number else self._opening(answered, tools)
        if prompt.has_end:
            answered = answered.removesuffix(self._eos)
        if prompt.ignores_prompt:
            self._check_nothing_follows(prompt.text, answered)
        if not whole.startswith(answered):
            raise UnmaskedError("it renders a turn differently when others follow")
        if not answered.startswith(prompt.text):
            raise UnmaskedError("its generation prompt is not how it begins a turn of the assistant")
        answer = answered[len(prompt.text) :]
        content = messages[number]["content"] or ""
        if prompt.ignores_prompt:
            _check_no_heading(answer[: max(0, answer.find(content.strip()))])
        return len(prompt.text), len(prompt.text) + self._end(answer, messages[:number], tools, prompt)

    def _end(self, answer: str, before: list[Any], tools: Any, prompt: _Prompt) -> int:
        """Return the place where generation stops: after the first closing token at which it does."""
        tokens = self._closing_tokens(answer)
        for token in tokens:
            if token[0] in self._stops:
                return token.end()
        if tokens and self._follows_every_turn(tokens[-1][0], before, tools, prompt):
            return tokens[-1].end()
        others = f" ({tokens[-1][0]!r} is neither the EOS token nor in its generation_config.json)" if tokens else ""
        reason = "ends a turn without a token at which generation stops"
        raise UnmaskedError(f"it {reason}{others}, so the model would not learn to stop")

    def _closing_tokens(self, text: str) -> list[re.Match[str]]:
        """The tokens at the end of a text after which nothing but white space follows."""
        ending = self._ending.search(text)
        return [] if ending is None else list(self._token.finditer(text, ending.start()))

    def _prompt(self, before: list[Any], tools: Any) -> _Prompt:
        plain = self._renderer.text(before, tools)
        prompted = self._renderer.text(before, tools, generation_prompt=True)
        has_end = plain.endswith(self._eos) and not prompted.startswith(plain)
        return _Prompt(text=prompted, ignores_prompt=prompted == plain, has_end=has_end)

    def _opening(self, answered: str, tools: Any) -> _Prompt:
        """What the model is given before its turn begins a chat.

        Many templates look at a first message, or write the BOS with it. So it is not what they make of no messages,
        but what precedes a plain turn there, up to the generation prompt that follows a question; unless a template
        has one after a question alone.
        """
        try:
            return self._opening_of_plain_turn(tools)
        except UnmaskedError:
            with suppress(UnmaskedError):
                empty = self._prompt([], tools)
                if answered.startswith(empty.text):
                    return empty
            raise

    def _opening_of_plain_turn(self, tools: Any) -> _Prompt:
        question = {"role": "user", "content": _QUESTION}
        answer = {"role": "assistant", "content": _ANSWER}
        asked = self._prompt([question], tools)
        plain = self._renderer.text([question], tools)
        if asked.has_end:
            plain = plain.removesuffix(self._eos)
        opened, marker, _ = self._renderer.text([answer], tools).partition(_ANSWER)
        prompt = asked.text.removeprefix(plain)
        if not (marker and asked.text.startswith(plain) and prompt in opened):
            raise UnmaskedError("its generation prompt is not how it begins a turn of the assistant")
        if prompt:
            text = opened[: opened.rindex(prompt) + len(prompt)]
        else:
            lead = self._renderer.text([question, answer], tools).removeprefix(plain).partition(_ANSWER)[0]
            _check_no_heading(lead)
            text = opened.removesuffix(lead)
        return _Prompt(text=text, ignores_prompt=not prompt, has_end=asked.has_end)

    def _follows_every_turn(self, token: str, before: list[Any], tools: Any, prompt: _Prompt) -> bool:
        """Whether the template ends a plain turn here with a token, and also where another turn follows."""
        if token in self._ends:
            return True
        plain = {"role": "assistant", "content": _ANSWER}
        question = {"role": "user", "content": _QUESTION}
        try:
            last = self._renderer.text([*before, plain], tools)
            followed = self._renderer.text([*before, plain, question], tools)
        except UnmaskedError:
            return False
        if prompt.has_end:
            last = last.removesuffix(self._eos)
        end = last.rpartition(_ANSWER)[2]
        tokens = self._closing_tokens(end)
        if not (tokens and tokens[-1][0] == token):
            return False
        if not followed.rpartition(_ANSWER)[2].startswith(end[: tokens[-1].end()]):
            return False
        self._ends.add(token)
        return True

    def _check_nothing_follows(self, prompted: str, answered: str) -> None:
        """Raise UnmaskedError for a template without generation prompt that writes one after each turn."""
        tokens = self._closing_tokens(prompted)
        if not tokens or tokens[-1][0] in self._stops:
            return
        after = prompted[tokens[-1].start() :]
        if answered.endswith(after):
            raise UnmaskedError(f"it ignores add_generation_prompt and writes {after.strip()!r} after each turn")


def _check_no_heading(lead: str) -> None:
    """Raise UnmaskedError for a template without generation prompt that has something like one in its turns."""
    if lead.strip():
        raise UnmaskedError(f"it ignores add_generation_prompt and writes {lead.strip()!r} before an answer")


def _marked_turns(marked: list[Span], turns: int, trained: int) -> list[Span]:
    """The marked parts of the last `trained` turns. A turn may be marked in several parts, one after the other."""
    joined: list[Span] = []
    for start, end in marked:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    for parts in (joined, marked):
        if parts and len(parts) % turns == 0:
            return parts[-(len(parts) // turns) * trained :]
    raise UnmaskedError(f"it marks {len(marked)} parts of {turns} turns for {{% generation %}}")
