"""Ranks save together: the same bytes in every division of work, one outcome, no partial checkpoint after a kill."""

import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from killed_saves import kill_in_a_save
from nonempty import nonempty
from safetensors.torch import load_file
from save_faults import FAULTS, save_with_faults
from tiny_checkpoint import SIZES, contents_of, save_tiny, tensors_of

from toolkit.checkpoint import commit, rank_writer, verify
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.save import AsyncSaver, SavedCheckpoint
from toolkit.checkpoint.select import select_checkpoint
from toolkit.errors import CheckpointError

RunRanks = Callable[..., list[Any]]


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}


def save_and_count(run_dir: Path, step: int) -> tuple[SavedCheckpoint, list[str]]:
    """What this rank wrote of it, too."""
    opened = []
    init = rank_writer.OutputFile.__init__

    def count(file: rank_writer.OutputFile, folder: Path, path: str) -> None:
        opened.append(path)
        init(file, folder, path)

    rank_writer.OutputFile.__init__ = count  # type: ignore[method-assign]
    return save_tiny(run_dir, step), opened


def test_ranks_divide_the_writing_and_agree_on_the_result(tmp_path: Path, ranks: RunRanks) -> None:
    results = ranks(save_and_count, 3, tmp_path, 4)
    assert len({repr(saved) for saved, _ in results}) == 1
    written = [name for _, names in results for name in names]
    assert all(names for _, names in results)
    assert len(written) == len(set(written))
    checkpoint = results[0][0].path
    assert not verify.verify(checkpoint)
    for kind, tensors in tensors_of(4).items():
        files = (checkpoint if kind == "model" else checkpoint / "optimizer").glob(f"{kind}-0*")
        read = {name: value for file in files for name, value in load_file(file).items()}
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], value) for name, value in tensors.items())


def save_both_ways(folder: Path) -> None:
    save_tiny(folder / "sync", 4)
    saver = AsyncSaver(sizes=SIZES)
    saver.begin(folder / "async", 4, contents_of(4))
    if dist.get_rank() == 1:
        time.sleep(0.2)
    while saver.poll() is None:
        time.sleep(0.01)


def test_an_asynchronous_save_writes_the_same_bytes(tmp_path: Path, ranks: RunRanks) -> None:
    ranks(save_both_ways, 3, tmp_path)
    assert files_of(tmp_path / "async" / "step-00000004") == files_of(tmp_path / "sync" / "step-00000004")


def poll_beside_a_slow_rank(run_dir: Path) -> list[bool]:
    if dist.get_rank() == 1:
        write_all = rank_writer.write_all
        rank_writer.write_all = lambda *arguments: (time.sleep(0.1), write_all(*arguments))[1]
    saver = AsyncSaver(sizes=SIZES)
    saver.begin(run_dir, 4, contents_of(4))
    time.sleep(0.2)
    return [saver.poll() is None, saver.finish() is not None]


def test_no_rank_waits_in_a_poll_for_one_that_still_writes(tmp_path: Path, ranks: RunRanks) -> None:
    assert ranks(poll_beside_a_slow_rank, 3, tmp_path) == [[True, True]] * 3


def test_a_group_of_ranks_saves_without_the_others(tmp_path: Path, ranks: RunRanks) -> None:
    ranks(save_in_groups, 3, tmp_path)
    assert not verify.verify(tmp_path / "group" / "step-00000004")


def save_in_groups(folder: Path) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        save_tiny(folder / "group", 4, ranks=Ranks.of(group))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_failure_on_one_rank_raises_the_same_on_all_and_leaves_nothing(
    tmp_path: Path, ranks: RunRanks, is_async: bool
) -> None:
    results = ranks(save_with_faults, 3, tmp_path, is_async)
    cases = [(*fault, victim) for fault in FAULTS for victim in range(3)]
    assert len(cases) == 60
    for (number, where, victim), *seen in zip(cases, *results, strict=True):
        message, rank, bytes_needed, left = seen[0]
        assert all(other == seen[0] for other in seen), (number, where, victim, seen)
        assert rank == victim, (where, message)
        assert left == ["latest", "step-00000001"], (where, left)
        assert message.startswith(f"{tmp_path / 'step-00000002'}: rank {victim} ")
        assert message.isprintable()
        is_disk_full = number in (errno.ENOSPC, errno.EDQUOT)
        assert (f"rank {victim} ran out of disk space" in message) == is_disk_full
        assert (bytes_needed is not None and "The checkpoint needs" in message) == is_disk_full
        if where != "fsync" or victim:
            assert ".step-00000002." in message  # the file
    assert select_checkpoint(tmp_path).path.name == "step-00000003"


def rename_fails(run_dir: Path) -> str:
    save_tiny(run_dir, 1)
    if dist.get_rank() == 0:
        commit.move_into_place = lambda *paths, **options: (_ for _ in ()).throw(
            OSError(errno.EACCES, "Permission denied")
        )
    try:
        save_tiny(run_dir, 2)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_failed_rename_fails_on_all_ranks(tmp_path: Path, ranks: RunRanks) -> None:
    messages = ranks(rename_fails, 2, tmp_path)
    assert len(set(messages)) == 1
    assert "rank 0 failed" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def on_disks_of_their_own(folder: Path) -> str:
    try:
        save_tiny(folder / f"machine-{dist.get_rank()}" / "run", 1)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_nodes_that_do_not_share_a_directory_get_an_error(tmp_path: Path, ranks: RunRanks) -> None:
    messages = ranks(on_disks_of_their_own, 2, tmp_path)
    assert all("rank 1 failed" in message and "No such file or directory" in message for message in messages)
    assert not list(tmp_path.glob("machine-*/run/*step*"))


def choose_together(run_dir: Path) -> tuple[Any, int]:
    hashed = 0
    hash_file = verify.on_disk.hash_file

    def count(path: Path) -> str:
        nonlocal hashed
        hashed += 1
        return hash_file(path)

    verify.on_disk.hash_file = count
    return select_checkpoint(run_dir), hashed


def test_ranks_divide_the_verification_and_select_the_same(tmp_path: Path, ranks: RunRanks) -> None:
    for step in (1, 2):
        save_tiny(tmp_path, step)
    files = files_of(tmp_path / "step-00000002")
    results = ranks(choose_together, 3, tmp_path)
    assert [chosen for chosen, _ in results] == [results[0][0]] * 3
    assert results[0][0].path.name == "step-00000002"
    assert sum(hashed for _, hashed in results) == len(files) - 1
    assert all(hashed for _, hashed in results)


def test_damage_that_one_rank_finds_is_known_to_all(tmp_path: Path, ranks: RunRanks) -> None:
    for step in (1, 2):
        save_tiny(tmp_path, step)
    damaged = tmp_path / "step-00000002" / "config.json"
    damaged.write_text(damaged.read_text().replace("gpt2", "gpt3"))
    results = ranks(choose_together, 3, tmp_path)
    for chosen, _ in nonempty(results):
        assert chosen.path.name == "step-00000001"
        assert "config.json: its sha256 differs" in chosen.notices[0]


@pytest.mark.parametrize("seed", range(10))
def test_a_kill_inside_a_save_leaves_the_newest_checkpoint_complete(tmp_path: Path, ranks: RunRanks, seed: int) -> None:
    problem, _ = kill_in_a_save(ranks, tmp_path, seed)
    assert problem == ""
    shutil.rmtree(tmp_path)
