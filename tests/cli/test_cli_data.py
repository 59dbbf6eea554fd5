"""`dstk data`: the numbers of a recipe's data, and its samples with what is trained on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from small_chats import turns, write_tokenizer

from toolkit.cli.data import command
from toolkit.config import dump_recipe


@pytest.fixture
def shown(make_recipe: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """Print the data of a recipe of three chats, the last of them too long for a sample."""
    import json

    answers = ("ho", "one two", "three " * 30)
    rows = (json.dumps({"messages": turns("hi", answer)}) + "\n" for answer in answers)
    (tmp_path / "chats.jsonl").write_text("".join(rows))
    write_tokenizer(tmp_path / "tokenizer")
    names = {"data__source": tmp_path / "chats.jsonl", "data__tokenizer": tmp_path / "tokenizer"}
    recipe = make_recipe(
        **{name: str(path) for name, path in names.items()}, data__format="chat", data__eval_fraction=0.0
    )
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))

    def show(*arguments: str) -> str:
        result = CliRunner().invoke(command, [str(tmp_path / "r.yaml"), *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return show


def test_the_numbers(shown: Callable[..., str]) -> None:
    lines = dict(line.split(maxsplit=1) for line in shown().splitlines())
    assert lines["documents"] == "3, 0 held out"
    assert "1 longer than 33 tokens truncated" in lines["samples"]
    assert "1 longer than 33 tokens split" in shown("data.overlong=split")


def test_a_layout_is_taken_as_training_takes_it(shown: Callable[..., str]) -> None:
    assert shown("--layout", "dp2-z1") == shown()


def test_samples_show_what_is_trained_on(shown: Callable[..., str]) -> None:
    found = shown("--show", "3", "data.packing=padded")
    assert "assistant\n»ho<|im_end|>«" in found
    assert "assistant\n»one two<|im_end|>«" in found
    assert found.count("user\nhi<|im_end|>") == 3


def test_packed_documents_are_shown_one_by_one(shown: Callable[..., str]) -> None:
    assert shown("--show", "1", "data.seq_len=64", "data.overlong=drop").count("»") == 2


def test_of_text_everything_is_trained_on(shown: Callable[..., str], corpus: Path) -> None:
    text = ("data.format=text", "data.tokenizer=bpe-300", f"data.source={corpus}")
    assert "100.0% trained on" in shown(*text)
