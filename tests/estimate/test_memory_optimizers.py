"""States of optimizers that no recipe has: Muon and 8-bit AdamW, against the optimizers themselves."""

from typing import Any

import pytest
import torch
from allocations import LiveBytes
from transformers import AutoModelForCausalLM

from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.deepspeed_states import deepspeed_states
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.recorded.recordings import parameters as parameters_of
from toolkit.estimate.states import TorchStates, moments_8bit
from toolkit.models.hidden_matrices import is_hidden_matrix
from toolkit.models.shape import find_config
from toolkit.parallel.tiny_model import tiny_config

TINY = tiny_config("llama", hidden_size=64, intermediate_size=96, vocab_size=160)
TABLES = 2 * 256 * 4


def parameters() -> RankParameters:
    return parameters_of(config_text(TINY.to_dict())).rank_parameters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_keeps_one_momentum_of_matrices_in_layers_and_adamw_two_of_the_rest(dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_config(TINY, dtype=dtype)
    hidden = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not one for one in hidden)]
    muon, adam = torch.optim.Muon(hidden), torch.optim.AdamW(rest)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    adam.step()
    muon.step()
    states = [value for one in (muon, adam) for state in one.state.values() for value in state.values()]
    kept = sum(value.nbytes for value in states if value.numel() > 1)
    found = TorchStates(weight_bytes=dtype.itemsize, muon=True).states(parameters(), shards=1)
    assert found.resident.optimizer == kept
    with LiveBytes() as live:
        muon.step()
    assert found.step - found.complete == live.peak_bytes


def test_fsdp_shards_muons_momentum() -> None:
    whole, shared = (
        TorchStates(gathered_bytes=size, muon=True).states(parameters(), shards=4).resident.optimizer for size in (0, 4)
    )
    assert shared == pytest.approx(whole / 4, abs=32)


@pytest.mark.parametrize(("numel", "kept"), [(4095, 8 * 4095), (4096, 2 * 4096 + 8 * 16), (4097, 2 * 4097 + 8 * 17)])
def test_tensors_of_4096_elements_have_moments_of_one_byte_and_scales_of_blocks(numel: int, kept: int) -> None:
    assert moments_8bit([(numel, 3)]) == 3 * kept + TABLES


@pytest.mark.parametrize("numel", [4095, 4096, 4097, 2**20 + 256])
def test_bitsandbytes_keeps_as_much(numel: int) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    weight = torch.nn.Parameter(torch.ones(numel))
    optimizer = optim.AdamW8bit([weight])
    optimizer.init_state(optimizer.param_groups[0], weight, 0, 0)
    kept = sum(value.nbytes for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor))
    assert moments_8bit([(numel, 1)]) == kept + (0 if numel >= 4096 else TABLES)


def test_the_trainer_keeps_moments_of_embeddings_in_fp32() -> None:
    whole, less = (
        TorchStates(in_8_bits=True, fp32_embeddings=kept).states(parameters(), shards=1).resident.optimizer
        for kept in (True, False)
    )
    embedding = 160 * 64
    assert whole - less == 8 * embedding - (2 * embedding + 8 * embedding // 256)


def test_torchao_has_a_table_for_each_tensor() -> None:
    optim = pytest.importorskip("torchao.optim")
    weights = [torch.nn.Parameter(torch.ones(numel)) for numel in (4096, 2**20 + 256)]
    optimizer = optim.AdamW8bit(weights)
    buffers: list[Any] = [optimizer._new_buffer(weight, signed) for weight in weights for signed in (True, False)]
    kept = sum(getattr(one, part).nbytes for one in buffers for part in ("codes", "scale", "qmap"))
    assert moments_8bit([(weight.numel(), 1) for weight in weights]) == kept - TABLES


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")])
def test_deepspeeds_flat_partitions_have_moments_of_one_byte(stage: int, precision: Any) -> None:
    settings = DeepSpeedSettings(zero_stage=stage, precision=precision, counts_in_tensors=False, in_8_bits=True)
    found = deepspeed_states(settings, parameters(), dp=2).resident.optimizer
    group, rest = parameters().groups
    if stage == 0:
        assert found == moments_8bit([*group.counted, *rest.counted])
    else:
        assert found == moments_8bit([(group.numel // 2, 1), (rest.numel // 2, 1)])


def test_muon_keeps_one_momentum_of_stacks_of_experts_and_adamw_two_of_their_biases() -> None:
    model = ModelFacts.from_config(find_config("gpt-oss-20b") or {}).parameters
    updated = sum(one.numel for one in model.parameters() if is_hidden_matrix(f"layers.{one.name}", one.shape))
    states = TorchStates(muon=True).states(model.rank_parameters(), shards=1)
    assert states.resident.optimizer == 4 * updated + 8 * (model.numel - updated)
    # One expert's gate and up is the largest matrix.
    assert max(one.numel for one in model.rank_parameters().hidden_matrices) == 2 * 2880 * 2880


def test_biases_of_experts_are_no_matrices_of_linear_layers() -> None:
    model = ModelFacts.from_config(find_config("gpt-oss-20b") or {}).parameters
    assert not any(one.is_linear and one.name.endswith("bias") for one in model.parameters())
