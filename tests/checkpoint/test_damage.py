"""300 damaged checkpoints: each is detected before anything is loaded, and its file is named."""

import random
import shutil
from pathlib import Path

import pytest
from nonempty import nonempty
from tiny_checkpoint import save_tiny

from toolkit.checkpoint.select import select_checkpoint
from toolkit.checkpoint.verify import verify
from toolkit.errors import CheckpointError

CASES_PER_KIND = 50


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def test_damage_is_detected_in_its_file_and_the_previous_checkpoint_is_used(
    undamaged: Path, tmp_path: Path, damage: object, fifth: int
) -> None:
    for seed in nonempty(range(fifth * CASES_PER_KIND // 5, (fifth + 1) * CASES_PER_KIND // 5)):
        chance = random.Random(seed)
        run_dir = tmp_path / str(seed)
        shutil.copytree(undamaged, run_dir)
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
        chosen = select_checkpoint(run_dir)
        assert chosen.path.name == "step-00000001"
        assert chosen.notices[0].startswith("step-00000002 is damaged: ")
        assert chosen.notices[0].endswith("; step-00000001 is used")
        with pytest.raises(CheckpointError, match="step-00000002 is damaged"):
            select_checkpoint(run_dir, strict=True)
        with pytest.raises(CheckpointError, match="is damaged"):
            select_checkpoint(newest)


def test_a_complete_checkpoint_has_no_problems(undamaged: Path) -> None:
    assert [verify(undamaged / f"step-0000000{step}") for step in (1, 2)] == [[], []]


def test_a_checkpoint_in_the_directory_of_another_step_is_reported(undamaged: Path, tmp_path: Path) -> None:
    shutil.copytree(undamaged / "step-00000001", tmp_path / "step-00000009")
    assert verify(tmp_path / "step-00000009") == ["manifest.json: of step 1, in the directory of step 9"]


def test_a_checkpoint_may_be_copied_to_any_name(undamaged: Path, tmp_path: Path) -> None:
    shutil.copytree(undamaged / "step-00000001", tmp_path / "best")
    assert not verify(tmp_path / "best")
    assert select_checkpoint(tmp_path / "best").path == tmp_path / "best"


def test_a_file_that_is_not_in_the_manifest_is_reported(undamaged: Path, tmp_path: Path) -> None:
    shutil.copytree(undamaged / "step-00000001", tmp_path / "step")
    (tmp_path / "step" / "optimizer" / "extra.txt").write_text("hello")
    assert verify(tmp_path / "step") == ["optimizer/extra.txt: not in the manifest"]


def test_every_damaged_file_is_reported(undamaged: Path, tmp_path: Path) -> None:
    shutil.copytree(undamaged / "step-00000001", tmp_path / "step")
    files = [path for path in sorted((tmp_path / "step").rglob("*")) if path.suffix == ".safetensors"]
    for file in files:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    said = [problem.partition(":")[0] for problem in verify(tmp_path / "step")]
    assert said == sorted(file.relative_to(tmp_path / "step").as_posix() for file in files)


def test_headers_are_read_before_anything_is_hashed(
    undamaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.checkpoint import verify as module

    shutil.copytree(undamaged / "step-00000001", tmp_path / "step")
    (tmp_path / "step" / "config.json").unlink()
    monkeypatch.setattr(module.on_disk, "hash_file", lambda path: pytest.fail(f"hashed {path}"))
    assert verify(tmp_path / "step") == ["config.json: missing"]
