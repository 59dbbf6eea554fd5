"""With `--json`, stdout has the JSON of the command and nothing else, whatever a library prints there."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from tiny_checkpoint import save_tiny

from toolkit.cli import json_output
from toolkit.cli.main import cli, main

NOISE = "a library says hello"
ANSWERS: dict[str, list[str]] = {
    "checkpoint inspect": ["saved"],
    "checkpoint list": ["saved"],
    "checkpoint verify": ["saved"],
    "compare": ["first", "second", "--tolerance", "1"],
    "doctor": [],
    "families": ["gpt2"],
    "lint": ["config.json"],
    "memory": ["--model", "gpt2", "--layout", "dp2", "--gpu", "A100-40", "--micro", "1", "--seq", "512"],
    "plan": ["--model", "gpt2", "--gpus", "2xA100-40", "--seq", "512", "--global-batch", "8", "--top", "1"],
    "schedule": ["--pp", "2", "--micro-batches", "2"],
    "train": ["demo", "--rehearse", "--nproc", "2"],
}
"""Of each command that prints JSON, arguments with which it does. `lint` spells it `--format json`."""


def commands(group: click.Group = cli, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def flag_of(command: click.Command) -> list[str]:
    for option in command.params:
        if "--json" in option.opts:
            return ["--json"]
        # `dstk config` prints a file, of which JSON is one kind.
        if "--format" in option.opts and {"json", "text"} <= set(getattr(option.type, "choices", ())):
            return ["--format", "json"]
    return []


def print_everywhere() -> None:
    print(NOISE)
    os.write(1, f"{NOISE}\n".encode())
    ctypes.CDLL(None).puts(NOISE.encode())
    subprocess.run([sys.executable, "-S", "-c", f"print({NOISE!r})"], check=True)
    child = os.fork()
    if not child:
        os.write(1, f"{NOISE}\n".encode())
        os._exit(0)
    os.waitpid(child, 0)


def _surround(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print before and after what a command does, once it has said that its stdout is JSON."""
    reserved = json_output._reserved_stdout

    @contextmanager
    def noisy() -> Iterator[None]:
        with reserved():
            print_everywhere()
            yield
            print_everywhere()

    monkeypatch.setattr(json_output, "_reserved_stdout", noisy)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "saved", 5)
    Path("config.json").write_text(json.dumps({"train_batch_size": 8}))
    for name in ("first", "second"):
        Path(name).mkdir()
        Path(name, "metrics.jsonl").write_text('{"step": 1, "loss": 5}\n{"step": 2, "loss": 4}\n')
    return tmp_path


def test_every_command_that_prints_json_is_here() -> None:
    assert {path for path, command in commands() if flag_of(command)} == set(ANSWERS)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("path", ANSWERS)
def test_stdout_is_json_and_nothing_else(
    path: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = dict(commands())[path]
    _surround(monkeypatch)
    with pytest.raises(SystemExit):
        main([*path.split(), *ANSWERS[path], *flag_of(command)])
    out, err = capfd.readouterr()
    assert isinstance(json.loads(out), dict | list)
    assert err.count(NOISE) >= 8


def test_the_real_stdout_has_the_answer_alone_and_has_it_back_afterwards(tmp_path: Path) -> None:
    script = tmp_path / "answer.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_json_output import print_everywhere\n"
        "from toolkit.cli.json_output import print_json, stdout_is_json\n"
        "@stdout_is_json(lambda options: True)\n"
        "def answer():\n"
        "    print_everywhere()\n"
        "    print_json({'answer': 42})\n"
        "    print_everywhere()\n"
        "answer()\n"
        "print('afterwards')\n"
    )
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert ended.stdout == '{\n  "answer": 42\n}\nafterwards\n', ended.stderr
    assert ended.stderr.count(NOISE) == 10
