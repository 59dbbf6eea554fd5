"""Which text of a chat is trained on, whatever a template does: between « and » in what is expected.

The templates are written for these tests; test_published_templates.py and tests/real have those of real models.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import pytest
import small_chats
from small_chats import CHATML, turns, write_tokenizer

from toolkit.data.tokens.conversation_encoder import ConversationEncoder
from toolkit.data.tokens.rendering import Renderer
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


def encoded(
    template: str, chat: dict[str, Any] | list[dict[str, str]], train_on: Any = "assistant", **options: Any
) -> str:
    return small_chats.encoded(folder_of(template), chat, train_on, **options)


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


class TestTextThatTheTemplateLeavesOut:
    DEVELOPER = ({"role": "developer", "content": "be brief"}, *turns("hi", "ho"))
    CALLED = (*turns("hi"), {"role": "assistant", "content": "Wait.", "tool_calls": [{"name": "clock"}]})
    THOUGHT = (*turns("hi"), {"role": "assistant", "content": "ho", "reasoning": "hm", "thinking": "hm"})
    RULES = ({"role": "system", "content": "a"}, *turns("hi"), {"role": "system", "content": "b"}, *turns("", "ho")[1:])
    NO_DEVELOPER = CHATML.replace("{{ '<|im_start|>'", "{% if message.role != 'developer' %}{{ '<|im_start|>'", 1)
    NO_DEVELOPER = NO_DEVELOPER.replace("{% endfor %}", "{% endif %}{% endfor %}")
    CALL_OR_TEXT = CHATML.replace(
        "message.content", "(message.tool_calls[0].name if message.tool_calls else message.content)"
    )
    ONE_RULE = (
        "{% set last = namespace(rule='') %}{% for message in messages if message.role == 'system' %}"
        "{% set last.rule = message.content %}{% endfor %}{{ last.rule }}"
        "{% for message in messages if message.role != 'system' %}" + CHATML.partition("%}")[2]
    )
    LOST: ClassVar[dict[str, Any]] = {
        "a role": (NO_DEVELOPER, [*DEVELOPER], "the content of the developer message that begins 'be brief'"),
        "beside a call": (
            CALL_OR_TEXT,
            [*CALLED],
            "the content of the assistant message beside a call of a tool that begins 'Wait.'",
        ),
        "a call": (CHATML, [*CALLED], "a call of a tool"),
        "a field": (CHATML, [*THOUGHT], "the thought of a turn"),
        "a second one": (ONE_RULE, [*RULES], "the content of the system message that begins 'a'"),
        "the tools": (CHATML, {"messages": turns("hi", "ho"), "tools": [{"name": "clock"}]}, "the tools"),
    }

    @pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "each_assistant", "all"])
    @pytest.mark.parametrize("part", LOST)
    def test_is_refused_with_the_part_that_is_lost(self, part, train_on):
        template, chat, lost = self.LOST[part]
        with pytest.raises(DataError, match=rf"it leaves out {lost}\. .* or set data\.dropped_text") as error:
            encoded(template, chat, train_on)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("part", LOST)
    def test_is_left_out_where_that_is_allowed(self, part):
        template, chat, _ = self.LOST[part]
        assert encoded(template, chat, dropped_text="allow").count("«") == 1

    def test_the_rest_of_the_chat_is_as_without_it(self):
        found = encoded(self.NO_DEVELOPER, [*self.DEVELOPER], dropped_text="allow")
        assert found == encoded(self.NO_DEVELOPER, turns("hi", "ho"))

    def test_is_refused_where_a_template_with_marks_leaves_it_out(self):
        with pytest.raises(DataError, match="the content of the developer message"):
            encoded(TEMPLATES["marked"].replace("%}", "if message.role != 'developer' %}", 1), [*self.DEVELOPER])

    def test_is_looked_for_in_each_kind_of_message_once(self, monkeypatch):
        rendered = []
        render = Renderer.render
        monkeypatch.setattr(Renderer, "render", lambda *of, **by: rendered.append(1) or render(*of, **by))

        def count(chats: list[Any], dropped_text: Any) -> int:
            rendered.clear()
            encoder = ConversationEncoder(folder_of("chatml"), "<u2", "assistant", dropped_text=dropped_text)
            for chat in chats:
                encoder.encode(json.dumps({"messages": chat}))
            return len(rendered)

        chats = [turns(f"one {n}", f"two {n}", f"three {n}", f"four {n}", system="five") for n in range(20)]
        looked_at = count(chats[:1], "refuse") - count(chats[:1], "allow")
        assert looked_at == len(chats[0])
        assert count(chats, "refuse") - count(chats, "allow") == looked_at

    def test_is_looked_for_again_where_there_is_another_system_message(self):
        encoder = ConversationEncoder(folder_of(self.ONE_RULE), "<u2", "assistant")
        encoder.encode(json.dumps({"messages": turns("hi", "ho", system="a")}))
        with pytest.raises(DataError, match="the content of the system message that begins 'a'"):
            encoder.encode(json.dumps({"messages": [*self.RULES]}))

    def test_thoughts_of_earlier_turns_are_left_out_as_the_model_reads_them(self):
        template = CHATML.replace(
            "message.content", "(message.reasoning if loop.last and message.reasoning else '') + message.content"
        )
        chat: list[Any] = turns("hi", "ho", "and?", "so")
        chat[1]["reasoning"], chat[3]["reasoning"] = "hm", "ha"
        assert "«haso<|im_end|>»" in encoded(template, chat, "last_assistant")
        for train_on in ("assistant", "all"):
            with pytest.raises(DataError, match=r"leaves out the thought|differently when others follow"):
                encoded(template, chat, train_on)


class TestWhatEndsATurn:
    """Is what generation stops at: EOS, the tokens of generation_config.json, or what follows every turn."""

    CALLS = CHATML.replace(
        "message.content + '<|im_end|>\n'", "message.content + ('<call>x</call>' if message.tool_calls else '<|end|>')"
    )
    CALLED = (*turns("hi"), {"role": "assistant", "content": "", "tool_calls": [{"name": "clock"}]})
    NO_END = CHATML.replace("'<|im_end|>\n' }}{% endfor", "('' if message.role == 'assistant' else '\n') }}{% endfor")

    def written(self, template: str, *special: str, stops: tuple[str, ...] = (), eos: str = "</s>") -> Path:
        return write_tokenizer(Path(mkdtemp()), template, special=special, stops=stops, eos=eos)

    def test_no_token_that_ends_a_call_alone(self):
        folder = self.written(self.CALLS, "</call>")
        assert "«ho<|end|>»" in small_chats.encoded(folder, turns("hi", "ho"))
        with pytest.raises(DataError, match=r"generation stops \('</call>' is neither the EOS token nor in its gen"):
            small_chats.encoded(folder, [*self.CALLED])

    def test_unless_generation_stops_there(self):
        folder = self.written(self.CALLS, "</call>", stops=("</s>", "</call>"))
        assert small_chats.encoded(folder, [*self.CALLED]).endswith("«<call>x</call>»")

    def test_or_it_is_the_end_of_text_token(self):
        folder = self.written(self.CALLS, eos="</call>")
        assert small_chats.encoded(folder, [*self.CALLED]).endswith("«<call>x</call>»")

    @pytest.mark.parametrize("content", ["ho<|im_start|>", "ho\n\n"])
    def test_no_content_that_ends_in_an_added_token(self, content):
        folder = self.written(self.NO_END, "\n\n")
        with pytest.raises(DataError, match="without a token at which generation stops"):
            small_chats.encoded(folder, turns("hi", content))

    def test_no_white_space_that_is_an_added_token_and_follows_every_turn(self):
        folder = self.written(CHATML.replace("<|im_end|>\n", "\n\n"), "\n\n")
        with pytest.raises(DataError, match="without a token at which generation stops"):
            small_chats.encoded(folder, turns("hi", "ho"))

    def test_no_heading_that_follows_the_last_turn_alone(self):
        heading = "<|im_start|><|assistant|>"
        template = CHATML.partition("{% if add")[0] + "{% if not add_generation_prompt %}" + heading + "{% endif %}"
        template = (
            template.replace("<|im_end|>\n", "") + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        with pytest.raises(DataError, match=r"generation stops \('<\|assistant\|>' is neither"):
            encoded(template, turns("hi", "ho"))

    def test_the_first_of_several(self):
        template = CHATML.replace("<|im_end|>\n", "<|im_end|></s>\n")
        assert encoded(template, turns("hi", "ho")).endswith("«ho<|im_end|></s>»\n")
        folder = self.written(template, stops=("<|im_end|>",))
        assert small_chats.encoded(folder, turns("hi", "ho")).endswith("«ho<|im_end|>»</s>\n")

    def test_a_damaged_generation_config_is_an_error(self):
        folder = self.written(CHATML)
        (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
        with pytest.raises(DataError, match=r"its generation_config.json cannot be read"):
            small_chats.encoded(folder, turns("hi", "ho"))


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
        "without a token at which generation stops",
    ),
    CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif"): (
        turns("hi", "ho"),
        "is not how it begins",
    ),
    "{{ messages[0].content }}{% generation %}{% endgeneration %}{% generation %}{{ messages[1].content }}"
    "{% endgeneration %}{% generation %}x{% endgeneration %}{{ messages[2].content + messages[3].content }}": (
        turns("a", "b", "c", "d"),
        "marks 3 parts of 2 turns",
    ),
    "{% for": (turns("hi", "ho"), "does not render this chat"),
}


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_that_does_not_say_which_text_is_trained_on_is_refused(template):
    chat, problem = REFUSED[template]
    with pytest.raises(DataError, match=problem) as error:
        encoded(template, chat)
    assert "\n" not in str(error.value)


FIRST = "{% if messages[0].role == 'system' %}{% endif %}"
"""Fails for no messages."""
BEGUN = {
    "chatml": "<|im_start|>assistant\n«hello<|im_end|>»\n",
    FIRST + CHATML: "<|im_start|>assistant\n«hello<|im_end|>»\n",
    FIRST + TEMPLATES["phi"]: "<|assistant|>\n«hello<|end|>»\n</s>",
    TEMPLATES["qwen"]: EXPECTED["qwen"].partition("<|im_start|>user")[0] + "<|im_start|>assistant\n«hello<|im_end|>»\n",
    # The BOS is written with the first message.
    CHATML.replace("{{ '<|im", "{% if loop.first %}<s>{% endif %}{{ '<|im", 1): "<s><|im_start|>assistant\n"
    "«hello<|im_end|>»\n",
    # The generation prompt is written after the last message.
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '</s>' }}"
    "{% if loop.last and add_generation_prompt %}<|assistant|>{% endif %}{% endfor %}": "<|assistant|>«hello</s>»",
    # No generation prompt.
    FIRST + "<s>{% for message in messages %}{{ '[' + message.content + ']' if message.role == 'user' "
    "else ' ' + message.content + '</s>' }}{% endfor %}": "<s>« hello</s>»",
}


@pytest.mark.parametrize("template", BEGUN)
def test_a_chat_may_begin_with_the_assistant(template):
    assert encoded(template, turns("", "hello")[1:]) == BEGUN[template]
    assert encoded(template, turns("", "hello", "hi", "ho")[1:]).count("«") == 2


def test_a_chat_that_begins_with_the_assistant_is_refused_where_its_prompt_is_not_how_it_begins():
    with pytest.raises(DataError, match="generation prompt is not how it begins a turn"):
        encoded(FIRST + CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif"), turns("", "a")[1:])


def test_a_template_that_writes_a_heading_after_each_turn_is_refused_for_that_in_chats_of_any_length():
    heading = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    template = CHATML.partition("{% if add")[0] + heading
    for chat in (turns("hi", "ho"), turns("hi", "ho", "and?", "so")):
        with pytest.raises(DataError, match=r"ignores add_generation_prompt and writes '.*' after each turn"):
            encoded(template, chat)


def test_tools_are_passed_to_the_template():
    template = "{% for tool in tools or [] %}{{ tool.name + '\n' }}{% endfor %}" + CHATML
    assert encoded(template, {"messages": turns("hi", "ho"), "tools": [{"name": "clock"}]}) == (
        "clock\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«ho<|im_end|>»\n"
    )


def test_a_space_that_begins_a_completion_without_a_prompt_is_trained_on():
    assert encoded("chatml", {"prompt": "", "completion": " ?"}) == "« ?</s>»"


def test_a_completion_and_its_end_of_text_are_trained_on_with_the_token_that_spans_its_beginning():
    assert encoded("chatml", {"prompt": "one two ", "completion": "three"}) == "one two« three</s>»"
