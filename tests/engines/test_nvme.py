"""Offload to NVMe: the same training as in memory, states read and written in their files, nothing left behind."""

import fcntl
import os
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from async_io import skip_without_async_io
from deepspeed.ops.op_builder import AsyncIOBuilder
from engine_memory import measure
from engine_states import Outcome, assert_same_bits, build, changes, resumed_run, whole_run

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.deepspeed_patches import read_to_any_address
from toolkit.engines.nvme import _await_other_build, check_directory
from toolkit.errors import RunError

Ranks = Callable[..., list[Any]]


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    skip_without_async_io()
    (folder := tmp_path / "drive").mkdir()
    return folder


def recipe_of(
    make_recipe: Callable[..., Recipe], drive: Path, name: str, optimizer: str, precision: str, **fields: Any
) -> Recipe:
    """A model whose embedding is large enough for a file: a rank's part of it has more than a MiB."""
    small = changes(optimizer) | {"overrides__vocab_size": 8200, "overrides__n_embd": 160, "overrides__n_layer": 2}
    recipe = Strategy.parse(name).apply(make_recipe(**small, precision=precision), 2)
    return recipe.changed({"parallel": {"nvme_path": str(drive), **fields}})


def _start(recipe: Recipe) -> None:
    build(recipe)


PAIRS = [
    ("dp2-z3-nvme", "dp2-z3-nvme", "adamw", "bf16"),
    ("dp2-z3-nvme", "tp2-pp2-z1", "adamw", "fp32"),
    ("tp2-pp2-z1", "dp2-z3-nvme", "adamw", "fp32"),
    *(
        (one, other, optimizer, precision)
        for one, other in (("dp2-z3-nvme", "dp2-z1"), ("dp1-z2", "dp2-z3-nvme"), ("dp1-z3-nvme", "tp2-dp2-z3-nvme"))
        for optimizer in ("adamw", "sgd", "lion")
        for precision in ("fp32", "bf16")
    ),
]


@pytest.mark.whole
@pytest.mark.parametrize(("one", "other", "optimizer", "precision"), PAIRS)
def test_states_in_files_continue_in_another_layout_and_from_it(
    one: str,
    other: str,
    optimizer: str,
    precision: str,
    make_recipe: Callable[..., Recipe],
    ranks: Ranks,
    drive: Path,
) -> None:
    outcome = {}
    for name in (one, other):
        recipe = recipe_of(make_recipe, drive, name, optimizer, precision)
        outcome[name] = recipe, Strategy.parse(name).world_size(2)
    recipe, world = outcome[one]
    before, curve, after = ranks(whole_run, world, recipe)[0]
    recipe, world = outcome[other]
    found, continued, end = ranks(resumed_run, world, recipe, before)[0]
    assert_same_bits(found[0], before[0])
    assert found[1] == before[1]
    if one == other:
        assert continued == curve
        assert_same_bits(end, after)
    tolerance = 1e-6 if precision == "fp32" else 2e-2
    for (loss, norm), (wanted_loss, wanted_norm) in zip(continued, curve, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=tolerance)
        assert norm == pytest.approx(wanted_norm, rel=10 * tolerance)
    assert list(drive.iterdir()) == []


@pytest.mark.whole
@pytest.mark.parametrize(
    ("precision", "params"),
    [("fp32", "nvme"), ("bf16", "cpu"), ("bf16", "nvme")],
)
def test_files_train_what_memory_trains(
    precision: str, params: str, make_recipe: Callable[..., Recipe], ranks: Ranks, drive: Path
) -> None:
    def run(device: str, params: str) -> Outcome:
        place = {"offload_optimizer": device, "offload_params": params}
        outcome: Outcome = ranks(whole_run, 2, recipe_of(make_recipe, drive, "dp2-z3", "adamw", precision, **place))[0]
        return outcome

    on_nvme, in_memory = run("nvme", params), run("cpu", "cpu")
    assert on_nvme[1] == in_memory[1]
    assert_same_bits(on_nvme[2], in_memory[2])


def test_a_drive_without_room_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    check_directory(tmp_path, 1)
    with pytest.raises(RunError) as caught:
        check_directory(tmp_path, 2**60)
    assert caught.value.as_refusal().field == "parallel.nvme_path"
    with pytest.raises(RunError):
        check_directory(tmp_path / "gone", 0)


def test_a_build_that_was_killed_is_named_and_another_one_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (lock := tmp_path / "async_io" / "lock").parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 900,) * 2)
    with pytest.raises(RunError, match="killed 15 minutes ago") as caught:
        _await_other_build("async_io")
    assert caught.value.as_refusal().remedy == (f"rm {lock}",)
    os.utime(lock)
    other = threading.Timer(0.5, lock.unlink)
    other.start()
    _await_other_build("async_io")
    assert not lock.exists()
    other.join()


@pytest.mark.whole
def test_files_are_read_to_any_address_and_deepspeed_alone_reads_to_some(drive: Path) -> None:
    op = types.SimpleNamespace(aio_handle=AsyncIOBuilder().load(verbose=False).aio_handle)
    plain = op.aio_handle.__base__ if hasattr(op.aio_handle, "moved") else op.aio_handle
    read_to_any_address(op)
    values, equal = torch.arange(2.0**18), []
    for kind in (plain, op.aio_handle):
        handle = kind(1 << 20, 32, False, True, 8)
        memory = handle.new_cpu_locked_tensor(2 * len(values), values).zero_()
        written = memory[: len(values)].copy_(values)
        handle.async_pwrite(written, str(drive / "file"), 0)
        assert handle.wait() == 1
        parts = [memory[start : start + len(values)] for start in (0, 128, 16)]
        for part in parts:
            memory.zero_()
            handle.async_pread(part, str(drive / "file"), 0)
            assert handle.wait() == 1
            equal.append(torch.equal(part, values))
    # The patch is needed while the third is false.
    assert equal == [True, True, False, True, True, True]


@pytest.mark.whole
def test_what_a_killed_run_left_is_removed_and_what_another_uses_is_kept(
    make_recipe: Callable[..., Recipe], ranks: Ranks, drive: Path
) -> None:
    for name in ("killed", "used"):
        (drive / f"dstk-offload-{name}").mkdir()
        (drive / f"dstk-offload-{name}" / "lock").touch()
    held = os.open(drive / "dstk-offload-used" / "lock", os.O_WRONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    recipe = recipe_of(make_recipe, drive, "dp1-z3-nvme", "adamw", "fp32")
    ranks(_start, 1, recipe)
    os.close(held)
    assert [path.name for path in drive.iterdir()] == ["dstk-offload-used"]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "precision", "params"),
    [
        ("dp2-z3", "bf16", "nvme"),
        ("dp2-z3", "fp32", "nvme"),
        ("dp1-z3", "bf16", "cpu"),
        ("tp2-z3", "bf16", "nvme"),
    ],
)
def test_the_estimate_knows_every_byte_in_files_and_buffers(
    name: str, precision: str, params: str, make_recipe: Callable[..., Recipe], ranks: Ranks, drive: Path
) -> None:
    place = {"offload_optimizer": "nvme", "offload_params": params}
    recipe = recipe_of(make_recipe, drive, name, "adamw", precision, **place)
    for cell in ranks(measure, Strategy.parse(name).world_size(2), recipe):
        assert cell.measured == cell.estimated
