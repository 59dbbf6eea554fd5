"""`dstk ls`, `dstk cat` and `dstk cp` find recipes by name, as every other command does."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.cli.main import main
from toolkit.config import load_recipe
from toolkit.config.gallery import find_recipe, gallery
from toolkit.errors import RecipeError

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        return (stopped.value.code, *capfd.readouterr())

    return run


def test_every_recipe_is_listed_once(run: Run) -> None:
    code, out, _ = run("ls")
    named = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert code == 0
    assert [name for name in named if name in gallery()] == list(gallery())


def test_a_pattern_and_a_family_select(run: Run) -> None:
    shown = [word for word in run("ls", "--family", "llama")[1].split() if word in gallery()]
    assert shown == [name for name in gallery() if name.startswith("llama/")]
    assert [word for word in run("ls", "demo")[1].split() if word in gallery()] == ["demo", "demo-chat", "demo-dpo"]


@pytest.mark.parametrize("words", [("ls", "no-such-recipe"), ("ls", "--family", "lama"), ("cat", "nothing")])
def test_what_is_not_there_is_one_line(words: tuple[str, ...], run: Run) -> None:
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_cp_copies_what_cat_prints_and_replaces_nothing(run: Run, tmp_path: Path) -> None:
    assert run("cp", "demo") == (0, "demo.yaml\n", "")
    (tmp_path / "demo.yaml").write_text(run("cat", "demo")[1] + "# mine\n")
    code, _, err = run("cp", "demo", str(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert (tmp_path / "demo.yaml").read_text().endswith("# mine\n")


def test_a_name_needs_its_family_only_where_two_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: Path(f"{name}.yaml") for name in ("a/one-lora", "b/one-lora", "a/two-lora")}
    monkeypatch.setattr("toolkit.config.gallery.gallery", lambda: known)
    assert find_recipe("two-lora") == find_recipe("a/two-lora") == Path("a/two-lora.yaml")
    with pytest.raises(RecipeError, match="Did you mean a/one-lora or b/one-lora"):
        find_recipe("one-lora")
    with pytest.raises(RecipeError, match="Did you mean two-lora"):
        find_recipe("two-lor")


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("demo") == gallery()["demo"]
    (tmp_path / "demo").touch()
    assert find_recipe("demo") == Path("demo")


def test_a_recipe_is_loaded_by_its_name() -> None:
    assert load_recipe("demo") == load_recipe(gallery()["demo"])


@pytest.mark.whole
def test_a_wheel_brings_the_gallery(tmp_path: Path) -> None:
    """Without a checkout, from any directory."""
    ignored = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    pip = [sys.executable, "-m", "pip", "-q"]
    wheel = ["wheel", str(tmp_path / "source"), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, *wheel], check=True, timeout=300)
    (built,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(built)], check=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}

    def dstk(*words: str) -> str:
        command = [sys.executable, "-m", "toolkit", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    assert [word for word in dstk("ls").split() if word in gallery()] == list(gallery())
    assert dstk("cp", "gpt2-pretrain") == "gpt2-pretrain.yaml\n"
    assert (tmp_path / "gpt2-pretrain.yaml").read_text() == gallery()["gpt2/gpt2-pretrain"].read_text()
    assert "site/share" in dstk("validate", "gpt2-pretrain", "--layout", "8xH100")
