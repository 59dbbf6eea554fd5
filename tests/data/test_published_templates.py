"""What is trained on with the chat templates of published models, against TRL's training versions of them.

TRL has the templates as their models ship them, and for each a second version with marks around what is trained on.
Where the two projects define it differently, BEYOND says how, and docs/data.md says why.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from small_chats import encoded, marked, turns, write_tokenizer
from transformers import AutoTokenizer

from toolkit.errors import DataError

SPEC = find_spec("trl")  # without importing it
assert SPEC is not None
assert SPEC.origin is not None
TEMPLATES = Path(SPEC.origin).parent / "chat_templates"


@dataclass(frozen=True)
class Family:
    """Tokens of a model, and `beyond`: what TRL's marks have at the edges of a turn that a model is not to emit."""

    eos: str
    special: tuple[str, ...]
    beyond: tuple[tuple[str, str], ...] = ()
    stops: tuple[str, ...] = ()
    """Of its generation_config.json."""


_HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
_NEWLINE = ("\n»", "»\n")  # a turn ends with its last special token; nobody generates the line end after it
_PHI = Family("<|endoftext|>", ("<|end|>",), (("\n<|endoftext|>»", "»\n<|endoftext|>"), _NEWLINE))
_GEMMA = Family("<eos>", ("<start_of_turn>", "<end_of_turn>"), (_NEWLINE,))
_DEEPSEEK = tuple(f"<｜{name}｜>" for name in ("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end"))
FAMILIES = {
    "llama3": Family("<|eot_id|>", _HEADERS),
    # The generation prompt ends with the line end after the role.
    "qwen2_5": Family("<|im_end|>", ("<|im_start|>",), (("«\n", "\n«"), _NEWLINE)),
    "qwen3": Family("<|im_end|>", ("<|im_start|>", "<think>", "</think>"), (_NEWLINE,)),
    "qwen3_instruct_2507": Family("<|im_end|>", ("<|im_start|>",), (_NEWLINE,)),
    "gemma": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": _PHI,
    "phi3_5": _PHI,
    "cohere": Family("<|END_OF_TURN_TOKEN|>", ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")),
    "lfm2_v2": Family("<|im_end|>", ("<|im_start|>",), (_NEWLINE,)),
    # The generation prompt has the role.
    "gptoss": Family(
        "<|return|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        (("«<|start|>assistant", "<|start|>assistant«"),),
        stops=("<|return|>", "<|call|>"),
    ),
    "llama3_2": Family("<|eot_id|>", _HEADERS),
    "deepseekv3": Family("<｜end▁of▁sentence｜>", _DEEPSEEK),
    "deepseek_r1_distill": Family("<｜end▁of▁sentence｜>", _DEEPSEEK),
    "glm4moe": Family(
        "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>", "</tool_call>"),
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "smolvlm": Family("<end_of_utterance>", ("<|im_start|>",)),
    "idefics3": Family("<end_of_utterance>", ("<|begin_of_text|>",)),
}
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
ZONE = {"type": "object", "properties": {"zone": {"type": "string", "description": "Z."}}, "required": ["zone"]}
TOOL = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": ZONE}}
ASKED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "name": "clock", "content": "noon"}
ANSWER = {"role": "assistant", "content": "It is noon."}
CHATS: dict[str, Any] = {
    "multi-turn": turns("hi", "hello", "what?", "one two"),
    "system": turns("hi", "ho", "and?", "yes", system="Short."),
    "empty": turns("", "", "", "x"),
    "unicode": turns("שלום 日本", "e\u0301 🙂👩‍👩‍👧 مرحبا\n日本語", "ok", "naïve"),
    "unfinished": turns("hi", "ho", "and?"),
    "tools": {"messages": [*turns("time?"), ASKED, TOLD, ANSWER], "tools": [TOOL]},
    "developer": [{"role": "developer", "content": "be brief"}, *turns("hi", "ho")],
    "assistant first": [*turns("", "hello")[1:], *turns("what?", "one two")],
    "text beside a call": {"messages": [*turns("time?"), ASKED | {"content": "Wait."}, TOLD, ANSWER], "tools": [TOOL]},
    "ends in a call": {"messages": [*turns("time?"), ASKED], "tools": [TOOL]},
    "thought": [*turns("hi"), {"role": "assistant", "content": "ho", "reasoning_content": "hm", "thinking": "hm"}],
    "thoughts and tools": {
        "messages": [*turns("time?"), ASKED | {"reasoning_content": "hm"}, TOLD, ANSWER | {"reasoning_content": "so"}],
        "tools": [TOOL],
    },
}


@cache
def folder_of(name: str) -> Path:
    family = FAMILIES[name]
    template = (TEMPLATES / f"{name}.jinja").read_text()
    return write_tokenizer(Path(mkdtemp()), template, eos=family.eos, special=family.special, stops=family.stops)


def trl_marks(name: str, chat: Any) -> str:
    """What TRL's training version of a template marks, less what is beyond a turn."""
    chat = {"messages": chat} if isinstance(chat, list) else chat
    tokenizer = AutoTokenizer.from_pretrained(folder_of(name))
    found = tokenizer.apply_chat_template(
        chat["messages"],
        tools=chat.get("tools"),
        chat_template=(TEMPLATES / f"{name}_training.jinja").read_text(),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    text = marked(tokenizer, found["input_ids"], found["assistant_masks"])
    for theirs, ours in FAMILIES[name].beyond:
        text = text.replace(theirs, ours)
    return text


def only_last(text: str) -> str:
    """A marked text in which only the last mark is left."""
    before, _, last = text.rpartition("«")
    return before.replace("«", "").replace("»", "") + "«" + last


PLAIN = ("llama3", "qwen2_5", "qwen3_instruct_2507", "gemma", "gemma3", "phi3", "phi3_5", "cohere", "lfm2_v2")
SAME = [
    *((name, chat) for name in PLAIN for chat in ("multi-turn", "system", "empty", "unicode", "unfinished")),
    *((name, "tools") for name in ("qwen2_5", "qwen3_instruct_2507", "lfm2_v2", "gptoss")),
    *((name, "thought") for name in ("qwen3", "gptoss")),
    ("qwen3", "thoughts and tools"),
    *((name, "assistant first") for name in PLAIN if name not in ("gemma", "gemma3", "cohere")),
]
SAME.remove(("gemma", "system"))


@pytest.mark.parametrize(("name", "chat"), SAME)
def test_what_is_trained_on_is_what_trl_marks(name: str, chat: str) -> None:
    expected = trl_marks(name, CHATS[chat])
    assert expected.count("«") >= 1
    assert encoded(folder_of(name), CHATS[chat]) == expected
    assert encoded(folder_of(name), CHATS[chat], "last_assistant") == only_last(expected)


@pytest.mark.parametrize("name", PLAIN)
def test_without_a_thought_that_the_template_leaves_out_it_is_what_trl_marks_too(name: str) -> None:
    with pytest.raises(DataError, match=r"leaves out the thought of a turn.*data\.dropped_text"):
        encoded(folder_of(name), CHATS["thought"])
    assert encoded(folder_of(name), CHATS["thought"], dropped_text="allow") == trl_marks(name, CHATS["thought"])


MARKED = ("llama3", "qwen2_5", "gemma", "phi3", "phi3_5", "cohere")


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant"])
@pytest.mark.parametrize("name", MARKED)
def test_a_training_template_of_trl_trains_on_what_it_marks(name: str, train_on: Any) -> None:
    """Phi-3's mark the end-of-text token after the whole chat too, as a part of its own."""
    family, chat = FAMILIES[name], CHATS["multi-turn"]
    template = (TEMPLATES / f"{name}_training.jinja").read_text()
    folder = write_tokenizer(Path(mkdtemp()), template, eos=family.eos, special=family.special)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    expected = marked(tokenizer, found["input_ids"], found["assistant_masks"])
    assert expected.count("«") == 2
    assert encoded(folder, chat, train_on) == (expected if train_on == "assistant" else only_last(expected))


BY_HAND = {
    ("llama3_2", "multi-turn", "assistant"): "user<|end_header_id|>\n\nhi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«hello<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nwhat?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«one two<|eot_id|>»",
    ("llama3_2", "tools", "assistant"): "time?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    '«{"name": "clock", "parameters": {"zone": "UTC"}}<|eot_id|>»'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"noon"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n«It is noon.<|eot_id|>»",
    # These write the last turn as no earlier one.
    (
        "qwen3",
        "multi-turn",
        "last_assistant",
    ): "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\none two<|im_end|>»\n",
    ("qwen3", "tools", "last_assistant"): "<tool_response>\nnoon\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n«<think>\n\n</think>\n\nIt is noon.<|im_end|>»\n",
    ("gptoss", "multi-turn", "last_assistant"): "<|start|>assistant<|channel|>final<|message|>hello<|end|>"
    "<|start|>user<|message|>what?<|end|><|start|>assistant«<|channel|>final<|message|>one two<|return|>»",
    ("gptoss", "tools", "last_assistant"): '<|message|>"noon"<|end|>'
    "<|start|>assistant«<|channel|>final<|message|>It is noon.<|return|>»",
}


@pytest.mark.parametrize(("name", "chat", "train_on"), BY_HAND)
def test_what_is_trained_on_is_what_the_model_has_to_write(name: str, chat: str, train_on: Any) -> None:
    found = encoded(folder_of(name), CHATS[chat], train_on)
    assert found.endswith(BY_HAND[name, chat, train_on])
    assert found.count("«") == BY_HAND[name, chat, train_on].count("«")


TWO_THOUGHTS = [*CHATS["thought"], *turns("and?"), CHATS["thought"][1] | {"reasoning_content": "so", "thinking": "so"}]
EACH = [(name, chat) for name in ("qwen3", "gptoss") for chat in ("multi-turn", "tools", "unicode")]


@pytest.mark.parametrize(("name", "chat"), [*EACH, ("qwen3", "two thoughts")])
def test_each_turn_is_trained_on_as_the_last_one_where_the_template_rewrites_earlier_turns(
    name: str, chat: str
) -> None:
    """What is trained on of each is what TRL marks of it, and what precedes it is what the model is given."""
    given = CHATS.get(chat, TWO_THOUGHTS)
    given = {"messages": given} if isinstance(given, list) else given
    found = encoded(folder_of(name), given, "each_assistant").split("\f")
    # TRL ends earlier answers of gpt-oss with the token after which the model would go on.
    expected = re.findall("«(.*?)»", trl_marks(name, given), re.DOTALL)
    expected = [re.sub(r"(final<\|message\|>[^<]*)<\|end\|>$", r"\1<|return|>", text) for text in expected]
    tokenizer = AutoTokenizer.from_pretrained(folder_of(name))
    ends = [number for number, turn in enumerate(given["messages"]) if turn["role"] == "assistant"]
    for text, answer, end in zip(found, expected, ends, strict=True):
        options: Any = {"tools": given.get("tools"), "tokenize": False, "add_generation_prompt": True}
        before = tokenizer.apply_chat_template(given["messages"][:end], **options)
        assert text.rstrip("\n") == f"{before}«{answer}»"


def test_a_thought_that_later_turns_do_not_see_is_trained_on_with_its_turn() -> None:
    first, second = encoded(folder_of("gptoss"), TWO_THOUGHTS, "each_assistant").split("\f")
    thought = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"
    assert first.endswith(f"hi<|end|><|start|>assistant«{thought.format('hm', 'ho')}»")
    between = "<|start|>assistant<|channel|>final<|message|>ho<|end|><|start|>user<|message|>and?<|end|>"
    assert second.endswith(f"hi<|end|>{between}<|start|>assistant«{thought.format('so', 'ho')}»")


REFUSED = [
    ("gemma", "system", "System role not supported"),
    ("gemma", "tools", "roles must alternate"),
    ("llama3", "tools", "leaves out a call of a tool"),
    ("phi3", "tools", "leaves out a call of a tool"),
    ("qwen3", "multi-turn", "renders a turn differently when others follow"),
    ("qwen3", "tools", "renders a turn differently when others follow"),
    ("gptoss", "multi-turn", "renders a turn differently when others follow"),
    ("gptoss", "thoughts and tools", "renders a turn differently when others follow"),
    # Their generation prompt begins a thought, which they remove from what they are given.
    ("deepseekv3", "multi-turn", "generation prompt is not how it begins a turn"),
    ("deepseek_r1_distill", "thought", "generation prompt is not how it begins a turn"),
    # The model stops by writing the role of whoever is next.
    ("glm4moe", "multi-turn", "ends a turn without a token at which generation stops, so"),
    ("glm4moe", "ends in a call", "ends a turn without a token at which generation stops .'</tool_call>' is neither"),
    ("qwen2_5", "developer", "leaves out the content of the developer message that begins 'be brief'"),
    ("llama3_2", "text beside a call", "leaves out the content of the assistant message beside a call of a tool"),
    ("smolvlm", "multi-turn", "leaves out the content of the user message that begins 'hi'"),
    ("idefics3", "multi-turn", "leaves out the content of the user message that begins 'hi'"),
    ("gemma", "assistant first", "roles must alternate"),
]


@pytest.mark.parametrize(("name", "chat", "problem"), REFUSED)
def test_where_it_is_not_known_what_is_trained_on_one_line_says_why(name: str, chat: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as error:
        encoded(folder_of(name), CHATS[chat])
    assert "\n" not in str(error.value)
    first = CHATS[chat]["messages"] if isinstance(CHATS[chat], dict) else CHATS[chat]
    assert f"the chat that begins {first[0]['content']!r}" in str(error.value)


def test_thoughts_that_the_model_is_given_and_training_would_not_have_are_refused_for_the_last_turn_too() -> None:
    """gpt-oss is given the thought before a call of a tool until it has answered, and not with its answer."""
    with pytest.raises(DataError, match="generation prompt is not how it begins a turn"):
        encoded(folder_of("gptoss"), CHATS["thoughts and tools"], "last_assistant")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("smolvlm", "idefics3")])
def test_all_is_the_whole_text(name: str) -> None:
    text = encoded(folder_of(name), CHATS["multi-turn"], "all")
    assert (text[0], text[-1], text.count("«")) == ("«", "»", 1)
