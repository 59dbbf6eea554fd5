"""Rows of chats and prompts, in each spelling and each kind of file."""

import json
from pathlib import Path

import pytest
from small_chats import turns

from toolkit.config.data_section import DataSection
from toolkit.data.documents.rows import RowReader
from toolkit.data.documents.sources import open_source


def document(row, row_format="chat"):
    return json.loads(RowReader(format=row_format).read(row, lambda: "here"))


CHAT = {"messages": turns("hi", "ho", system="Short.")}


@pytest.mark.parametrize(
    "row",
    [
        CHAT,
        {"messages": turns("hi", "ho"), "system": "Short."},
        {"messages": CHAT["messages"], "system": "Not this one.", "tools": None, "conversations": None},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "system": "Short."},
        {
            "messages": None,
            "conversations": [
                {"from": "system", "value": "Short."},
                {"from": "human", "value": "hi", "weight": None},
                {"from": "gpt", "value": "ho"},
            ],
        },
    ],
)
def test_every_spelling_of_a_chat_is_the_same_document(row):
    assert document(row) == CHAT


@pytest.mark.parametrize("tools", [[{"name": "clock"}], '[{"name": "clock"}]'])
def test_tools_may_be_a_list_or_its_json(tools):
    assert document(CHAT | {"tools": tools}) == CHAT | {"tools": [{"name": "clock"}]}


def test_what_else_a_turn_has_is_kept_for_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]}
    assert document({"messages": [*turns("hi"), call]})["messages"][1] == call


def test_a_prompt_may_be_empty_and_its_row_may_have_more():
    row = {"prompt": "", "completion": "ho"}
    assert document(row | {"id": 3}, "prompt_completion") == row


def rows_of(source: Path, **fields: str) -> list[dict[str, object]]:
    section = DataSection(source=str(source), seq_len=8, **{"format": "chat", **fields})
    return [json.loads(text) for chunk in open_source(section).chunks() for text in chunk.documents()]


ROWS = [{"messages": turns(f"hi {number}", "ho ü")} for number in range(30)]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "saved"])
def test_chats_are_read_from_every_kind_of_file(kind, tmp_path):
    import gzip

    import datasets

    path = tmp_path / f"chats.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    if kind == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    elif kind == "parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    else:
        path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    assert rows_of(path) == ROWS
