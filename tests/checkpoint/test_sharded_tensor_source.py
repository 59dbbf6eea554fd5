"""A checkpoint of local shards equals one of gathered tensors, byte for byte, also if training continues meanwhile."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_states import BEFORE, build, changes, train
from nonempty import nonempty
from tiny_checkpoint import GatheredTensors, TensorGroup

from toolkit.checkpoint import tensor_source as module
from toolkit.checkpoint.manifest import read_manifest
from toolkit.checkpoint.names import MODEL
from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.save import AsyncSaver, CheckpointContents, FileSizes, SavedCheckpoint, save
from toolkit.checkpoint.save_plan import LocalShard
from toolkit.checkpoint.tensor_source import ShardedTensorGroup, ShardedTensorSource
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.base import Engine
from toolkit.engines.local_tensors import local_tensors
from toolkit.engines.optimizer_states import MASTER
from toolkit.parallel.shard import Shard

RunRanks = Callable[..., list[Any]]
SIZES = FileSizes(max_file_bytes=60_000, min_file_bytes=10_000)


def gathered(engine: Engine) -> list[TensorGroup]:
    """Gathered by the engine's collective calls, one parameter after the other on every rank."""
    specs = [TensorSpec(name=name, shape=tuple(shape), dtype=torch.float32) for name, shape in engine.parameter_names()]
    buffers = [(name, value.clone()) for name, value in engine.buffers()]
    of_buffers = [TensorSpec.of(name, value) for name, value in buffers]
    masters = [(name, value.clone()) for name, value in engine.full_states(MASTER)]
    return [
        TensorGroup(kind=MODEL, specs=specs + of_buffers, tensors=masters + buffers),
        *(TensorGroup(kind=kind, specs=specs, tensors=engine.full_states(kind)) for kind in engine.states.kinds),
    ]


def save_tensors(run_dir: Path, tensors: GatheredTensors | ShardedTensorSource) -> SavedCheckpoint:
    return save(run_dir, 1, CheckpointContents(tensors=tensors, trainer_state={}), sizes=SIZES)


def save_all_ways(recipe: Recipe, folder: Path) -> None:
    engine, loader, rate = build(recipe)
    train(engine, loader, rate, 0, BEFORE)
    module.save_plan.plan_rounds.__kwdefaults__["bucket_bytes"] = 20_000  # several rounds
    save_tensors(folder / "gathered", GatheredTensors(gathered(engine)))
    sharded, saver = local_tensors(engine), AsyncSaver(sizes=SIZES)
    for name in ("sharded", "again"):
        save_tensors(folder / name, sharded)
    saver.begin(folder / "async", 1, CheckpointContents(tensors=sharded, trainer_state={}))
    train(engine, loader, rate, BEFORE, BEFORE + 2)  # its collective calls beside those of the save
    saver.finish()
    changed = save_tensors(folder / "changed", sharded)
    if dist.get_rank() == 0:
        wanted = read_manifest(folder / "gathered" / "step-00000001")
        for name in ("sharded", "again", "async"):
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
def test_sharded_tensors_are_saved_as_if_they_had_been_gathered(
    name: str, precision: str, tmp_path: Path, make_recipe: Callable[..., Any], ranks: RunRanks
) -> None:
    strategy = Strategy.parse(name)
    recipe = strategy.apply(make_recipe(**changes("adamw"), precision=precision), 2)
    ranks(save_all_ways, strategy.world_size(2), recipe, tmp_path)


def sharded_by_rank(value: torch.Tensor) -> ShardedTensorSource:
    """Every rank has a third of it."""
    part = value.numel() // dist.get_world_size()
    start = part * dist.get_rank()
    local = LocalShard(shard=Shard(name="w", shape=tuple(value.shape)), start=start, length=part)
    group = ShardedTensorGroup(
        kind=MODEL,
        specs=[TensorSpec.of("w", value)],
        local_shards=[local],
        values=lambda index: value.flatten()[start : start + part],
    )
    return ShardedTensorSource(groups=[group])


def begin_beside_a_gate(run_dir: Path) -> bool:
    """The copy is taken before `begin` returns: what changes later is not in it."""
    value, gate = torch.arange(300.0).reshape(30, 10), threading.Event()
    wanted = copy.deepcopy(value)
    exchange = module._exchange
    module._exchange = lambda *arguments: (gate.wait(60), exchange(*arguments))[1]
    saver = AsyncSaver()
    saver.begin(run_dir, 1, CheckpointContents(tensors=sharded_by_rank(value), trainer_state={}))
    value.zero_()
    assert saver.poll() is None
    gate.set()
    saved = saver.finish()
    assert saved is not None
    from safetensors.torch import load_file

    return torch.equal(load_file(saved.path / "model.safetensors")["w"], wanted)


def test_training_may_change_local_shards_once_begin_returns(tmp_path: Path, ranks: RunRanks) -> None:
    assert all(nonempty(ranks(begin_beside_a_gate, 3, tmp_path)))


def bytes_moved(run_dir: Path) -> int:
    moved = 0
    batch = dist.batch_isend_irecv

    def count(operations: list[dist.P2POp]) -> Any:
        nonlocal moved
        moved += sum(one.tensor.nbytes for one in operations if one.op is dist.isend)
        return batch(operations)

    dist.batch_isend_irecv = count
    save_tensors(run_dir, sharded_by_rank(torch.arange(300.0)))
    return moved


def test_each_byte_moves_at_most_once_and_only_to_its_writer(tmp_path: Path, ranks: RunRanks) -> None:
    assert sorted(ranks(bytes_moved, 3, tmp_path)) == [0, 400, 400]
