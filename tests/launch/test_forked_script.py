"""Ranks that are forked from a process with their imports: each is what `python script` would be."""

import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

LAUNCHER = """
import sys, types
from pathlib import Path
from toolkit.launch.spawn import run_local_ranks

def preload():
    sys.modules["imported_once"] = types.ModuleType("imported_once")
    {more}

script, nproc, *arguments = sys.argv[1:]
sys.exit(run_local_ranks(Path(script), arguments, int(nproc), preload=preload))
"""


def launch(folder: Path, script: str, *arguments: str, nproc: int = 1, more: str = "") -> tuple[int, str, str]:
    """Run `script` on forked ranks; return the exit code, and what they printed."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-c", LAUNCHER.format(more=more), str(path), str(nproc), *arguments]
    # A job that a shell runs in the background inherits that Ctrl-C is ignored.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, preexec_fn=listening)
    return done.returncode, done.stdout, done.stderr


def test_ranks_have_the_imports_of_their_parent_and_what_a_script_has(tmp_path: Path) -> None:
    script = """
        import atexit, os, signal, sys
        atexit.register(lambda: os.write(1, f"at exit {os.environ['RANK']}\\n".encode()))
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        mine = __name__ == "__main__" and sys.argv[0] == __file__ and sys.path[0] == os.path.dirname(__file__)
        fresh = handlers == [signal.default_int_handler, signal.SIG_DFL]
        place = os.environ["RANK"], os.environ["WORLD_SIZE"], "imported_once" in sys.modules, mine, fresh, sys.argv[1:]
        os.write(1, (" ".join(map(str, place)) + "\\n").encode())  # at once: two ranks write to one pipe
    """
    code, out, err = launch(tmp_path, script, "--config", "a b", nproc=2)
    assert (code, err) == (0, "")
    expected = [f"{rank} 2 True True True ['--config', 'a b']" for rank in (0, 1)] + ["at exit 0", "at exit 1"]
    assert sorted(out.splitlines()) == sorted(expected)


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("raise SystemExit(2)", 2, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('one line')", 1, "one line"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "ended by SIGKILL"),
    ],
)
def test_a_rank_ends_as_a_script_does(tmp_path: Path, script: str, code: int, message: str) -> None:
    found, _, err = launch(tmp_path, script)
    assert found == code
    assert message in err
    assert "run_local_ranks" not in err, "the traceback of a rank begins in its script"


def test_ranks_are_started_afresh_where_forking_is_not_safe(tmp_path: Path) -> None:
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    script = "import sys; print('imported_once' in sys.modules)"
    code, out, _ = launch(tmp_path, script, nproc=2, more=thread)
    assert (code, sorted(out)) == (0, sorted("False\nFalse\n"))  # two ranks may write at the same time


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_imports(tmp_path: Path, number: int) -> None:
    more = f"import os, time; os.kill(os.getpid(), {number}); time.sleep(600)"
    code, out, err = launch(tmp_path, "print('never')", more=more)
    assert (code, out) == (128 + number, "")
    assert len(err.splitlines()) == 1
    assert signal.Signals(number).name in err


def test_a_rank_ends_with_the_process_that_forked_it(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import time; print('here', flush=True); time.sleep(600)")
    command = [sys.executable, "-c", LAUNCHER.format(more=""), str(path), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline()
        launcher.kill()
        assert launcher.stdout.read() == "", "the rank has the other end of the pipe"
