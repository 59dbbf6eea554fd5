"""Which text of a chat is trained on, whatever a template does: between « and » in what is expected.

The templates are written for these tests; test_published_templates.py and tests/real have those of real models.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import small_chats
from small_chats import CHATML, turns, write_tokenizer

from toolkit.errors import DataError

_ROLE = "{{ '<|' + message.role + '|>\n' + message.content }}"
TEMPLATES = {
    "chatml": CHATML,
    "qwen": "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML,
    "mistral": """\
{{ bos_token }}{% set talk = messages %}{% set before = '' %}
{% if messages[0].role == 'system' %}
{% set talk = messages[1:] %}{% set before = messages[0].content + '\n\n' %}
{% endif %}
{% for message in talk %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if message.role == 'user' %}{{ '[INST] ' + (before if loop.first else '') + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{% endfor %}""",
    "phi": "{% for message in messages %}" + _ROLE + "{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "zephyr": "{% for message in messages %}" + _ROLE + "{{ eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "alpaca": """\
{% for message in messages %}
{% if message.role == 'system' %}{{ message.content + '\n\n' }}
{%- elif message.role == 'user' %}{{ '### Instruction:\n' + message.content + '\n\n' }}
{%- else %}{{ '### Response:\n' + message.content + eos_token + '\n\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}""",
    "marked": """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}""",
    # Thoughts of all turns but the last are removed, as reasoning models' templates do.
    "thinking": """\
{% for message in messages %}
{% set content = message.content if loop.last else message.content.split('</think>')[-1] %}
{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
}
TEMPLATES["smollm"] = TEMPLATES["qwen"].replace("Be kind.", "You are a helpful AI assistant named SmolLM.")


@cache
def folder_of(template: str) -> Path:
    return write_tokenizer(Path(mkdtemp()), TEMPLATES.get(template, template))


def encoded(template: str, chat: dict[str, Any] | list[dict[str, str]], train_on: Any = "assistant") -> str:
    return small_chats.encoded(folder_of(template), chat, train_on)


EXPECTED = {
    "chatml": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«hello<|im_end|>»\n"
    "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n«one two<|im_end|>»\n",
    "mistral": "<s>[INST] hi [/INST]« hello</s>»[INST] what? [/INST]« one two</s>»",
    "zephyr": "<|user|>\nhi</s>\n<|assistant|>\n«hello</s>»\n<|user|>\nwhat?</s>\n<|assistant|>\n«one two</s>»\n",
    "alpaca": "### Instruction:\nhi\n\n### Response:\n«hello</s>»\n\n"
    "### Instruction:\nwhat?\n\n### Response:\n«one two</s>»\n\n",
}
EXPECTED["phi"] = EXPECTED["zephyr"].replace("</s>", "<|end|>") + "</s>"
EXPECTED["marked"] = EXPECTED["chatml"]
EXPECTED["qwen"] = "<|im_start|>system\nBe kind.<|im_end|>\n" + EXPECTED["chatml"]
EXPECTED["smollm"] = EXPECTED["qwen"].replace("Be kind.", "You are a helpful AI assistant named SmolLM.")


@pytest.mark.parametrize("template", EXPECTED)
def test_the_turns_of_the_assistant_and_the_tokens_that_end_them_are_trained_on(template):
    assert encoded(template, turns("hi", "hello", "what?", "one two")) == EXPECTED[template]


WITH_SYSTEM = {
    "qwen": "<|im_start|>system\nShort.<|im_end|>\n"
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«ho<|im_end|>»\n",
    "mistral": "<s>[INST] Short.\n\nhi [/INST]« ho</s>»",
    "zephyr": "<|system|>\nShort.</s>\n<|user|>\nhi</s>\n<|assistant|>\n«ho</s>»\n",
    "alpaca": "Short.\n\n### Instruction:\nhi\n\n### Response:\n«ho</s>»\n\n",
}


@pytest.mark.parametrize("template", WITH_SYSTEM)
def test_a_system_message_is_read_and_not_trained_on(template):
    assert encoded(template, turns("hi", "ho", system="Short.")) == WITH_SYSTEM[template]


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_an_empty_turn_is_trained_to_end(template):
    assert encoded(template, turns("", "")) == ("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n«<|im_end|>»\n")


@pytest.mark.parametrize("template", ["chatml", "marked", "mistral", "zephyr", "alpaca"])
@pytest.mark.parametrize("answer", ["naïve 日本語 🙂", "a\n\nb", "«x»", "one one one"])
def test_any_text_is_trained_on_whole(template, answer):
    found = encoded(template, turns("日本語 🙂 one", answer))
    assert found == encoded(template, turns("日本語 🙂 one", "X")).replace("X", answer)


def test_white_space_before_an_answer_is_the_models_where_the_prompt_ends_without():
    assert encoded("mistral", turns("one", "")) == "<s>[INST] one [/INST]« </s>»"
    assert "[/INST]«  two</s>»" in encoded("mistral", turns("one", " two"))


LAST = EXPECTED["chatml"].replace("«hello<|im_end|>»", "hello<|im_end|>")


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_only_the_last_turn_is_trained_on_if_asked(template):
    assert encoded(template, turns("hi", "hello", "what?", "one two"), "last_assistant") == LAST


@pytest.mark.parametrize("template", ["chatml", "marked", "phi", "thinking"])
def test_all_is_every_token(template):
    found = encoded(template, turns("hi", "hello", "what?", "one two"), "all")
    assert found.startswith("«")
    assert found.index("»") == len(found) - 1


def test_all_has_the_space_that_ends_a_chat():
    assert encoded("{{ messages[0].content + '</s> ' }}", turns("", "")[1:], "all") == "«</s> »"


@pytest.mark.parametrize("template", ["chatml", "marked", "mistral"])
def test_a_turn_after_the_last_answer_is_not_trained_on(template):
    chat = turns("hi", "hello", "what?")
    assert encoded(template, chat).count("«") == 1
    assert encoded(template, chat, "last_assistant") == encoded(template, chat)


class TestATemplateThatRewritesEarlierTurns:
    CHAT = turns("hi", "a</think>hello", "what?", "b</think>one")

    def test_is_refused_for_all_turns(self):
        with pytest.raises(DataError, match=r"renders a turn differently when others follow.*train_on") as error:
            encoded("thinking", self.CHAT)
        assert "\n" not in str(error.value)

    def test_is_exact_for_the_last(self):
        assert encoded("thinking", self.CHAT, "last_assistant") == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
            "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n«b</think>one<|im_end|>»\n"
        )

    def test_is_refused_for_the_last_if_a_turn_follows_that_rewrites_it(self):
        with pytest.raises(DataError, match="differently when others follow"):
            encoded("thinking", [*self.CHAT, *turns("and?")], "last_assistant")


REFUSED = {
    "mistral": ([*turns("hi"), *turns("hi", "ho")], "roles must alternate"),
    CHATML.partition("{% if add")[0]: (turns("hi", "ho"), "ignores add_generation_prompt"),
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '</s>' }}{% endfor %}"
    "<|assistant|>": (
        turns("hi", "ho"),
        r"writes '<\|assistant\|>' after each turn",
    ),
    CHATML.replace("message.content", "message.content.split('</think>')[-1]"): (
        turns("hi", "hm</think>ho"),
        "leaves out the thought",
    ),
    CHATML.replace(
        "'<|im_end|>\n' }}{% endfor", "('' if message.role == 'assistant' else '<|im_end|>\n') }}{% endfor"
    ): (
        turns("hi", "ho"),
        "without a special token",
    ),
    CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif"): (
        turns("hi", "ho"),
        "is not how it begins",
    ),
    "{{ messages[0].content }}{% generation %}{% endgeneration %}{% generation %}{{ messages[1].content }}"
    "{% endgeneration %}{% generation %}x{% endgeneration %}": (turns("a", "b", "c", "d"), "marks 3 parts of 2 turns"),
    "{% for": (turns("hi", "ho"), "does not render this chat"),
}


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_that_does_not_say_which_text_is_trained_on_is_refused(template):
    chat, problem = REFUSED[template]
    with pytest.raises(DataError, match=problem) as error:
        encoded(template, chat)
    assert "\n" not in str(error.value)


def test_a_chat_may_begin_with_the_assistant():
    assert encoded("chatml", turns("", "hello")[1:]) == "<|im_start|>assistant\n«hello<|im_end|>»\n"


def test_tools_are_passed_to_the_template():
    template = "{% for tool in tools or [] %}{{ tool.name + '\n' }}{% endfor %}" + CHATML
    assert encoded(template, {"messages": turns("hi", "ho"), "tools": [{"name": "clock"}]}) == (
        "clock\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«ho<|im_end|>»\n"
    )


def test_a_completion_and_its_end_of_text_are_trained_on_with_the_token_that_spans_its_beginning():
    assert encoded("chatml", {"prompt": "one two ", "completion": "three"}) == "one two« three</s>»"
