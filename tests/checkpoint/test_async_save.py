"""Saving beside training: the same bytes, committed when asked, one at a time."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import SIZES, TensorGroup, contents_of, save_tiny

from toolkit.checkpoint import rank_writer
from toolkit.checkpoint.manifest import read_manifest
from toolkit.checkpoint.rank_writer import SafetensorsFile
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.save import AsyncSaver, SavedCheckpoint
from toolkit.checkpoint.select import select_checkpoint
from toolkit.errors import CheckpointError


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.fails = False


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()

    class GatedFile(SafetensorsFile):
        def write(self, name: str, tensor: torch.Tensor) -> None:
            assert gate.event.wait(60)
            if gate.fails:
                raise OSError(28, "No space left on device")
            super().write(name, tensor)

    monkeypatch.setattr(rank_writer, "SafetensorsFile", GatedFile)
    yield gate
    gate.event.set()


def begin(saver: AsyncSaver, run_dir: Path, step: int) -> SavedCheckpoint | None:
    return saver.begin(run_dir, step, contents_of(step))


def poll_until_saved(saver: AsyncSaver) -> SavedCheckpoint:
    while (saved := saver.poll()) is None:
        pass
    return saved


def test_the_bytes_are_those_of_the_synchronous_save(tmp_path: Path) -> None:
    saver = AsyncSaver(sizes=SIZES)
    begin(saver, tmp_path / "async", 7)
    saved = saver.finish()
    assert saved is not None
    other = save_tiny(tmp_path / "sync", 7).path
    assert read_manifest(saved.path) == read_manifest(other)
    for path in other.rglob("*"):
        assert path.is_dir() or path.read_bytes() == (saved.path / path.relative_to(other)).read_bytes()


def test_nothing_is_visible_before_everything_is_written(tmp_path: Path, gate: Gate) -> None:
    saver = AsyncSaver(sizes=SIZES)
    begin(saver, tmp_path, 7)
    assert saver.poll() is None
    assert not list(tmp_path.glob("step-*"))
    gate.event.set()
    saved = poll_until_saved(saver)
    assert select_checkpoint(tmp_path).path == saved.path
    assert saver.poll() is None
    assert saver.finish() is None


def test_training_may_change_the_tensors_while_they_are_written(tmp_path: Path, gate: Gate) -> None:
    weight = torch.ones(5)
    group = TensorGroup(kind="model", specs=[TensorSpec.of("w", weight)], tensors=[("w", weight)])
    saver = AsyncSaver()
    saver.begin(tmp_path, 1, contents_of(1, groups=[group]))
    weight.zero_()
    gate.event.set()
    saved = saver.finish()
    assert saved is not None
    assert torch.equal(CheckpointReader(saved.path).tensor("model", "w").clone(), torch.ones(5))


def test_begin_waits_for_the_previous_checkpoint(tmp_path: Path, gate: Gate) -> None:
    saver = AsyncSaver(sizes=SIZES)
    assert begin(saver, tmp_path, 7) is None
    threading.Timer(0.3, gate.event.set).start()
    before = begin(saver, tmp_path, 8)
    assert before is not None
    assert before.step == 7
    after = saver.finish()
    assert after is not None
    assert after.step == 8
    assert select_checkpoint(tmp_path).path == after.path


def test_poll_raises_a_failure_and_keeps_the_previous_checkpoint(tmp_path: Path, gate: Gate) -> None:
    gate.event.set()
    save_tiny(tmp_path, 6)
    saver = AsyncSaver(sizes=SIZES)
    gate.fails = True
    begin(saver, tmp_path, 7)
    with pytest.raises(CheckpointError, match="ran out of disk space"):
        poll_until_saved(saver)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000006"]
    assert saver.poll() is None
    gate.fails = False
    begin(saver, tmp_path, 8)
    assert saver.finish() is not None


def test_a_failed_gather_leaves_nothing_and_the_saver_usable(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(5)
        raise RuntimeError("lost a rank")

    specs = [TensorSpec.of(name, torch.ones(5)) for name in ("w", "v")]
    saver = AsyncSaver()
    group = TensorGroup(kind="model", specs=specs, tensors=broken())
    with pytest.raises(RuntimeError, match="lost a rank"):
        saver.begin(tmp_path, 1, contents_of(1, groups=[group]))
    assert list(tmp_path.iterdir()) == []
    begin(saver, tmp_path, 2)
    assert saver.finish() is not None
