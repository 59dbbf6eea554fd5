"""Saving beside training: the same bytes, committed when asked, one at a time."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import SIZES, groups_of, save_tiny, write_beside

from toolkit.checkpoint import share_writer
from toolkit.checkpoint.async_saver import AsyncSaver
from toolkit.checkpoint.choose import choose
from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.manifest import read_manifest
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.save import Saved
from toolkit.checkpoint.source import TensorGroup
from toolkit.checkpoint.tensor_file import TensorFile
from toolkit.errors import CheckpointError


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.fails = False


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()

    class Held(TensorFile):
        def write(self, name: str, tensor: torch.Tensor) -> None:
            assert gate.event.wait(60)
            if gate.fails:
                raise OSError(28, "No space left on device")
            super().write(name, tensor)

    monkeypatch.setattr(share_writer, "TensorFile", Held)
    yield gate
    gate.event.set()


def begin(saver: AsyncSaver, run_dir: Path, step: int) -> Saved | None:
    state = {"step": step, "note": "x" * step}
    return saver.begin(run_dir, step, groups=groups_of(step), trainer_state=state, beside=write_beside)


def poll_until_saved(saver: AsyncSaver) -> Saved:
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


def test_nothing_is_visible_before_the_poll_that_finds_it_written(tmp_path: Path, gate: Gate) -> None:
    saver = AsyncSaver(sizes=SIZES)
    begin(saver, tmp_path, 7)
    assert saver.is_running
    assert saver.poll() is None
    assert not list(tmp_path.glob("step-*"))
    gate.event.set()
    saved = poll_until_saved(saver)
    assert choose(tmp_path).path == saved.path
    assert not saver.is_running
    assert saver.poll() is None
    assert saver.finish() is None


def test_training_may_change_the_tensors_while_they_are_written(tmp_path: Path, gate: Gate) -> None:
    weight = torch.ones(5)
    group = TensorGroup(kind="model", specs=[TensorSpec.of("w", weight)], tensors=[("w", weight)])
    saver = AsyncSaver()
    saver.begin(tmp_path, 1, groups=[group], trainer_state={})
    weight.zero_()
    gate.event.set()
    saved = saver.finish()
    assert saved is not None
    assert torch.equal(CheckpointReader(saved.path).tensor("model", "w").clone(), torch.ones(5))


def test_a_new_one_waits_for_the_one_before(tmp_path: Path, gate: Gate) -> None:
    saver = AsyncSaver(sizes=SIZES)
    assert begin(saver, tmp_path, 7) is None
    threading.Timer(0.3, gate.event.set).start()
    before = begin(saver, tmp_path, 8)
    assert before is not None
    assert before.step == 7
    after = saver.finish()
    assert after is not None
    assert after.step == 8
    assert choose(tmp_path).path == after.path


def test_a_failure_is_raised_by_the_poll_and_leaves_the_old_one(tmp_path: Path, gate: Gate) -> None:
    gate.event.set()
    save_tiny(tmp_path, 6)
    saver = AsyncSaver(sizes=SIZES)
    gate.fails = True
    begin(saver, tmp_path, 7)
    with pytest.raises(CheckpointError, match="ran out of room"):
        poll_until_saved(saver)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000006"]
    assert not saver.is_running
    gate.fails = False
    begin(saver, tmp_path, 8)
    assert saver.finish() is not None


def test_a_gathering_that_fails_leaves_nothing_and_the_saver_usable(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(5)
        raise RuntimeError("lost a rank")

    specs = [TensorSpec.of(name, torch.ones(5)) for name in ("w", "v")]
    saver = AsyncSaver()
    with pytest.raises(RuntimeError, match="lost a rank"):
        saver.begin(tmp_path, 1, groups=[TensorGroup(kind="model", specs=specs, tensors=broken())], trainer_state={})
    assert list(tmp_path.iterdir()) == []
    begin(saver, tmp_path, 2)
    assert saver.finish() is not None
