"""Ranks save together: the same bytes whoever writes, one outcome for all, and no kill leaves half a checkpoint."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_kills import kill_in_a_save
from safetensors.torch import load_file
from tiny_checkpoint import SIZES, groups_of, save_tiny, tensors_of, write_beside

from toolkit.checkpoint import output_file, publication, verify
from toolkit.checkpoint.async_saver import AsyncSaver
from toolkit.checkpoint.choose import choose
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.save import Saved
from toolkit.errors import CheckpointError

RunRanks = Callable[..., list[Any]]


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}


def save_and_count(run_dir: Path, step: int) -> tuple[Saved, list[str]]:
    """What this rank wrote of it, too."""
    opened = []
    init = output_file.OutputFile.__init__

    def count(file: output_file.OutputFile, folder: Path, path: str) -> None:
        opened.append(path)
        init(file, folder, path)

    output_file.OutputFile.__init__ = count  # type: ignore[method-assign]
    return save_tiny(run_dir, step), opened


def test_ranks_share_the_writing_and_agree_on_the_result(tmp_path: Path, ranks: RunRanks) -> None:
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
    state = {"step": 4, "note": "xxxx"}
    saver.begin(folder / "async", 4, groups=groups_of(4), trainer_state=state, beside=write_beside)
    if dist.get_rank() == 1:
        time.sleep(0.2)
    while saver.poll() is None:
        time.sleep(0.01)


def test_an_asynchronous_save_writes_the_same_bytes(tmp_path: Path, ranks: RunRanks) -> None:
    ranks(save_both_ways, 3, tmp_path)
    assert files_of(tmp_path / "async" / "step-00000004") == files_of(tmp_path / "sync" / "step-00000004")


def poll_beside_a_slow_rank(run_dir: Path) -> list[bool]:
    if dist.get_rank() == 1:
        write_all = output_file.write_all
        output_file.write_all = lambda *arguments: (time.sleep(0.1), write_all(*arguments))[1]
    saver = AsyncSaver(sizes=SIZES)
    saver.begin(run_dir, 4, groups=groups_of(4), trainer_state={})
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
        save_tiny(folder / "group", 4, ranks=Ranks.joined(group))


FAULTS = [
    (number, where)
    for number in (errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EROFS, errno.EIO)
    for where in ("open", "first write", "later write", "fsync")
]


def fail(number: int, where: str) -> Callable[[], None]:
    """Let what this rank does fail; the way back."""
    kept = os.open, os.write, os.fsync
    count = 0

    def broken(call: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
        def attempt(*arguments: Any, **options: Any) -> Any:
            if when(*arguments):
                raise OSError(number, os.strerror(number))
            return call(*arguments, **options)

        return attempt

    def later(*arguments: Any) -> bool:
        nonlocal count
        count += 1
        return count > 2

    if where == "open":
        os.open = broken(os.open, lambda path, flags, *mode: bool(flags & os.O_CREAT))
    elif where == "fsync":
        os.fsync = broken(os.fsync, lambda descriptor: True)
    else:
        os.write = broken(os.write, later if where == "later write" else lambda *arguments: True)

    def mend() -> None:
        os.open, os.write, os.fsync = kept

    return mend


def save_with_faults(run_dir: Path, is_async: bool) -> list[tuple[str, int | None, int | None, list[str]]]:
    """For each fault on each rank: the error that this rank saw, and what it then found on the disk."""
    save_tiny(run_dir, 1)
    seen = []
    for number, where in FAULTS:
        for victim in range(3):
            mend = fail(number, where) if dist.get_rank() == victim else lambda: None
            try:
                if is_async:
                    saver = AsyncSaver(sizes=SIZES)
                    saver.begin(run_dir, 2, groups=groups_of(2), trainer_state={})
                    saver.finish()
                else:
                    save_tiny(run_dir, 2)
                seen.append(("no error", None, None, []))
            except CheckpointError as error:
                left = sorted(path.name for path in run_dir.iterdir())
                seen.append((str(error), error.rank, error.bytes_needed, left))
            mend()
            dist.barrier()
    save_tiny(run_dir, 3)
    return seen


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_fails_on_one_rank_fails_on_all_alike_and_costs_nothing(
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
        is_full = number in (errno.ENOSPC, errno.EDQUOT)
        assert (f"rank {victim} ran out of room" in message) == is_full
        assert (bytes_needed is not None and "The checkpoint needs" in message) == is_full
        if where != "fsync" or victim:
            assert ".step-00000002." in message  # the file
    assert choose(tmp_path).path.name == "step-00000003"


def rename_fails(run_dir: Path) -> str:
    save_tiny(run_dir, 1)
    if dist.get_rank() == 0:
        publication._rename = lambda *paths: (_ for _ in ()).throw(OSError(errno.EACCES, "Permission denied"))
    try:
        save_tiny(run_dir, 2)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_what_fails_at_the_last_moment_fails_on_all(tmp_path: Path, ranks: RunRanks) -> None:
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


def test_machines_that_do_not_share_a_directory_are_told(tmp_path: Path, ranks: RunRanks) -> None:
    messages = ranks(on_disks_of_their_own, 2, tmp_path)
    assert all("rank 1 failed" in message and "No such file or directory" in message for message in messages)
    assert not list(tmp_path.glob("machine-*/run/*step*"))


def choose_together(run_dir: Path) -> tuple[Any, int]:
    hashed = 0
    hash_plain = verify.hash_plain

    def count(path: Path) -> str:
        nonlocal hashed
        hashed += 1
        return hash_plain(path)

    verify.hash_plain = count
    return choose(run_dir), hashed


def test_ranks_share_the_verification_and_choose_alike(tmp_path: Path, ranks: RunRanks) -> None:
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
    for chosen, _ in results:
        assert chosen.path.name == "step-00000001"
        assert "config.json: its sha256 differs" in chosen.notices[0]


@pytest.mark.parametrize("seed", range(10))
def test_a_kill_inside_a_save_leaves_the_newest_checkpoint_whole(tmp_path: Path, ranks: RunRanks, seed: int) -> None:
    problem, _ = kill_in_a_save(ranks, tmp_path, seed)
    assert problem == ""
    shutil.rmtree(tmp_path)
