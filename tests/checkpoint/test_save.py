"""Saving in one process: the files, the atomic commit, and which checkpoints are kept."""

import json
import os
import pickletools
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nonempty import nonempty
from safetensors.torch import load_file
from tiny_checkpoint import TensorGroup, groups_of, parameters, save_tiny, tensors_of

from toolkit.checkpoint import rank_writer
from toolkit.checkpoint.commit import Retention, delete_old_checkpoints
from toolkit.checkpoint.manifest import FileRecord, read_manifest
from toolkit.checkpoint.names import kind_of
from toolkit.checkpoint.rank_writer import RankWriter, WritePipeline
from toolkit.checkpoint.ranks import RankFailure, first_failure
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.save import FileSizes
from toolkit.checkpoint.save_plan import PlannedFile
from toolkit.checkpoint.select import select_checkpoint
from toolkit.checkpoint.tensor_source import TensorData
from toolkit.checkpoint.verify import verify
from toolkit.errors import CheckpointError


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_directory_has_the_documented_files(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path / "run", 120)
    assert saved.path == tmp_path / "run" / "step-00000120"
    assert names_in(tmp_path / "run") == ["latest", "step-00000120"]
    assert (tmp_path / "run" / "latest").read_text() == "step-00000120\n"
    files = {path.relative_to(saved.path).as_posix() for path in saved.path.rglob("*") if path.is_file()}
    small = {"config.json", "manifest.json", "model.safetensors.index.json", "trainer_state.json"}
    assert {kind_of(file)[0] for file in files - small} == {"model", "exp_avg", "exp_avg_sq"}  # type: ignore[index]
    assert files - {"manifest.json"} == {file.path for file in read_manifest(saved.path).files}
    assert json.loads((saved.path / "trainer_state.json").read_text())["step"] == 120


def test_every_tensor_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path, 3)
    for kind, tensors in tensors_of(3).items():
        stem = saved.path if kind == "model" else saved.path / "optimizer"
        read = {name: value for file in stem.glob(f"{kind}-0*") for name, value in load_file(file).items()}
        assert read.keys() == tensors.keys()
        assert all(
            torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in tensors.items()
        )
    index = json.loads((saved.path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(3)["model"].keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors_of(3)["model"].values())


def test_transformers_loads_the_directory_as_it_is(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, vocab_size=50))
    named = dict(model.named_parameters())  # tied ones once
    groups = [
        TensorGroup(kind=kind, specs=[TensorSpec.of(*item) for item in named.items()], tensors=named.items())
        for kind in ("model", "exp_avg")
    ]
    saved = save_tiny(tmp_path, 5, groups=groups, write_model_files=model.config.save_pretrained)
    assert len(list(saved.path.glob("model-*.safetensors"))) > 3
    read, info = AutoModelForCausalLM.from_pretrained(saved.path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.arange(10)[None]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), read.parameters(), strict=True))
    assert torch.equal(model.eval()(ids).logits, read.eval()(ids).logits)


def test_nothing_on_disk_is_a_pickle(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path, 3)
    for path in nonempty(saved.path.rglob("*")):
        if path.is_file():
            with pytest.raises(ValueError, match=r".*"):
                list(pickletools.genops(path.read_bytes()))


def test_files_have_the_permissions_that_the_user_set(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    saved = save_tiny(tmp_path, 3)
    modes = {path.stat().st_mode for path in [*saved.path.rglob("*"), tmp_path / "latest"] if path.is_file()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save_tiny(tmp_path, 3)
    save_tiny(tmp_path, 3, trainer_state={"step": 3, "note": "again"})
    assert names_in(tmp_path) == ["latest", "step-00000003"]
    assert CheckpointReader(tmp_path / "step-00000003").trainer_state == {"step": 3, "note": "again"}
    assert not verify(tmp_path / "step-00000003")


def test_a_failed_gather_leaves_the_previous_checkpoint_and_no_garbage(tmp_path: Path) -> None:
    save_tiny(tmp_path, 3)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(parameters(4).items()))
        raise RuntimeError("lost a rank")

    groups = groups_of(4)
    groups[1] = TensorGroup(kind="exp_avg", specs=groups[1].specs, tensors=broken())
    with pytest.raises(RuntimeError, match="lost a rank"):
        save_tiny(tmp_path, 4, groups=groups)
    assert names_in(tmp_path) == ["latest", "step-00000003"]


@pytest.mark.parametrize("count", [0, 2])
def test_a_missing_tensor_is_an_error(tmp_path: Path, count: int) -> None:
    groups = groups_of(4)
    few = list(parameters(4).items())[:count]
    groups[2] = TensorGroup(kind="exp_avg_sq", specs=groups[2].specs, tensors=few)
    with pytest.raises(CheckpointError) as caught:
        save_tiny(tmp_path, 4, groups=groups)
    assert (caught.value.rank, str(caught.value.reason).partition(":")[0]) == (0, "ValueError")
    assert names_in(tmp_path) == []


def test_a_tensor_that_differs_from_its_spec_is_an_error(tmp_path: Path) -> None:
    groups = groups_of(4)
    wrong = {name: value.double() for name, value in parameters(4).items()}
    groups[2] = TensorGroup(kind="exp_avg_sq", specs=groups[2].specs, tensors=wrong.items())
    with pytest.raises(CheckpointError, match=r"optimizer/exp_avg_sq-0.*float64 was given"):
        save_tiny(tmp_path, 4, groups=groups)
    assert names_in(tmp_path) == []


def test_a_small_file_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        raise PermissionError(13, "Permission denied", str(directory / "config.json"))

    with pytest.raises(CheckpointError, match=r"rank 0 failed at .*config.json \(Permission denied\)") as raised:
        save_tiny(tmp_path, 4, write_model_files=fail)
    assert "\n" not in str(raised.value)
    assert names_in(tmp_path) == []


def test_a_run_directory_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no directory")
    with pytest.raises(CheckpointError, match="rank 0 failed"):
        save_tiny(tmp_path / "run", 4)


def test_everything_is_fsynced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of fsync and rename is all that a loss of power leaves to go by."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def trace_fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def trace_rename(source: Any, target: Any, **options: Any) -> None:
        events.append(("rename", str(target)))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", trace_fsync)
    monkeypatch.setattr(os, "rename", trace_rename)
    run_dir = tmp_path / "new" / "run"
    saved = save_tiny(run_dir, 4)
    committed = events.index(("rename", str(saved.path)))
    inside = {path.relative_to(saved.path).as_posix() for path in saved.path.rglob("*")} | {"."}
    before = {path.partition(".tmp/")[2] or "." for kind, path in events[:committed] if ".tmp" in path}
    assert before == inside
    last = events[committed - 1]
    assert last[0] == "fsync"
    assert last[1].endswith(".tmp")  # the folder itself, after all that is in it
    assert events[committed + 1] == ("fsync", str(run_dir))
    assert [kind for kind, _ in events[committed + 2 :]] == ["fsync", "rename", "fsync"]  # latest
    assert ("fsync", str(run_dir.parent)) in events[:committed]


def test_leftovers_of_dead_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    save_tiny(tmp_path, 3)
    for leftover in (".step-00000004.0badcafe.tmp", ".step-00000003.0badcafe.old"):
        (tmp_path / leftover / "optimizer").mkdir(parents=True)
        (tmp_path / leftover / "optimizer" / "file").write_text("half of it")
    (tmp_path / ".latest.0badcafe.tmp").write_text("step-0000")
    kept = [".git", ".step-4.tmp", "step-00000001.tmp", ".model.77.tmp"]
    for name in kept:
        (tmp_path / name).mkdir()
    save_tiny(tmp_path, 5)
    assert names_in(tmp_path) == sorted([*kept, "latest", "step-00000003", "step-00000005"])


def test_a_checkpoint_that_was_moved_aside_is_used_and_restored(tmp_path: Path) -> None:
    save_tiny(tmp_path, 3)
    (tmp_path / "step-00000003").rename(tmp_path / ".step-00000003.0badcafe.old")
    chosen = select_checkpoint(tmp_path)
    assert chosen.path.name == ".step-00000003.0badcafe.old"
    assert CheckpointReader(chosen.path).step == 3
    save_tiny(tmp_path, 4)
    assert names_in(tmp_path) == ["latest", "step-00000003", "step-00000004"]
    assert not verify(tmp_path / "step-00000003")


def test_a_failed_replacement_restores_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, 3)
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.endswith(".tmp") and target.name == "step-00000003":
            raise OSError(5, "Input/output error", str(target))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_tiny(tmp_path, 3)
    assert names_in(tmp_path) == ["latest", "step-00000003"]
    assert not verify(tmp_path / "step-00000003")


def test_a_failure_to_write_latest_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    saved = save_tiny(tmp_path, 3)
    assert "latest still names an older checkpoint" in saved.notices[0]
    assert select_checkpoint(tmp_path).path == saved.path


def steps_in(run_dir: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted(run_dir.glob("step-*"))]


def test_the_newest_and_those_of_every_nth_step_are_kept(tmp_path: Path) -> None:
    for step in range(10, 90, 10):
        save_tiny(tmp_path, step, retention=Retention(newest=2, every=30))
    assert steps_in(tmp_path) == [30, 60, 70, 80]
    assert names_in(tmp_path) == ["latest", *(f"step-000000{step}" for step in (30, 60, 70, 80))]


def test_newest_means_saved_last_even_after_a_rollback(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_tiny(tmp_path, step)
    save_tiny(tmp_path, 15, retention=Retention(newest=2))
    assert steps_in(tmp_path) == [15, 30]
    assert select_checkpoint(tmp_path).path.name == "step-00000015"
    save_tiny(tmp_path, 20, retention=Retention(newest=2))
    assert steps_in(tmp_path) == [15, 20]


def test_what_latest_names_is_never_deleted(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_tiny(tmp_path, step)
    (tmp_path / "latest").write_text("step-00000010\n")
    assert not delete_old_checkpoints(tmp_path, Retention(newest=1))
    assert steps_in(tmp_path) == [10, 30]


def test_only_checkpoints_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "model.safetensors").write_text("not ours")
    (tmp_path / "step-00000002").symlink_to(tmp_path / "step-00000001")
    for step in (10, 20):
        save_tiny(tmp_path, step, retention=Retention(newest=1))
    assert steps_in(tmp_path) == [1, 2, 20]


def test_a_failed_deletion_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, 10)
    remove = shutil.rmtree

    def fail(path: Path, **options: Any) -> None:
        if options:
            return remove(path, **options)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", fail)
    saved = save_tiny(tmp_path, 20, retention=Retention(newest=1))
    assert "step-00000010 could not be deleted (Permission denied)" in saved.notices[0]
    assert steps_in(tmp_path) == [20]


def test_a_slow_disk_blocks_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = tuple(TensorSpec(name=f"t{i}", shape=(1024,), dtype=torch.float32) for i in range(20))
    write, gate = rank_writer.write_all, threading.Event()
    monkeypatch.setattr(rank_writer, "write_all", lambda *arguments: (gate.wait(60), write(*arguments))[1])
    file = PlannedFile(path="model.safetensors", kind="model", rank=0, specs=specs)
    writer = RankWriter(tmp_path, [file], rank=0, pipeline=WritePipeline(buffers=3, buffer_bytes=4096))
    given: list[str] = []

    def tensors() -> Iterator[TensorData]:
        for spec in specs:
            yield "model", spec.name, torch.ones(1024)
            given.append(spec.name)

    caller = threading.Thread(target=writer.write, args=[tensors()])
    caller.start()
    caller.join(0.5)
    assert 1 <= len(given) <= 3  # as many as there are buffers; the header is in the first
    gate.set()
    caller.join()
    assert writer.wait(60)
    assert len(load_file(tmp_path / "model.safetensors")) == 20


def test_after_a_failure_tensors_are_accepted_and_no_file_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks need this rank to complete the exchange."""
    specs = tuple(TensorSpec(name=f"t{i}", shape=(1024,), dtype=torch.float32) for i in range(20))

    writes: list[int] = []

    def refuse(descriptor: int, content: memoryview) -> None:
        writes.append(len(content))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_writer, "write_all", refuse)
    files = [PlannedFile(path=f"{i}.safetensors", kind=f"kind{i}", rank=0, specs=specs) for i in range(2)]
    writer = RankWriter(tmp_path, files, rank=0, pipeline=WritePipeline(buffers=2, buffer_bytes=4096))
    writer.write((file.kind, spec.name, torch.ones(1024)) for spec in specs for file in files)
    assert writer.wait(60)
    assert isinstance(writer.outcome, RankFailure)
    assert writer.outcome.is_disk_full
    assert len(writes) == 1  # and not once more
    assert "safetensors" in writer.outcome.path
    links = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.islink(link.path)]
    assert not [path for path in links if path.startswith(str(tmp_path))]


def test_the_caller_may_reuse_a_tensor_at_once(tmp_path: Path) -> None:
    def reused() -> Iterator[tuple[str, torch.Tensor]]:
        one = torch.empty(4)
        for i in range(50):
            yield f"t{i}", one.fill_(i)

    specs = [TensorSpec(name=f"t{i}", shape=(4,), dtype=torch.float32) for i in range(50)]
    saved = save_tiny(tmp_path, 1, groups=[TensorGroup(kind="model", specs=specs, tensors=reused())], sizes=FileSizes())
    read = load_file(saved.path / "model.safetensors")
    assert all(torch.equal(read[f"t{i}"], torch.full((4,), float(i))) for i in range(50))


def test_one_gathered_tensor_exists_at_a_time(tmp_path: Path) -> None:
    given: list[weakref.ref[torch.Tensor]] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(30):
            value = torch.full((1000,), float(i))
            given.append(weakref.ref(value))
            assert sum(one() is not None for one in given) == 1
            yield f"t{i}", value
            del value

    specs = [TensorSpec(name=f"t{i}", shape=(1000,), dtype=torch.float32) for i in range(30)]
    save_tiny(tmp_path, 1, groups=[TensorGroup(kind="model", specs=specs, tensors=gathered())])


def test_a_file_that_the_first_rank_does_not_see_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank wrote it, on a disk of its own."""
    finish = rank_writer.OutputFile.finish

    def lose(file: rank_writer.OutputFile) -> FileRecord:
        path = Path(os.readlink(f"/proc/self/fd/{file._descriptor}"))
        written = finish(file)
        path.unlink()
        return written

    monkeypatch.setattr(rank_writer.OutputFile, "finish", lose)
    with pytest.raises(CheckpointError, match="do all nodes see the same"):
        save_tiny(tmp_path, 4)
    assert names_in(tmp_path) == []


def test_of_several_failures_a_full_disk_is_reported_else_that_of_the_lowest_rank() -> None:
    full = RankFailure.of(OSError(28, "No space left on device"), rank=3, path="a")
    others = [RankFailure.of(OSError(5, "Input/output error"), rank=rank, path="a") for rank in (2, 1)]
    assert first_failure([[], *others, full]) is full
    assert first_failure([[], *others]) is others[1]
    assert first_failure([[], []]) is None


def test_progress_is_reported_for_each_tensor(tmp_path: Path) -> None:
    calls: list[None] = []
    save_tiny(tmp_path, 10, progress=lambda: calls.append(None))
    assert len(calls) == sum(map(len, tensors_of(10).values()))
