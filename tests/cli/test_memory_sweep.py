"""`dstk memory --sweep`: each axis changes the setup of every kind of query, and names itself where users read it."""

from pathlib import Path

import pytest

from toolkit.cli.memory.command import command
from toolkit.cli.memory.options import MemoryQuery, from_model
from toolkit.cli.memory.sweep import AXES, varied


def query_of(*arguments: str) -> MemoryQuery:
    with command.make_context("memory", ["--model", "gpt2", "--layout", "dp4", *arguments]) as context:
        return from_model(context.params)


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("setup", [(), ("--framework", "megatron"), ("--trainer",)])
def test_each_value_of_an_axis_makes_another_setup(name: str, setup: tuple[str, ...]) -> None:
    query = query_of(*setup)
    values = AXES[name].values[:2] if name != "seq" else (512, 1024)
    first, second = (varied(query, {name: value}).setup for value in values)
    assert first != second


@pytest.mark.parametrize("name", AXES)
def test_the_help_names_each_axis(name: str) -> None:
    (option,) = (parameter for parameter in command.params if parameter.name == "sweep")
    assert name in str(getattr(option, "help", ""))


@pytest.mark.parametrize("name", AXES)
def test_the_document_names_each_axis(name: str) -> None:
    text = Path("docs/memory.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| `--sweep`"))
    assert f"`{name}`" in row


def test_the_title_of_a_grid_leaves_out_what_it_varies() -> None:
    query = query_of("--recompute", "full", "--micro", "2", "--seq", "512")
    assert "dp4-tp1-pp1-z0, bf16, micro-batch 2 x 512, " in query.title
    assert "recompute full" in query.title
    title = query.title_without(("zero", "micro", "recompute"))
    assert title.startswith("gpt2, dp4-tp1-pp1, bf16, samples of 512 tokens, accumulation 4, sdpa")
    assert "recompute" not in title
    assert "micro-batch 2, " in query.title_without(("seq",))
