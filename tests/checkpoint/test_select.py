"""Which checkpoint a run resumes from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoint import save_tiny

from toolkit.checkpoint.select import select_checkpoint
from toolkit.errors import CheckpointError


def spoil(checkpoint: Path, file: str = "trainer_state.json") -> None:
    (checkpoint / file).write_text("{}")


def test_the_newest_is_selected_without_a_notice(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_tiny(tmp_path, step)
    chosen = select_checkpoint(tmp_path)
    assert (chosen.path.name, chosen.notices, chosen.is_weights_only) == ("step-00000003", (), False)


def test_latest_is_not_trusted(tmp_path: Path) -> None:
    for step in (1, 2):
        save_tiny(tmp_path, step)
    (tmp_path / "latest").write_text("step-00000001\n")  # the saver died before it could say
    assert select_checkpoint(tmp_path).path.name == "step-00000002"


def test_a_missing_latest_does_not_start_a_new_run(tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    (tmp_path / "latest").unlink()
    assert select_checkpoint(tmp_path).path.name == "step-00000001"


def test_a_latest_that_names_a_missing_checkpoint_is_a_notice(tmp_path: Path) -> None:
    for step in (1, 2):
        save_tiny(tmp_path, step)
    shutil.rmtree(tmp_path / "step-00000002")
    assert select_checkpoint(tmp_path).notices == (
        "latest names step-00000002, which does not exist; step-00000001 is used",
    )


def test_each_damaged_checkpoint_is_a_notice(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_tiny(tmp_path, step)
    spoil(tmp_path / "step-00000003")
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    assert select_checkpoint(tmp_path).notices == (
        "step-00000003 is damaged: trainer_state.json: 2 bytes, where 31 were written",
        "step-00000002 is damaged: manifest.json: missing; step-00000001 is used",
    )


def test_an_older_damaged_checkpoint_is_not_reported(tmp_path: Path) -> None:
    for step in (1, 2):
        save_tiny(tmp_path, step)
    spoil(tmp_path / "step-00000001", "manifest.json")
    assert select_checkpoint(tmp_path, strict=True).notices == ()


def test_after_a_rollback_the_one_saved_last_is_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 15):
        save_tiny(tmp_path, step)
    assert select_checkpoint(tmp_path).path.name == "step-00000015"
    spoil(tmp_path / "step-00000015", "manifest.json")
    chosen = select_checkpoint(tmp_path)
    assert chosen.path.name == "step-00000020"
    assert "step-00000015 is damaged: manifest.json" in chosen.notices[0]


def test_if_none_is_complete_the_error_names_a_file_of_the_newest(tmp_path: Path) -> None:
    for step in (1, 2):
        spoil(save_tiny(tmp_path, step).path)
    with pytest.raises(CheckpointError, match=r"no checkpoint is complete. step-00000002 is damaged: trainer"):
        select_checkpoint(tmp_path)


@pytest.mark.parametrize("what", ["absent", "file", "empty", "other"])
def test_a_place_without_checkpoints_is_an_error(tmp_path: Path, what: str) -> None:
    place = tmp_path / what
    if what == "file":
        place.write_text("text")
    elif what != "absent":
        place.mkdir()
    if what == "other":
        (place / "recipe.yaml").write_text("model: {}")
    message = {"absent": "no such directory", "file": "a file, and not a directory"}.get(what, "no checkpoint in")
    with pytest.raises(CheckpointError, match=message):
        select_checkpoint(place)


def test_a_checkpoint_may_be_given_itself_also_through_a_link(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path / "run", 1)
    (tmp_path / "link").symlink_to(saved.path)
    assert select_checkpoint(saved.path).path == saved.path
    assert select_checkpoint(tmp_path / "link").path == tmp_path / "link"


def test_a_named_checkpoint_without_its_manifest_is_damaged_not_a_model(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path, 1)
    (saved.path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: manifest.json: missing"):
        select_checkpoint(saved.path)


def test_a_hugging_face_directory_is_weights_only(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert select_checkpoint(tmp_path).is_weights_only


def test_a_snapshot_of_links_in_the_hub_cache_is_read(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for i, name in enumerate(("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")):
        save_file({f"t{i}": torch.zeros(3)}, tmp_path / "blobs" / str(i))
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{i}")
    weight_map = {f"t{i}": f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)}
    (tmp_path / "snapshot" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert select_checkpoint(tmp_path / "snapshot").is_weights_only


def test_pickled_weights_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match="pickles are not read"):
        select_checkpoint(tmp_path)
