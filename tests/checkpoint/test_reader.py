"""Reading a checkpoint: slices without the rest, in whatever dtype is asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoint import save_tiny, tensors_of

from toolkit.checkpoint.reader import CheckpointReader, StoredTensor
from toolkit.checkpoint.select import select_checkpoint
from toolkit.errors import CheckpointError
from toolkit.parallel.shard import Shard


def test_every_tensor_of_every_kind_is_found(tmp_path: Path) -> None:
    reader = CheckpointReader(save_tiny(tmp_path, 4).path)
    expected = tensors_of(4)
    assert sorted(reader.specs) == sorted(expected)
    assert (reader.step, reader.trainer_state) == (4, {"step": 4, "note": "xxxx"})
    for kind, tensors in expected.items():
        assert sorted(reader.specs[kind]) == sorted(tensors)
        for name, value in tensors.items():
            stored = reader.tensor(kind, name)
            assert (stored.shape, stored.dtype) == (value.shape, value.dtype)
            assert torch.equal(stored.clone(), value)


def test_a_shard_takes_its_rows_and_no_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = CheckpointReader(save_tiny(tmp_path, 4).path)
    read_elements = []
    read = StoredTensor._read

    def count(stored: StoredTensor, ranges: tuple[slice, ...]) -> torch.Tensor:
        values = read(stored, ranges)
        read_elements.append(values.numel())
        return values

    monkeypatch.setattr(StoredTensor, "_read", count)
    full = tensors_of(4)["exp_avg"]["wte.weight"]
    rows = Shard(name="wte.weight", shape=(17, 5), dim=0, pieces=((2, 3), (9, 1)), padding=1)
    taken = rows.take(reader.tensor("exp_avg", "wte.weight"))
    assert torch.equal(taken, torch.cat([full[2:5], full[9:10], torch.zeros(1, 5)]))
    assert sum(read_elements) == 4 * 5
    columns = Shard(name="wte.weight", shape=(17, 5), dim=1, pieces=((1, 2),))
    assert torch.equal(columns.take(reader.tensor("exp_avg", "wte.weight")), full[:, 1:3])


def test_another_dtype_may_be_requested(tmp_path: Path) -> None:
    reader = CheckpointReader(save_tiny(tmp_path, 4).path)
    read = reader.tensor("model", "wte.weight", dtype=torch.bfloat16)
    assert torch.equal(read.clone(), tensors_of(4)["model"]["wte.weight"].bfloat16())


@pytest.mark.parametrize(("kind", "name"), [("momentum", "wte.weight"), ("exp_avg", "h.0.mask"), ("model", "nope")])
def test_a_missing_tensor_is_named(tmp_path: Path, kind: str, name: str) -> None:
    reader = CheckpointReader(save_tiny(tmp_path, 4).path)
    assert not reader.has(kind, name)
    with pytest.raises(CheckpointError, match=f"no {kind} of {name}"):
        reader.tensor(kind, name)


def test_a_hugging_face_directory_has_a_model_and_no_step(tmp_path: Path) -> None:
    values: dict[str, Any] = {"a": torch.randn(3, 2), "b": torch.randn(4).half()}
    save_file(values, tmp_path / "model.safetensors")
    reader = CheckpointReader(select_checkpoint(tmp_path).path)
    assert (list(reader.specs), reader.step, reader.trainer_state) == (["model"], None, None)
    assert all(torch.equal(reader.tensor("model", name).clone(), value) for name, value in values.items())


def test_a_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        CheckpointReader(tmp_path)
