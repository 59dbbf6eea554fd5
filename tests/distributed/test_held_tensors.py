"""A checkpoint out of what ranks hold is the one out of whole tensors, byte for byte, while training goes on or not."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_states import BEFORE, build, changes, train

from toolkit.checkpoint import held_tensors as module
from toolkit.checkpoint.async_saver import AsyncSaver
from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.held_tensors import HeldGroup, HeldTensors
from toolkit.checkpoint.holdings import Held
from toolkit.checkpoint.manifest import read_manifest
from toolkit.checkpoint.names import MODEL
from toolkit.checkpoint.save import FileSizes, save
from toolkit.checkpoint.source import TensorGroup
from toolkit.parallel.shard import Shard
from toolkit.parity.strategy import Strategy
from toolkit.recipe import Recipe
from toolkit.train.engines.base import Engine
from toolkit.train.engines.states import MASTER
from toolkit.train.held import held_tensors

RunRanks = Callable[..., list[Any]]
SIZES = FileSizes(max_file_bytes=60_000, min_file_bytes=10_000)


def whole(engine: Engine) -> list[TensorGroup]:
    """By way of the collective calls of the engine, one parameter after the other on every rank."""
    specs = [TensorSpec(name=name, shape=tuple(shape), dtype=torch.float32) for name, shape in engine.parameter_names()]
    buffers = [(name, value.clone()) for name, value in engine.buffers()]
    of_buffers = [TensorSpec.of(name, value) for name, value in buffers]
    masters = [(name, value.clone()) for name, value in engine.full_states(MASTER)]
    return [
        TensorGroup(kind=MODEL, specs=specs + of_buffers, tensors=masters + buffers),
        *(TensorGroup(kind=kind, specs=specs, tensors=engine.full_states(kind)) for kind in engine.states.kinds),
    ]


def save_all_ways(recipe: Recipe, folder: Path) -> None:
    engine, feed, rate = build(recipe)
    train(engine, feed, rate, 0, BEFORE)
    module.plan_rounds.__kwdefaults__["bucket_bytes"] = 20_000  # several rounds
    save(folder / "whole", 1, groups=whole(engine), trainer_state={}, sizes=SIZES)
    held, saver = held_tensors(engine), AsyncSaver(sizes=SIZES)
    for name in ("held", "again"):
        save(folder / name, 1, groups=held, trainer_state={}, sizes=SIZES)
    saver.begin(folder / "aside", 1, groups=held, trainer_state={})
    train(engine, feed, rate, BEFORE, BEFORE + 2)  # its collective calls beside those of the save
    saver.finish()
    changed = save(folder / "changed", 1, groups=held, trainer_state={}, sizes=SIZES)
    if dist.get_rank() == 0:
        wanted = read_manifest(folder / "whole" / "step-00000001")
        for name in ("held", "again", "aside"):
            assert read_manifest(folder / name / "step-00000001") == wanted, name
        assert read_manifest(changed.path) != wanted


DAILY = (("z1", "bf16"), ("z3-offload", "bf16"), ("fsdp", "fp32"), ("tp2-pp2-z1", "fp32"))
OTHERS = [
    *((name, "fp32") for name in ("z0", "z1", "z2", "z3", "ddp", "z1-offload", "z3-offload")),
    *((name, "fp32") for name in ("tp2-z1", "tp2-z3", "tp2-sp-z2", "pp2-z0", "pp2-z1")),
    *((name, "bf16") for name in ("z0", "z3", "fsdp", "tp2-z1", "tp2-pp2-z1")),
]


@pytest.mark.parametrize(
    ("name", "precision"), [*DAILY, *(pytest.param(*other, marks=pytest.mark.whole) for other in OTHERS)]
)
def test_what_ranks_hold_is_saved_as_if_it_had_been_gathered(
    name: str, precision: str, tmp_path: Path, make_recipe: Callable[..., Any], ranks: RunRanks
) -> None:
    strategy = Strategy.parse(name)
    recipe = strategy.apply(make_recipe(**changes("adamw"), precision=precision), 2)
    ranks(save_all_ways, strategy.world_size(2), recipe, tmp_path)


def held_by_rank(value: torch.Tensor) -> HeldTensors:
    """Every rank has a third of it."""
    part = value.numel() // dist.get_world_size()
    start = part * dist.get_rank()
    held = Held(shard=Shard(name="w", shape=tuple(value.shape)), start=start, length=part)
    group = HeldGroup(
        kind=MODEL,
        specs=[TensorSpec.of("w", value)],
        held=[held],
        values=lambda index: value.flatten()[start : start + part],
    )
    return HeldTensors(groups=[group])


def begin_beside_a_gate(run_dir: Path) -> bool:
    """The copy is taken before `begin` returns: what changes later is not in it."""
    value, gate = torch.arange(300.0).reshape(30, 10), threading.Event()
    wanted = copy.deepcopy(value)
    exchanged = module._exchanged
    module._exchanged = lambda *arguments: (gate.wait(60), exchanged(*arguments))[1]
    saver = AsyncSaver()
    saver.begin(run_dir, 1, groups=held_by_rank(value), trainer_state={})
    value.zero_()
    assert saver.poll() is None
    gate.set()
    saved = saver.finish()
    assert saved is not None
    from safetensors.torch import load_file

    return torch.equal(load_file(saved.path / "model.safetensors")["w"], wanted)


def test_training_may_change_what_is_held_once_begin_returns(tmp_path: Path, ranks: RunRanks) -> None:
    assert all(ranks(begin_beside_a_gate, 3, tmp_path))


def bytes_moved(run_dir: Path) -> int:
    moved = 0
    batch = dist.batch_isend_irecv

    def count(operations: list[dist.P2POp]) -> Any:
        nonlocal moved
        moved += sum(one.tensor.nbytes for one in operations if one.op is dist.isend)
        return batch(operations)

    dist.batch_isend_irecv = count
    save(run_dir, 1, groups=held_by_rank(torch.arange(300.0)), trainer_state={})
    return moved


def test_each_byte_moves_at_most_once_and_only_to_its_writer(tmp_path: Path, ranks: RunRanks) -> None:
    assert sorted(ranks(bytes_moved, 3, tmp_path)) == [0, 400, 400]
