"""Bad inputs to every command: one line of a readable length, exit code 2, nothing left behind, no code run."""

import gc
import importlib
import os
import pkgutil
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import BAD_INPUTS, CONTRADICTIONS, Bad, Content, Special
from tiny_checkpoint import save_tiny

import toolkit
from toolkit.cli.main import COMMANDS, main

SCRIPT = Path(__file__).parents[2] / "recipes" / "train.py"
RECIPE = """\
model:
  name_or_path: gpt2-tiny
  overrides: {n_embd: 8, n_layer: 1, n_head: 2, n_positions: 64, vocab_size: 257}
data:
  source: text.txt
  tokenizer: bpe-257
  seq_len: 32
  workers: 1
batch:
  global_batch_size: 4
  micro_batch_size: 2
optimizer:
  lr: 1e-3
train:
  steps: 2
  engine: reference
run_dir: out
"""
MOST_CHARACTERS = 300
SECONDS = 60
MOST_BYTES = 4 * 2**30
"""What waits for a pipe would never end, and what reads all of a device would take all memory."""


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that every row starts from."""
    import tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("template")
    (folder / "r.yaml").write_text(RECIPE)
    deepspeed = RECIPE.replace("reference", "deepspeed")
    (folder / "d.yaml").write_text(deepspeed)
    (folder / "moe.yaml").write_text(re.sub(r"gpt2-tiny\n.*\n", "mixtral-8x7b\n", deepspeed))
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    (folder / "ds.json").write_text("{}")
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=64, vocab_size=257))
    model.save_pretrained(folder / "hf")
    letters = {letter: number for number, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters | {"<end>": 256}, merges=[]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>").save_pretrained(folder / "hf")
    save_tiny(folder / "run", 2)
    steps = [f'{{"step": {step}, "loss": 5.0, "lr": 0.1, "grad_norm": 1.0}}\n' for step in (1, 2)]
    (folder / "run" / "metrics.jsonl").write_text("".join(steps))
    return folder


@pytest.fixture(scope="module")
def imported() -> None:
    """Import what commands import, once for all forks."""
    for module in pkgutil.walk_packages(toolkit.__path__, "toolkit."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.fixture
def here(template: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> Path:
    """A copy of it, as the working directory of a process that has no other caches, hub or ranks."""
    shutil.copytree(template, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("DSTK_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DSTK_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "here"


def change(path: Path, content: Content) -> None:
    """Make a path what a row says."""
    if callable(content):
        content = content(path.read_bytes())
    if path.is_symlink() or path.is_file():
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    match content:
        case bytes():
            path.write_bytes(content)
        case str():
            path.write_text(content)
        case Special(kind="link"):
            path.symlink_to(content.target)
        case Special(kind="pipe"):
            os.mkfifo(path)
        case Special(kind="socket"):
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
        case Special(kind="folder"):
            path.mkdir()
        case Special(kind="sparse"):
            path.touch()
            os.truncate(path, content.size)


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every path below a folder, with its kind, size and time of change."""
    return {
        str(path.relative_to(folder)): (facts.st_mode, facts.st_size, facts.st_mtime_ns)
        for path in folder.rglob("*")
        if (facts := path.lstat())
    }


def run_train(argv: list[str]) -> None:
    """recipes/train.py as a script."""
    from toolkit.launch.output import reported_errors

    with reported_errors():
        runpy.run_path(str(SCRIPT))["main"](argv)


def exit_code(program: str, argv: list[str]) -> int:
    """Run a command in a fork: nothing that it starts or limits stays in the process of the tests.

    The code is negative for the signal that ended it, as where it gives no answer in time.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gc.freeze()  # collecting what was imported would copy all of its pages
    code: Any = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_BYTES, resource.RLIM_INFINITY))
        sys.argv = [program, *argv] if program == "train.py" else ["dstk", program, *argv]
        run_train(argv) if program == "train.py" else main([program, *argv])
        code = 0
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: f"{bad.command[:60]}: {bad.says}"[:90])
def test_a_bad_input_is_one_line_and_leaves_nothing(
    here: Path, bad: Bad, capfd: pytest.CaptureFixture[str], imported: None
) -> None:
    for name, content in bad.files.items():
        change(here / name, content)
    before = snapshot(here)
    program, *argv = shlex.split(bad.command)
    code = exit_code(program, argv)
    out, err = capfd.readouterr()
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    assert err[:-1].isprintable()
    assert err.startswith(("error: ", "run/step-00000002: "))
    assert bad.says in err
    assert len(err) <= MOST_CHARACTERS, err
    assert snapshot(here) == before


@pytest.mark.parametrize("bad", CONTRADICTIONS, ids=lambda bad: bad.command)
def test_what_a_contradiction_advises_is_accepted(here: Path, bad: Bad, capfd: pytest.CaptureFixture[str]) -> None:
    """The override that it says to add, `train.eval_samples=null`, or to set."""
    for name, content in bad.files.items():
        change(here / name, content)
    _, _, advised = bad.says.rpartition(" ")
    program, *argv = shlex.split(bad.command)
    assert exit_code(program, [*argv, advised]) == 0, capfd.readouterr().err


def test_there_are_many_of_them_and_every_command_has_some() -> None:
    assert len({(bad.command, str(bad.files)) for bad in BAD_INPUTS}) == len(BAD_INPUTS) >= 150
    assert {bad.command.split()[0] for bad in BAD_INPUTS if bad.command} >= {*COMMANDS, "train.py"}
