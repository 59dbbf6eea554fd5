"""Model directories are written completely or not at all, in shards, readable by everyone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from toolkit.checkpoint import model_directory
from toolkit.checkpoint.safetensors_header import TensorSpec

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(10)}


def write_model(directory: Path, tensors: Any = None, *, of: Any = None, **options: Any) -> None:
    """Write TENSORS, or those given, which are like `of`."""
    like = TENSORS if of is None else of
    specs = [TensorSpec.of(name, tensor) for name, tensor in like.items()]
    given = like.items() if tensors is None else tensors
    model_directory.write_model(directory, specs, given, **({"is_writer": True} | options))


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    read = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_shards_stay_below_their_size_and_the_index_finds_every_tensor(tmp_path: Path) -> None:
    write_model(tmp_path / "model", max_shard_bytes=40)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "model" / file)[name], TENSORS[name])
    assert len(set(index["weight_map"].values())) == 2


def test_a_transposed_view_is_stored_by_its_values(tmp_path: Path) -> None:
    write_model(tmp_path / "model", of={"a": TENSORS["a"].T})
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["a"], TENSORS["a"].T)


def test_other_ranks_consume_and_write_nothing(tmp_path: Path) -> None:
    seen = []
    write_model(tmp_path / "model", ((seen.append(name), (name, t))[1] for name, t in TENSORS.items()), is_writer=False)
    assert seen == list(TENSORS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "error"), [("abcd", ValueError), ("ab", ValueError), ("acb", AssertionError), ("abx", AssertionError)]
)
def test_an_extra_a_missing_and_another_tensor_are_errors(names: str, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        write_model(tmp_path / "model", [(name, TENSORS.get(name, torch.zeros(1))) for name in names])
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_the_old_model_and_no_garbage(tmp_path: Path) -> None:
    write_model(tmp_path / "model")

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.full((2, 3), 9.0)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_model(tmp_path / "model", broken())
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["a"], TENSORS["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_new_model_replaces_the_old_one_entirely(tmp_path: Path) -> None:
    write_model(tmp_path / "model", max_shard_bytes=40)
    write_model(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]


def test_files_have_the_permissions_that_the_user_set(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_model(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
