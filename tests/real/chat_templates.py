"""What is trained on with real models' chat templates, and with SmolLM2's real tokenizer.

make test-real     (templates: TRL, axolotl, LLaMA-Factory, unsloth; @huggingface/ollama-utils from npm)

docs/chat-templates.md says of all of them what becomes of each kind of chat, and is compared here. Of some that TRL
does not have, the formats are written out here by hand: what is read, and between « and » what the model has to write.
tests/data/test_published_templates.py has Llama 3, Qwen, Gemma, Phi-3, gpt-oss and others every day.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from published_templates import REAL, published_templates
from small_chats import encoded, turns, write_tokenizer
from template_table import EACH, EXACT, PAGE, WRONG, cells_of, page
from transformers import AutoTokenizer

from toolkit.errors import DataError

SPECIAL = ("<|im_sep|>", *(f"<｜{name}｜>" for name in ("User", "Assistant", "end▁of▁sentence")))


def template_of(name: str) -> str:
    package, _, of_package = name.rpartition("/")
    templates = published_templates()[package or "@huggingface/ollama-utils"]
    return next(published.template for published in templates if published.name == of_package)


@cache
def folder_of(name: str) -> Path:
    return write_tokenizer(Path(mkdtemp()), template_of(name), special=SPECIAL)


@dataclass(frozen=True)
class Format:
    """How a template writes turns: what begins the chat, user and system messages, and answers."""

    user: str
    answer: str
    """With « and »."""
    start: str = ""
    system: str | None = None
    """Where a system message is written before the first question; None: not at all."""
    default: str = ""
    """What begins a chat without one."""
    last: str | None = None
    """The last answer, if it is written otherwise."""

    def write(self, chat: list[dict[str, str]]) -> str:
        has_system = chat[0]["role"] == "system"
        parts = [self.start, "" if has_system else self.default]
        for number, message in enumerate(chat):
            ending = self.answer if self.last is None or number + 1 < len(chat) else self.last
            form = {"system": self.system, "user": self.user, "assistant": ending}[message["role"]]
            assert form is not None
            parts.append(form.replace("{}", message["content"]))
        return "".join(parts)


_IM = "<|im_start|>{role}\n{}<|im_end|>\n"
CHATML = Format(
    user=_IM.replace("{role}", "user"),
    answer="<|im_start|>assistant\n«{}<|im_end|>»\n",
    system=_IM.replace("{role}", "system"),
)
_SMOL = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SMOLLM = Format(user=CHATML.user, answer=CHATML.answer, system=CHATML.system, default=_SMOL)
_TULU = Format(
    start="<s>",
    user="<|user|>\n{}\n",
    answer="<|assistant|>\n«{}</s>»\n",
    last="<|assistant|>\n«{}</s>»",
    system="<|system|>\n{}\n",
)
FORMATS = {
    "axolotl/chatml": CHATML,
    "smollm2:135m": SMOLLM,
    "olmo2:7b": _TULU,
    "axolotl/mistral_v1": Format(start="<s>", user=" [INST] {} [/INST]", answer="« {}</s>»"),
    "mistral:7b-instruct-fp16": Format(start="<s>", user="[INST] {} [/INST]", answer="«{}</s>» "),
    # Zephyr's format.
    "tinyllama:1.1b": Format(
        user="<|user|>\n{}</s>\n", answer="<|assistant|>\n«{}</s>»\n", system="<|system|>\n{}</s>\n"
    ),
    "axolotl/alpaca": Format(
        start="<s>",
        user="### Instruction:\n{}\n\n",
        answer="### Response:\n«{}</s>»\n\n",
        last="### Response:\n«{}</s>»",
        system="{}\n\n",
    ),
    "phi4:14b": Format(
        user="<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>",
        answer="«{}<|im_end|>»",
        system="<|im_start|>system<|im_sep|>{}<|im_end|>",
    ),
    "deepseek-v3:671b": Format(
        start="<s>", user="<｜User｜>{}", answer="<｜Assistant｜>«{}<｜end▁of▁sentence｜>»", system="{}"
    ),
    "axolotl/deepseek_v2": Format(start="<s>", user="<｜User｜>{}", answer="<｜Assistant｜>«{}</s>»", system="{}\n\n"),
}
CHATS = {
    "multi-turn": turns("hi", "hello", "what?", "one two"),
    "system": turns("hi", "ho", "and?", "yes", system="Short."),
    "empty": turns("", "", "", "x"),
    "unicode": turns("שלום 日本", "e\u0301 🙂👩‍👩‍👧 مرحبا\n日本語", "ok", " naïve "),
}


def only_last(text: str) -> str:
    before, _, last = text.rpartition("«")
    return before.replace("«", "").replace("»", "") + "«" + last


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_the_model_has_to_write_is_trained_on(name: str, chat: str) -> None:
    folder, form = folder_of(name), FORMATS[name]
    if chat == "system" and form.system is None:
        pytest.skip("see the next test")
    expected = form.write(CHATS[chat])
    assert encoded(folder, CHATS[chat]) == expected
    assert encoded(folder, CHATS[chat], "last_assistant") == only_last(expected)
    plain = expected.replace("«", "").replace("»", "")
    assert encoded(folder, CHATS[chat], "all") == f"«{plain}»"


def test_a_system_message_of_mistral_is_a_part_of_the_first_question() -> None:
    expected = "<s> [INST] Short.\n\nhi [/INST]« ho</s>» [INST] and? [/INST]« yes</s>»"
    assert encoded(folder_of("axolotl/mistral_v1"), CHATS["system"]) == expected


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
ASKED: list[Any] = [
    *turns("time?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "noon", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is noon."},
]


def test_calls_of_tools_are_trained_on_and_their_results_are_not() -> None:
    mistral = encoded(folder_of("axolotl/mistral_v3_tekken"), ASKED)
    call = r'{"name": "clock", "arguments": "{\"zone\": \"UTC\"}", "id": "abcdefghi"}'
    result = '[TOOL_RESULTS]{"content": noon, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    assert mistral == f"<s>[INST]time?[/INST]«[TOOL_CALLS][{call}]</s>»{result}«It is noon.</s>»"
    deepseek = encoded(folder_of("axolotl/deepseek_v3"), ASKED)
    assert deepseek.count("«") == 2
    assert "<｜Assistant｜>«<｜tool▁calls▁begin｜>" in deepseek
    assert "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>»<｜tool▁outputs▁begin｜>" in deepseek
    assert deepseek.endswith("noon<｜tool▁output▁end｜><｜tool▁outputs▁end｜>«It is noon.<｜end▁of▁sentence｜>»")


REFUSED: list[tuple[str, Any, str]] = [
    ("mistral:7b-instruct-fp16", CHATS["system"], "roles must alternate"),
    ("mistral:7b-instruct-fp16", [*turns("hi"), *turns("hi", "ho")], "roles must alternate"),
    ("gemma2:2b", CHATS["system"], "System role not supported"),
    ("dolphin-llama3:8b", turns("hi", "ho"), "ignores add_generation_prompt"),
    ("qwen:0.5b", turns("hi", "ho"), "ends a turn without a token at which generation stops"),
    ("glm4:9b", turns("hi", "ho"), "ends a turn without a token at which generation stops"),
    ("qwq:32b (3)", turns("hi", "ho"), "generation prompt is not how it begins a turn"),
    ("qwen3:0.6b", CHATS["multi-turn"], "renders a turn differently when others follow"),
    ("deepseek-r1:8b", turns("hi", "<think>hm</think>ho"), "leaves out the thought"),
    ("smollm2:135m", ASKED, "does not render this chat"),
]


@pytest.mark.parametrize(("name", "chat", "problem"), REFUSED)
def test_where_it_is_not_known_what_is_trained_on_one_line_says_why(name: str, chat: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as error:
        encoded(folder_of(name), chat)
    assert "\n" not in str(error.value)


def test_templates_that_were_trained_on_exactly_still_are() -> None:
    committed, now = cells_of(PAGE.read_text(encoding="utf-8")), cells_of(page())
    exact = {place: cell for place, cell in committed.items() if cell in (EXACT, EACH)}
    assert len(exact) > 1000
    lost = {place: now.get(place) for place, cell in exact.items() if now.get(place) not in (EXACT, cell)}
    assert lost == {}


def test_no_template_is_trained_on_otherwise_than_the_rendered_chat_says() -> None:
    assert [place for place, cell in cells_of(page()).items() if cell == WRONG] == []


def test_the_committed_page_is_that_of_these_templates_and_this_code() -> None:
    """Write it with `make chat-templates`, and look at what changed."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the model's own file, with its template."""
    gguf = next(REAL.rglob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("chat", CHATS)
def test_a_real_tokenizer_has_the_same_edges(smollm: Path, chat: str) -> None:
    assert encoded(smollm, CHATS[chat]) == SMOLLM.write(CHATS[chat])
