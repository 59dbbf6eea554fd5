"""The plan of files: every tensor once, files as few as useful and as even as tensors allow."""

import random

import pytest
import torch

from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.save_plan import PlannedFile, plan_files


def spec(name: str, elements: int) -> TensorSpec:
    return TensorSpec(name=name, shape=(elements,), dtype=torch.float32)


def drawn(seed: int, count: int) -> list[TensorSpec]:
    chance = random.Random(seed)
    return [spec(f"t{i}", chance.choice((0, 1, 7, 100, 1000, 5000))) for i in range(count)]


def plan(specs: list[TensorSpec], world_size: int, most: int = 100_000, least: int = 1000) -> list[PlannedFile]:
    kinds = [("model", specs), ("exp_avg", specs)]
    return plan_files(kinds, world_size, max_file_bytes=most, min_file_bytes=least)


@pytest.mark.parametrize("seed", range(20))
def test_every_tensor_is_in_one_file_in_order_and_files_are_capped(seed: int) -> None:
    chance = random.Random(seed)
    specs, world_size = drawn(seed, chance.randint(1, 60)), chance.randint(1, 9)
    most = chance.choice((3000, 20_000, 10**9))
    files = plan(specs, world_size, most, chance.choice((1, 1000)))
    order = {spec: i for i, spec in enumerate(specs)}
    for kind in ("model", "exp_avg"):
        inside = [spec for file in files if file.kind == kind for spec in file.specs]
        assert sorted(inside, key=order.__getitem__) == specs
    for file in files:
        places = [order[spec] for spec in file.specs]
        assert places == sorted(places)
        assert places
        assert file.nbytes <= most or len([spec for spec in file.specs if spec.nbytes]) == 1
        assert 0 <= file.rank < world_size
    assert len({file.path for file in files}) == len(files)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_write_the_same_amount_up_to_one_tensor(world_size: int) -> None:
    specs = drawn(3, 200)
    files = plan(specs, world_size)
    load = [sum(file.nbytes for file in files if file.rank == rank) for rank in range(world_size)]
    assert max(load) - min(load) <= 2 * max(spec.nbytes for spec in specs)


def test_the_files_of_a_wave_fill_together_and_no_rank_has_two_of_them() -> None:
    specs = [spec(f"t{i}", 100) for i in range(80)]
    files = plan_files([("model", specs)], 4, max_file_bytes=4000, min_file_bytes=1)
    assert [file.nbytes for file in files] == [4000] * 8
    for wave in (files[:4], files[4:]):
        assert sorted(file.rank for file in wave) == [0, 1, 2, 3]
    assert [file.specs[0].name for file in files[:4]] == ["t0", "t1", "t2", "t3"]
    assert max(int(spec.name[1:]) for file in files[:4] for spec in file.specs) == 39


def test_small_kinds_stay_in_one_file() -> None:
    files = plan_files([("model", drawn(1, 50))], 64)
    assert [file.path for file in files] == ["model.safetensors"]


def test_files_are_as_few_as_the_cap_allows_on_one_rank() -> None:
    files = plan_files([("model", [spec(f"t{i}", 100) for i in range(10)])], 1, max_file_bytes=1000, min_file_bytes=1)
    assert [file.path for file in files] == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]


def test_kinds_in_one_file_each_go_to_different_ranks() -> None:
    specs = drawn(2, 30)
    kinds = [(kind, specs) for kind in ("model", "exp_avg", "exp_avg_sq")]
    ranks = [file.rank for file in plan_files(kinds, 16)]
    assert len(set(ranks)) == 3
    assert max(ranks) >= 8  # on another machine than the first


def test_a_tensor_above_the_cap_has_a_file_of_its_own() -> None:
    specs = [spec("a", 10), spec("huge", 10_000), spec("b", 10)]
    files = plan_files([("model", specs)], 1, max_file_bytes=1000, min_file_bytes=1)
    assert [[spec.name for spec in file.specs] for file in files] == [["a"], ["huge"], ["b"]]


def test_states_have_their_files_under_optimizer() -> None:
    files = plan(drawn(1, 5), 1, 10**9)
    assert [file.path for file in files] == ["model.safetensors", "optimizer/exp_avg-00001-of-00001.safetensors"]


def test_a_duplicate_name_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="duplicate"):
        plan_files([("model", [spec("a", 1), spec("a", 1)])], 1)
