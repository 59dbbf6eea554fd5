"""`dstk train --nnodes`: the ranks of one machine of several."""

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli.main import main

START = """
import sys
from pathlib import Path
from toolkit.launch.spawn import Machine, run_local_ranks
machine = Machine(number=1, machines=3, master_addr="node0", master_port=4000)
sys.exit(run_local_ranks(Path(sys.argv[1]), [], 2, machine=machine))
"""


def started(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run `body` as both ranks of the second of three machines."""
    (tmp_path / "script.py").write_text(body)
    words = [sys.executable, "-c", START, str(tmp_path / "script.py")]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_ranks_are_numbered_over_all_machines(tmp_path: Path) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    # One write for each line: where Python's output is unbuffered, print() writes every word by itself, and the lines
    # of two ranks mix.
    body = f"import os; os.write(1, ' '.join(os.environ[name] for name in {names.split()!r}).encode() + b'\\n')"
    done = started(tmp_path, body)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["2 6 0 2 node0 4000", "3 6 1 2 node0 4000"]


def test_a_killed_rank_is_named_by_its_number_in_the_job(tmp_path: Path) -> None:
    body = "import os, signal\nif os.environ['LOCAL_RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)"
    done = started(tmp_path, body)
    assert done.returncode == 128 + 9
    assert done.stderr.startswith("error: rank 3 was ended by SIGKILL.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nnodes", "2", "--nproc", "1"), "needs --node-rank and --master-addr"),
        (("--nnodes", "2", "--nproc", "1", "--node-rank", "2", "--master-addr", "a"), "they count from 0 to 1"),
        (("--nnodes", "2", "--node-rank", "1", "--master-addr", "a"), "with no --nproc"),
        (("--nnodes", "2", "--nproc", "1", "--node-rank", "1", "--master-addr", "a", "--restarts", "1"), "--restarts"),
        (("--nproc", "2", "--node-rank", "1"), "need --nnodes"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "demo", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert (ended.value.code, message in line) == (2, True), line
