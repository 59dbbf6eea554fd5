"""Tables of commands where the output is no terminal: 100 columns or COLUMNS, and nothing is cut off."""

import shlex

import pytest

from toolkit.cli.main import main
from toolkit.report.terminal import PIPE_COLUMNS, columns

# Sentences are whole lines in a pipe; the lines of tables are these commands' longest.
TABLES = (
    "plan --model llama-3-8b --gpus 64xH100 --seq 4096 --global-batch 512 --top 5",
    "memory --model llama-3-8b --layout dp8-tp4-pp4-z1-recompute --gpu H100-80",
    "memory --model gpt2-xl --layout dp8-z1 --gpu A100-40 --sweep zero,micro",
    "families llama bloom gpt2 mixtral bert cpmant",
    "ls",
    "schedule --pp 4 --micro-batches 8",
)


@pytest.mark.parametrize("command", TABLES, ids=lambda command: command.split()[0])
@pytest.mark.parametrize("said", [None, 80, 120])
def test_a_table_in_a_pipe_is_as_wide_as_it_may_be(
    command: str, said: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if said is not None:
        monkeypatch.setenv("COLUMNS", str(said))
    with pytest.raises(SystemExit):
        main(shlex.split(command))
    lines = capsys.readouterr().out.splitlines()
    # Rich fills the rows of a table with blanks up to its width, and ends them with one.
    rows = [line for line in lines if line.endswith(" ") or "──" in line]
    assert rows
    assert max(map(len, rows)) <= (said or PIPE_COLUMNS)
    assert not any("…" in line for line in rows)


@pytest.mark.parametrize(
    ("said", "width"),
    [
        (None, PIPE_COLUMNS),
        ("", PIPE_COLUMNS),
        ("72", 72),
        ("7", 40),
        ("wide", PIPE_COLUMNS),
        ("9" * 400, PIPE_COLUMNS),
    ],
)
def test_columns_are_those_of_the_variable_or_of_a_page(
    said: str | None, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if said is not None:
        monkeypatch.setenv("COLUMNS", said)
    assert columns() == width
