"""Which chats are trained on exactly with each published chat template, and which are refused: docs/chat-templates.md.

make chat-templates        (writes the page; make test-real compares it)

What is trained on is compared with what is found in the whole rendered chat, by nothing of the toolkit: the words of
the assistant, which are like no others, begin after the generation prompt and end with the first token at which
generation stops. Of a template with marks, it is compared with what is between them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from published_templates import PublishedTemplate, package_versions, published_templates
from small_chats import marked, write_tokenizer
from transformers import AutoTokenizer

from toolkit.config.data_section import TrainOn
from toolkit.data.tokens.conversation_encoder import ConversationEncoder
from toolkit.data.tokens.stop_tokens import generation_stops
from toolkit.errors import DataError

PAGE = Path(__file__).parents[2] / "docs" / "chat-templates.md"
TOOL = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time in a zone.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "description": "Its name."}},
            "required": ["zone"],
        },
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": {"zone": "zebra"}}}


def _said(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def _thought(text: str) -> dict[str, str]:
    """A thought under the names that templates have for it."""
    return {"reasoning_content": text, "reasoning": text, "thinking": text}


_ASKED = {"role": "user", "content": "question one"}
_AGAIN = {"role": "user", "content": "question two"}
_TOLD = {"role": "tool", "name": "clock", "tool_call_id": "abcdefghi", "content": "noon"}
_TOOLS = {"tools": [TOOL]}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [_ASKED, _said("alpha")]},
    "multi-turn": {"messages": [_ASKED, _said("alpha"), _AGAIN, _said("beta gamma")]},
    "system": {"messages": [{"role": "system", "content": "rule"}, _ASKED, _said("alpha")]},
    "developer": {"messages": [{"role": "developer", "content": "rule"}, _ASKED, _said("alpha")]},
    "assistant first": {"messages": [_said("alpha"), _ASKED, _said("beta gamma")]},
    "call": {"messages": [_ASKED, _said("", tool_calls=[CALL]), _TOLD, _said("alpha")], **_TOOLS},
    "text and call": {"messages": [_ASKED, _said("delta", tool_calls=[CALL]), _TOLD, _said("alpha")], **_TOOLS},
    "thought": {"messages": [_ASKED, _said("alpha", **_thought("omega"))]},
    "thought in text": {"messages": [_ASKED, _said("<think>\nomega\n</think>\n\nalpha")]},
}
_WORDS = ("alpha", "beta gamma", "delta", "omega", "zebra")
"""What the assistant says, thinks and calls a tool with."""
_OTHERS = ("question", "rule", "noon")

REASONS = {
    "drops": "the template leaves out a content, a call, the tools or a thought. Take one that writes it, or set "
    "`data.dropped_text: allow`",
    "no stop": "a turn ends without a token at which generation stops. Mark it by `{% generation %}`, with that token",
    "rewrites": "a turn is rendered differently when others follow. Set `data.train_on: each_assistant`",
    "prompt": "the generation prompt is not how a turn begins. Mark it by `{% generation %}`",
    "heading": "the template ignores `add_generation_prompt` and writes a heading itself. Write it for "
    "`add_generation_prompt`",
    "refuses": "the template does not render such a chat. Change the row",
}
_MESSAGES = {
    "leaves out": "drops",
    "without a token at which generation stops": "no stop",
    "differently when others follow": "rewrites",
    "generation prompt is not how it begins": "prompt",
    "ignores add_generation_prompt": "heading",
    "does not render this chat": "refuses",
}
TRAIN_ON: tuple[TrainOn, ...] = ("assistant", "each_assistant")
EXACT, EACH, UNENDED, WRONG = "exact", "each", "unended", "WRONG"
_MARK = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What becomes of each kind of chat with one template."""

    names: tuple[str, ...]
    """Names that a package has for it."""
    cells: tuple[str, ...]


@cache
def table() -> dict[str, tuple[Row, ...]]:
    """The rows of each package. Equal templates have one row."""
    verdicts: dict[Any, tuple[str, ...]] = {}
    found: dict[str, tuple[Row, ...]] = {}
    for package, templates in published_templates().items():
        names: dict[Any, list[str]] = {}
        for published in templates:
            key = (published.template, published.eos, published.stops)
            names.setdefault(key, []).append(published.name)
            if key not in verdicts:
                verdicts[key] = tuple(_verdicts(published))
        found[package] = tuple(Row(names=tuple(texts), cells=verdicts[key]) for key, texts in names.items())
    return found


def _verdicts(published: PublishedTemplate) -> Iterator[str]:
    with TemporaryDirectory() as folder:
        subject = Subject(published, Path(folder))
        for chat in CHATS.values():
            verdict = subject.verdict(chat, "assistant")
            if verdict == "rewrites" and subject.verdict(chat, "each_assistant") == EXACT:
                verdict = EACH
            yield verdict


class Subject:
    """A template with its tokenizer, which is written to a folder."""

    def __init__(self, published: PublishedTemplate, folder: Path) -> None:
        self.published = published
        special, stops = published.special, published.stops
        write_tokenizer(folder, published.template, eos=published.eos, special=special, stops=stops)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = generation_stops(str(folder))
        self._encoders = {train_on: ConversationEncoder(folder, "<u2", train_on, stops=ids) for train_on in TRAIN_ON}

    def trained(self, chat: dict[str, Any], train_on: TrainOn) -> list[str]:
        """Each document that the toolkit makes of a chat, with « and » around what is trained on. Raises DataError."""
        documents = self._encoders[train_on].encode(json.dumps(chat))
        return [marked(self.tokenizer, np.frombuffer(one.ids, "<u2").tolist(), one.trained) for one in documents]

    def verdict(self, chat: dict[str, Any], train_on: TrainOn) -> str:
        """`exact`, why the chat is refused, or WRONG."""
        try:
            documents = self.trained(chat, train_on)
        except DataError as error:
            return next(reason for text, reason in _MESSAGES.items() if text in str(error))
        ends = [number + 1 for number, message in enumerate(chat["messages"]) if message["role"] == "assistant"]
        last_alone = train_on == "each_assistant"
        parts = [chat | {"messages": chat["messages"][:end]} for end in ends] if last_alone else [chat]
        expected = [expected_text(self.tokenizer, self.published, part, last_alone=last_alone) for part in parts]
        if documents != expected:
            return WRONG
        is_marked = _MARK.search(self.published.template) is not None
        if is_marked and not marks_end(self.tokenizer, self.published, chat, expected[-1]):
            return UNENDED
        return EXACT


def expected_text(tokenizer: Any, published: PublishedTemplate, chat: dict[str, Any], *, last_alone: bool) -> str:
    """The rendered chat with « and » around what is to be trained on: all turns of the assistant, or the last alone.

    What a template with marks is to train on is written by the template itself, with « and » in the place of its marks.
    """
    if _MARK.search(published.template):
        text = _rendered(tokenizer, chat, chat["messages"], chat_template=_with_visible_marks(published.template))
        return text.replace("»«", "").replace("«»", "")
    text, position, parts = _rendered(tokenizer, chat, chat["messages"]), 0, []
    stops = _stops(tokenizer, published)
    for number, message in enumerate(chat["messages"]):
        if message["role"] != "assistant" or (last_alone and message is not chat["messages"][-1]):
            continue
        places = [text.find(word, position) for word in _words(message)]
        if min(places) < 0:
            return "a turn without its words"
        first = min(places)
        end = stops.search(text, max(places))
        if end is None:
            return "a turn without an end"
        prompt = _generation_prompt(tokenizer, chat, chat["messages"][:number])
        if prompt:
            start = text.rfind(prompt, position, first) + len(prompt)
            if start < len(prompt) and number == 0 and _rendered(tokenizer, chat, [_ASKED]).startswith(text[:first]):
                start = first  # it has a generation prompt after a question alone
            elif start < len(prompt):
                return "a turn without a generation prompt"
        elif number:
            start = len(_rendered(tokenizer, chat, chat["messages"][:number]))
        else:
            start = first - _space_before_answers(tokenizer)
        parts += [text[position:start], "«", text[start : end.end()], "»"]
        position = end.end()
    parts.append(text[position:])
    return "".join(parts)


def marks_end(tokenizer: Any, published: PublishedTemplate, chat: dict[str, Any], expected: str) -> bool:
    """Whether what a template marks has the words of each turn, and after them a token at which generation stops."""
    parts = re.findall("«(.*?)»", expected, re.DOTALL)
    said = [message for message in chat["messages"] if message["role"] == "assistant"]
    stops = _stops(tokenizer, published)
    if len(parts) != len(said):
        return False
    for part, message in zip(parts, said, strict=True):
        places = [part.find(word) for word in _words(message)]
        if min(places) < 0 or not stops.search(part, max(places)):
            return False
    return True


def _words(message: dict[str, Any]) -> list[str]:
    return [word for word in _WORDS if word in json.dumps(message)]


def _with_visible_marks(template: str) -> str:
    return _MARK.sub(lambda mark: "{{" + mark[1] + ("'»'" if mark[2] else "'«'") + mark[3] + "}}", template)


def _rendered(tokenizer: Any, chat: dict[str, Any], messages: list[Any], **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(messages, tools=chat.get("tools"), tokenize=False, **options)
    return text


def _stops(tokenizer: Any, published: PublishedTemplate) -> re.Pattern[str]:
    tokens = {published.eos, *published.stops, *_plain_ends(tokenizer, published)}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def _space_before_answers(tokenizer: Any) -> int:
    """White space that a template without generation prompt writes between a question and its answer."""
    chat = {"messages": [_ASKED, _said("alpha")]}
    question, whole = (_rendered(tokenizer, chat, chat["messages"][:count]) for count in (1, 2))
    return whole.index("alpha") - len(question)


def _generation_prompt(tokenizer: Any, chat: dict[str, Any], before: list[Any]) -> str:
    """What `add_generation_prompt` adds; after a question, where nothing is before."""
    before = before or [_ASKED]
    without = _rendered(tokenizer, chat, before)
    given = _rendered(tokenizer, chat, before, add_generation_prompt=True)
    if not given.startswith(without):
        without = without.removesuffix(tokenizer.eos_token)
    assert given.startswith(without)
    return given.removeprefix(without)


def _plain_ends(tokenizer: Any, published: PublishedTemplate) -> set[str]:
    """The special tokens that follow a plain answer, which end the turns of a model that was trained on them."""
    after = _rendered(tokenizer, {}, [_ASKED, _said("alpha")]).partition("alpha")[2]
    if any(token in after for token in (published.eos, *published.stops)):
        return set()
    return {token for token in published.special if after.strip().startswith(token)}


def page() -> str:
    """The text of docs/chat-templates.md."""
    rows = [row for package in table().values() for row in package]
    versions, kinds = package_versions(), list(CHATS)
    templates = sum(len(row.names) for row in rows)
    lines = [
        "<!-- Written by `make chat-templates`; `make test-real` compares it. -->",
        "# Published chat templates",
        "",
        "What `data.format: chat` ([data.md](data.md#chats-and-prompts-with-completions)) does with the",
        f"{templates:,} chat templates that {len(versions)} packages publish, in {len(kinds)} kinds of chats. Each is",
        "tried with a small tokenizer that has the special tokens of the template, and the EOS and stop tokens of its",
        "models.",
        "",
        "- **exact**: trained on are the words, calls and thoughts of the assistant with the token that ends each",
        "  turn, and nothing else. This is compared with what other code finds in the whole rendered chat, or between",
        "  the `{% generation %}` marks of a template that has them",
        "  ([template_table.py](../tests/real/template_table.py)).",
        "- **each**: exact with `data.train_on: each_assistant`, and refused with `assistant`.",
        "- unended: trained on is what the template marks, and this has no token at which generation stops.",
        *(f"- {reason}: refused, because {text}." for reason, text in REASONS.items()),
        "",
        "| kind of chat | exact or each | unended | refused |",
        "|---|---|---|---|",
    ]
    for column, kind in enumerate(kinds):
        counts: Counter[str] = Counter()
        for row in rows:
            counts[row.cells[column]] += len(row.names)
        good = counts[EXACT] + counts[EACH]
        reasons = ", ".join(f"{counts[reason]} {reason}" for reason in REASONS if counts[reason])
        lines.append(f"| {kind} | {good} | {counts[UNENDED]} | {reasons} |")
    for package, found in table().items():
        lines += ["", f"## {package} {versions[package]}", "", f"| template | {' | '.join(kinds)} |"]
        lines.append("|---" * (1 + len(kinds)) + "|")
        lines += [f"| {', '.join(row.names)} | {' | '.join(row.cells)} |" for row in found]
    return "\n".join(lines) + "\n"


def cells_of(text: str) -> dict[tuple[str, str, str], str]:
    """The cells of a page, by package, template and kind of chat."""
    found, package = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            package = line.removeprefix("## ").rpartition(" ")[0]
        elif package and line.startswith("| ") and not line.startswith("| template |"):
            names, *cells = line.strip("| ").split(" | ")
            for name in names.split(", "):
                found |= {(package, name, kind): cell for kind, cell in zip(CHATS, cells, strict=True)}
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
