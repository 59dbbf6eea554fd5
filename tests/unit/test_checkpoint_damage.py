"""300 ways in which a disk damages a checkpoint: each is found before anything is loaded, and the file is named."""

import random
import shutil
from pathlib import Path

import pytest
from tiny_checkpoint import save_tiny

from toolkit.checkpoint.choose import choose
from toolkit.checkpoint.verify import verify
from toolkit.errors import CheckpointError

CASES_PER_KIND = 50


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints that have the same files of the same sizes."""
    run_dir = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        save_tiny(run_dir, step, trainer_state={"step": step})
    return run_dir


def bit_flip(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def truncation(file: Path, chance: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.truncate(chance.randrange(1, file.stat().st_size))


def empty(file: Path, chance: random.Random) -> None:
    file.write_bytes(b"")


def missing(file: Path, chance: random.Random) -> None:
    file.unlink()


def of_another_step(file: Path, chance: random.Random) -> None:
    shutil.copyfile(str(file).replace("step-00000002", "step-00000001"), file)


def of_another_rank(file: Path, chance: random.Random) -> None:
    """Two files of tensors change places."""
    others = [path for path in sorted(file.parent.glob("*.safetensors")) if path != file]
    other, content = chance.choice(others), file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES = (bit_flip, truncation, empty, missing, of_another_step, of_another_rank)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("fifth", range(5))
def test_damage_is_found_its_file_named_and_the_checkpoint_before_used(
    whole: Path, tmp_path: Path, damage: object, fifth: int
) -> None:
    for seed in range(fifth * CASES_PER_KIND // 5, (fifth + 1) * CASES_PER_KIND // 5):
        chance = random.Random(seed)
        run_dir = tmp_path / str(seed)
        shutil.copytree(whole, run_dir)
        newest = run_dir / "step-00000002"
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        if damage is of_another_rank:
            files = [path for path in files if path.suffix == ".safetensors"]
        if damage is of_another_step:  # the index and the config are the same at every step
            files = [path for path in files if "index" not in path.name and path.name != "config.json"]
        file = files[seed % len(files)]
        damage(file, chance)  # type: ignore[operator]
        name = file.relative_to(newest).as_posix()

        problems = verify(newest)
        assert any(problem.startswith(f"{name}: ") for problem in problems), (name, problems)
        chosen = choose(run_dir)
        assert chosen.path.name == "step-00000001"
        assert chosen.notices[0].startswith("step-00000002 is damaged: ")
        assert chosen.notices[0].endswith("; step-00000001 is used")
        with pytest.raises(CheckpointError, match="step-00000002 is damaged"):
            choose(run_dir, strict=True)
        with pytest.raises(CheckpointError, match="is damaged"):
            choose(newest)


def test_a_whole_checkpoint_has_no_problems(whole: Path) -> None:
    assert [verify(whole / f"step-0000000{step}") for step in (1, 2)] == [[], []]


def test_a_checkpoint_under_the_name_of_another_step_is_found(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "step-00000001", tmp_path / "step-00000009")
    assert verify(tmp_path / "step-00000009") == ["manifest.json: of step 1, in the directory of step 9"]


def test_a_checkpoint_may_be_copied_to_a_name_of_the_users(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "step-00000001", tmp_path / "best")
    assert not verify(tmp_path / "best")
    assert choose(tmp_path / "best").path == tmp_path / "best"


def test_a_file_that_the_manifest_does_not_know_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "step-00000001", tmp_path / "step")
    (tmp_path / "step" / "optimizer" / "extra.txt").write_text("hello")
    assert verify(tmp_path / "step") == ["optimizer/extra.txt: not in the manifest"]


def test_every_damaged_file_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "step-00000001", tmp_path / "step")
    files = [path for path in sorted((tmp_path / "step").rglob("*")) if path.suffix == ".safetensors"]
    for file in files:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    said = [problem.partition(":")[0] for problem in verify(tmp_path / "step")]
    assert said == sorted(file.relative_to(tmp_path / "step").as_posix() for file in files)


def test_headers_are_read_before_anything_is_hashed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.checkpoint import verify as module

    shutil.copytree(whole / "step-00000001", tmp_path / "step")
    (tmp_path / "step" / "config.json").unlink()
    monkeypatch.setattr(module, "hash_plain", lambda path: pytest.fail(f"hashed {path}"))
    assert verify(tmp_path / "step") == ["config.json: missing"]
