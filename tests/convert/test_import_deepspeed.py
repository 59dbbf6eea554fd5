"""Checkpoints of plain DeepSpeed, read without DeepSpeed: bit for bit the states of its live engine."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_deepspeed import KINDS, Truth, make_universal, train_and_save
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from toolkit.convert.deepspeed_checkpoint import DeepSpeedCheckpoint, find_tag, open_deepspeed
from toolkit.convert.import_weights import import_weights
from toolkit.errors import CheckpointError

Made = Callable[..., tuple[Path, Truth]]
BF16_OPTIMIZER = "bf16, fp32 accumulation"


@pytest.fixture(scope="module")
def made(ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint and the truth about it, once."""
    known: dict[str, tuple[Path, Truth]] = {}

    def make(
        stage: int,
        precision: str = "fp32",
        *,
        world_size: int = 2,
        tied: bool = True,
        frozen: str | None = None,
        **zero: Any,
    ) -> tuple[Path, Truth]:
        key = repr((stage, precision, world_size, tied, frozen, zero))
        if key not in known:
            folder = tmp_path_factory.mktemp("deepspeed")
            truth = ranks(train_and_save, world_size, str(folder), stage, precision, tied, zero, frozen)[0]
            known[key] = folder, truth
        return known[key]

    return make


def opened(folder: Path) -> DeepSpeedCheckpoint:
    tag = find_tag(folder)
    assert tag is not None
    return open_deepspeed(tag)


def assert_same(found: DeepSpeedCheckpoint, truth: Truth) -> None:
    assert list(found.shapes) == list(truth)
    assert found.kinds == KINDS[1:]
    for name, values in truth.items():
        for kind, value in values.items():
            read = found.read(kind, name)
            assert read.dtype == torch.float32
            assert torch.equal(read, value), f"{kind} of {name}"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_state_is_that_of_the_live_engine(made: Made, stage: int, precision: str, tied: bool) -> None:
    folder, truth = made(stage, precision, tied=tied)
    found = opened(folder)
    assert_same(found, truth)
    assert (found.stage, found.ranks, found.step, found.updates) == (stage, 2, 3, 3)
    assert found.tied == ({"lm_head.weight": "transformer.wte.weight"} if tied else {})


@pytest.mark.parametrize(
    ("stage", "precision", "options"),
    [
        (1, BF16_OPTIMIZER, {}),
        (1, "fp32", {"world_size": 1}),
        (2, "bf16", {"world_size": 3}),
        (3, "bf16", {"world_size": 3}),
        (2, "fp32", {"round_robin_gradients": True}),
        (3, "fp32", {"sub_group_size": 100}),
        (3, "fp32", {"stage3_param_persistence_threshold": 0}),
    ],
)
def test_every_partitioning_of_deepspeed_is_read(
    made: Made, stage: int, precision: str, options: dict[str, Any]
) -> None:
    folder, truth = made(stage, precision, **options)
    assert_same(opened(folder), truth)


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_a_universal_checkpoint_has_the_same_states(
    made: Made, stage: int, precision: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, truth = made(stage, precision)
    (tag,) = folder.glob("global_step3")
    found = open_deepspeed(make_universal(tag))
    assert_same(found, truth)
    # Its file of the tied copy holds the rounded weight of the forward pass: it must not be taken.
    assert "lm_head.weight" not in found.shapes
    assert (found.is_universal, found.stage, found.updates) == (True, stage, 3)


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_are_weights_without_states(made: Made, stage: int) -> None:
    name = "transformer.wpe.weight"
    folder, truth = made(stage, frozen=name)
    found = opened(folder)
    assert found.frozen == (name,)
    assert list(found.shapes)[1] == name
    assert found.read("fp32", name).shape == (33, 12)
    assert set(found.shapes) - {name} == set(truth)


def test_transformers_loads_what_is_imported(made: Made, tmp_path: Path) -> None:
    folder, truth = made(2, "bf16")
    import_weights(folder, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    parameters = dict(model.named_parameters())
    assert parameters.keys() == truth.keys()
    assert all(torch.equal(parameters[name], values["fp32"]) for name, values in truth.items())
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == truth.keys()


def copied(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "global_step3"
    copy.mkdir()
    for path in (folder / "global_step3").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("role", ["mp_rank_00_model_states.pt", "zero_pp_rank_0*", "zero_pp_rank_1*"])
def test_a_pickle_that_runs_code_is_rejected_by_name_and_does_not_run(made: Made, tmp_path: Path, role: str) -> None:
    tag = copied(made(2)[0], tmp_path)
    (victim,) = tag.glob(role)
    content = torch.load(victim, weights_only=False)
    torch.save(content | {"payload": Payload(tmp_path / "ran")}, victim)
    with pytest.raises(
        CheckpointError, match=rf"{victim.name}: its pickle asks for posix\.mkdir, which could run anything"
    ):
        open_deepspeed(tag)
    assert not (tmp_path / "ran").exists()


def test_a_missing_rank_is_named(made: Made, tmp_path: Path) -> None:
    tag = copied(made(2)[0], tmp_path)
    next(tag.glob("zero_pp_rank_1*")).unlink()
    with pytest.raises(CheckpointError, match="files of 1 ranks, where 2 ranks wrote them"):
        open_deepspeed(tag)


def test_a_truncated_file_is_named(made: Made, tmp_path: Path) -> None:
    tag = copied(made(3)[0], tmp_path)
    victim = next(tag.glob("zero_pp_rank_1*optim*"))
    victim.write_bytes(victim.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=rf"{victim.name}: .*truncated"):
        open_deepspeed(tag)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_flipped_value_is_named_by_its_file(made: Made, tmp_path: Path, stage: int) -> None:
    tag = copied(made(stage)[0], tmp_path)
    victim = next(tag.glob("*zero_pp_rank_1*optim*"))
    content = bytearray(victim.read_bytes())
    with zipfile.ZipFile(victim) as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
        begin = content.index(archive.read(largest))
    content[begin] ^= 0xFF
    victim.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{victim.name}: it is damaged: .* are not those that were saved"):
        open_deepspeed(tag)


def test_partitions_that_are_too_short_are_found_before_anything_is_written(made: Made, tmp_path: Path) -> None:
    tag = copied(made(2)[0], tmp_path)
    victim = next(tag.glob("zero_pp_rank_1*"))
    content = torch.load(victim, weights_only=False)
    vectors = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    vectors[0] = vectors[0][:-1].clone()
    torch.save(content, victim)
    with pytest.raises(CheckpointError, match="rank 1 has too few values for"):
        open_deepspeed(tag)


SHAPE = torch.Size([2, 3])


@pytest.mark.parametrize(
    "changes",
    [
        {"module": [1, 2]},
        {"module": {}},
        {"module": None},
        {"param_shapes": None},
        {"param_shapes": [{"transformer.wte.weight": SHAPE}]},
        {"param_shapes": [{"transformer.wte.weight": (2**40, 2**40)}, {}]},
        {"param_shapes": [{"a\x1b[31m": SHAPE}, {}]},
        {"param_shapes": [{"transformer.wte.weight": ("61", -1)}, {}]},
        {"buffer_names": ["no.such.buffer"]},
        {"buffer_names": 3},
        {"frozen_param_shapes": {"x": SHAPE}, "frozen_param_fragments": {"x": "text"}},
        {"frozen_param_shapes": {"x": SHAPE}, "frozen_param_fragments": {"x": torch.zeros(5)}},
        {"ds_config": "text"},
        {"shared_params": 7},
    ],
)
def test_a_malformed_model_file_is_one_line(made: Made, tmp_path: Path, changes: dict[str, Any]) -> None:
    tag = copied(made(2)[0], tmp_path)
    file = tag / "mp_rank_00_model_states.pt"
    torch.save(torch.load(file, weights_only=False) | changes, file)
    with pytest.raises(CheckpointError) as raised:
        open_deepspeed(tag)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("name", ["../global_step3", "/etc", "", "global_step3/..", "a\x1b[31m"])
def test_a_latest_that_leads_elsewhere_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="leads elsewhere") as raised:
        find_tag(tmp_path)
    assert str(raised.value).isprintable()


def test_a_model_with_tensor_or_pipeline_parallelism_is_rejected(made: Made, tmp_path: Path) -> None:
    tag = copied(made(2)[0], tmp_path)
    (tag / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="sharded by tensor, pipeline or expert parallelism"):
        open_deepspeed(tag)


def test_the_config_of_another_model_is_rejected(made: Made, tmp_path: Path) -> None:
    folder, _ = made(2)
    other, _ = made(2, tied=False)
    with pytest.raises(CheckpointError, match=r"it has no lm_head.weight, because it is transformer.wte.weight there"):
        import_weights(folder, tmp_path / "model", model=other)
    assert not (tmp_path / "model").exists()


def test_without_a_config_the_message_says_what_to_give(made: Made, tmp_path: Path) -> None:
    folder, _ = made(2)
    copied(folder, tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no config\.json in it.*--model.*--recipe"):
        import_weights(tmp_path / "global_step3", tmp_path / "model")
