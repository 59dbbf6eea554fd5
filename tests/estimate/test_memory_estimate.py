"""The memory estimate as a whole: published closed forms, what adds up, and which way it moves."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from training_setups import memory_request

from toolkit.config.layout import Layout, Recompute
from toolkit.errors import ConfigError, LayoutError
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.deepspeed_states import deepspeed_states
from toolkit.estimate.memory_request import MemoryRequest
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.overhead import communicators, nccl_bytes, workspace_bytes
from toolkit.estimate.states import TorchStates
from toolkit.hardware import gpu
from toolkit.models.shape import find_config
from toolkit.planner.run_memory import estimate_for_run, recipe_of

GIB = 2**30
GPT3 = ModelFacts.from_config(find_config("gpt3-175b") or {})
LLAMA = ModelFacts.from_config(find_config("llama-2-7b") or {})
WORK = {"micro_batch_size": 1, "seq_len": 2048, "accumulation": 8}
PARAMETERS = LLAMA.parameters.numel


def settings(stage: int, **more: Any) -> DeepSpeedSettings:
    fields: dict[str, Any] = {"zero_stage": stage, "precision": "bf16", "by_decay": False, "reduce_bucket_size": 10**6}
    return DeepSpeedSettings(**fields | more)


def held(states: DeepSpeedSettings | TorchStates, dp: int) -> int:
    whole = LLAMA.parameters.rank_parameters(by_decay=False)
    if isinstance(states, DeepSpeedSettings):
        found = deepspeed_states(states, whole, dp=dp)
    else:
        found = states.states(whole, shards=dp)
    return found.resident.total + found.complete - found.resident.buckets


@pytest.mark.parametrize("dp", [1, 8, 64])
@pytest.mark.parametrize(
    ("kept", "bytes_whole", "bytes_sharded"),
    [
        # Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1: 16 bytes a parameter, (2 + 2) + 12 / D, 2 + 14 / D,
        # 16 / D. Their gradients are in 16 bits.
        (settings(2, accumulation_bytes=2), 2, 14),
        (settings(3, accumulation_bytes=2, persistence_threshold=0), 0, 16),
        # The fp32 gradients of BF16_Optimizer, beside those of the weights.
        (settings(1), 2 + 4 + 2, 12),
        (TorchStates(gathered_bytes=2), 0, 16),
        (TorchStates(), 16, 0),
    ],
)
def test_model_states_follow_the_published_sums(kept, bytes_whole, bytes_sharded, dp):
    expected = (bytes_whole + bytes_sharded / dp) * PARAMETERS
    assert held(kept, dp) == pytest.approx(expected, rel=4e-3)  # ZeRO-2 keeps whole parameters at the ends of a part


def test_the_parts_of_every_stage_add_up_to_the_larger_moment():
    layout = Layout(dp=8, tp=8, pp=8, zero_stage=1)
    stages = memory_request(GPT3, layout, WORK, settings(1), gpu("H100-80")).stages()
    assert len(stages) == 8
    for stage in stages:
        parts = (
            stage.parameters
            + stage.gradients
            + stage.masters
            + stage.optimizer
            + stage.buckets
            + stage.gathered
            + stage.model_buffers
            + stage.workspace
            + sum(stage.activations.values())
            + stage.logits
            + stage.update
        )
        assert parts == stage.allocated
        assert min(stage.activations.values()) >= 0
        assert stage.allocated + stage.framework + stage.nccl + stage.margin == stage.total


@pytest.mark.parametrize("layout", [Layout(dp=4, tp=8, pp=16, zero_stage=1), Layout(dp=2, tp=8, pp=5, zero_stage=0)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_is_that_of_the_stage_that_needs_most(layout, recompute):
    work = WORK | {"recompute": recompute}
    found = memory_request(GPT3, layout, work, settings(layout.zero_stage), gpu("H100-80")).stages()
    assert memory_request(GPT3, layout, work, settings(layout.zero_stage), gpu("H100-80")).peak().total == max(
        s.total for s in found
    )


def test_the_peak_of_layers_that_differ_may_be_on_any_inner_stage(monkeypatch):
    """Layers with experts have more parameters than the dense ones in front of them."""
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 7, "first_k_dense_replace": 3, "n_routed_experts": 64}
    config |= {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
    config |= {"qk_rope_head_dim": 16, "v_head_dim": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    model, layout = ModelFacts.from_config(config | {"vocab_size": 256}), Layout(pp=4)
    bounds = [range(2), range(2, 4), range(4, 6), range(6, 7)]
    monkeypatch.setattr(MemoryRequest, "_stage_layers", lambda *arguments: bounds)
    work = WORK | {"micro_batch_size": 1, "seq_len": 16}
    worst = max(memory_request(model, layout, work, settings(0)).stages(), key=lambda stage: stage.allocated)
    assert worst.stage == 2
    assert memory_request(model, layout, work, settings(0)).peak().stage == 2


def test_every_parameter_is_on_one_stage_and_a_tied_embedding_on_two():
    layout = Layout(pp=8)
    found = memory_request(GPT3, layout, WORK, settings(1)).stages()
    embedding = GPT3.shape.vocab * GPT3.shape.hidden
    assert sum(stage.parameter_count for stage in found) == GPT3.parameters.numel + embedding


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    layout, device = Layout(dp=8, zero_stage=2), gpu("H100-80")
    largest = memory_request(LLAMA, layout, WORK, settings(2), device).largest_micro_batch()
    assert largest >= 1

    def fits(size: int) -> bool:
        return (
            memory_request(LLAMA, layout, WORK | {"micro_batch_size": size}, settings(2), device).peak().fits_in_replay
        )

    assert fits(largest)
    assert not fits(largest + 1)


def test_a_model_that_does_not_fit_has_no_micro_batch():
    assert memory_request(GPT3, Layout(), WORK, settings(1), gpu("H100-80")).largest_micro_batch() == 0


def test_offload_moves_masters_and_moments_to_the_host():
    layout = Layout(dp=8, zero_stage=2, offload_optimizer="cpu")
    (on_gpu,) = memory_request(LLAMA, replace(layout, offload_optimizer="none"), WORK, settings(2)).stages()
    (offloaded,) = memory_request(LLAMA, layout, WORK, settings(2, offload_optimizer=True)).stages()
    assert (offloaded.masters, offloaded.optimizer) == (0, 0)
    assert offloaded.host.masters == on_gpu.masters
    assert offloaded.host.optimizer == on_gpu.optimizer


def test_a_layout_that_the_shape_does_not_allow_is_refused():
    with pytest.raises(LayoutError) as caught:
        memory_request(LLAMA, Layout(tp=5), WORK, settings(1)).stages()
    refusal = caught.value.refusal
    assert (refusal.settings, refusal.remedy) == ((("tp", 5),), (("tp", "1, 2, 4, 8, 16 or 32"),))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Defaults of DeepSpeed 0.19.8 where the config is silent.
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, ("zero12", 2, 2, 500_000_000, False)),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, ("zero3", 2, 2, 500_000_000, True)),
        (
            {
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "zero_optimization": {"stage": 1, "reduce_bucket_size": 2e8},
            },
            ("bf16", 4, 2, 200_000_000, False),
        ),
        ({"fp16": {"enabled": True}}, ("unfused", 2, 2, 500_000_000, False)),
        ({}, ("none", 4, 4, 500_000_000, False)),
    ],
)
def test_a_users_deepspeed_config_is_read_with_deepspeeds_defaults(config, expected):
    s = DeepSpeedSettings.from_config(config)
    found = (s.wrapper, s.accumulation_bytes, s.communication_bytes, s.reduce_bucket_size, s.overlap_comm)
    assert found == expected


def test_settings_that_are_not_modeled_are_refused():
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}
    with pytest.raises(ConfigError) as caught:
        DeepSpeedSettings.from_config(config)
    assert caught.value.refusal.settings == (("zero_optimization.offload_param.max_in_cpu", 1_000_000_000),)


@pytest.mark.parametrize(
    ("layout", "local"),
    [
        (Layout(), []),
        (Layout(dp=2), [2]),
        (Layout(dp=64), [8]),
        # 8 GPUs a machine: ranks of a tensor-parallel group are adjacent, those of dp 4 apart, those of pp 32.
        (Layout(dp=8, tp=4, pp=2, zero_stage=1), [2, 4, 1, 8]),
        (Layout(dp=4, ulysses=2), [4, 2, 8]),
    ],
)
def test_ranks_of_a_communicator_on_one_machine(layout: Layout, local: list[int]) -> None:
    assert communicators(layout) == local


def test_experts_that_are_shared_out_have_communicators_of_their_own() -> None:
    # The replicas, the ranks that share out experts, and those with the same experts: 4 apart.
    assert communicators(Layout(dp=8, ep=4)) == [8, 4, 2]
    assert communicators(Layout(dp=8, ep=8)) == [8, 8]


def test_a_rack_that_links_join_is_one_machine_to_its_communicators() -> None:
    assert communicators(Layout(dp=64), gpu("GB200").link_domain) == [64]
    assert nccl_bytes(Layout(dp=64), gpu("GB200")) > nccl_bytes(Layout(dp=8), gpu("GB200"))


@pytest.mark.parametrize("name", ["H100-80", "H200", "H800", "GH200-96", "B200", "B300", "GB200", "GB300"])
def test_every_gpu_from_hopper_on_has_the_larger_workspaces(name: str) -> None:
    assert workspace_bytes(gpu(name)) == 2 * 32 * 2**20


@pytest.mark.parametrize("name", ["A100-80", "V100-SXM2-32", "L40S", "RTX5090", "MI300X"])
def test_other_gpus_have_the_smaller_workspaces(name: str) -> None:
    assert workspace_bytes(gpu(name)) == 2 * 8 * 2**20


def test_hopper_communicators_of_more_than_two_gpus_need_nvls_buffers() -> None:
    for ranks, switch in ((2, 0), (4, 4 * 32 * 2**20), (64, 8 * 32 * 2**20)):
        older, hopper = (nccl_bytes(Layout(dp=ranks), gpu(name)) for name in ("A100-80", "H100-80"))
        assert hopper - older == switch


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_allocated_by_the_backward_pass_count_as_gradients(recompute: Recompute) -> None:
    # With one micro-batch the gradients only come to be in its backward pass. Its worst moment is when all layers are
    # done with, and the embedding's turn has come.
    layers = LLAMA.parameters.rank_parameters(first=False, last=False, by_decay=False).numel
    work = WORK | {"accumulation": 1, "recompute": recompute}
    states = TorchStates(autocast=True)
    once = memory_request(LLAMA, Layout(dp=8), work, states).peak()
    assert min(once.activations.values()) >= 0
    assert once.activations["working"] < 2 * GIB
    assert once.gradients == 4 * layers
    summed = memory_request(LLAMA, Layout(dp=8), work | {"accumulation": 2}, states).peak()
    assert summed.gradients == 4 * PARAMETERS
    assert summed.activations["working"] < 2 * GIB


def test_ddp_needs_fp32_weights_on_the_host_while_loading() -> None:
    assert memory_request(LLAMA, Layout(dp=8), WORK, TorchStates()).peak().host_loading == 4 * PARAMETERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [(torch.optim.AdamW, 2), (torch.optim.SGD, 0), (partial(torch.optim.SGD, momentum=0.9), 1)],
)
def test_torch_keeps_moments_in_the_dtype_of_the_weights(optimizer: Any, moments: int, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    stepped = optimizer([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    stepped.step()
    kept = [value for value in stepped.state[weight].values() if isinstance(value, torch.Tensor) and value.numel() > 1]
    states = TorchStates(weight_bytes=weight.element_size(), moments=moments)
    params = LLAMA.parameters.rank_parameters(by_decay=False)
    found = states.states(params, shards=8)
    assert sum(value.nbytes for value in kept) / weight.numel() == found.resident.optimizer / params.numel
    assert weight.grad.nbytes / weight.numel() == found.complete / params.numel


@pytest.mark.parametrize(
    ("device_bytes", "verdict"), [(1.031, "fits"), (1.029, "tight"), (0.971, "tight"), (0.969, "does not fit")]
)
def test_a_verdict_is_tight_within_the_measured_band(device_bytes: float, verdict: str) -> None:
    found = memory_request(LLAMA, Layout(dp=8, zero_stage=2), WORK, settings(2), gpu("H100-80")).peak()
    assert found.band == (-0.03, 0.03)
    other = replace(found, device_bytes=round(device_bytes * found.total))
    assert other.verdict == verdict
    assert other.fits == (verdict == "fits")


def test_documents_that_do_not_see_each_other_cost_masks() -> None:
    sizes = {"micro_batch_size": 2, "seq_len": 512, "accumulation": 1, "precision": "bf16"}
    recipe = recipe_of("gpt2", Layout(zero_stage=1), **sizes)  # type: ignore[arg-type]
    masked = recipe.changed({"data": {"document_masking": True}})
    without, with_masks = (
        estimate_for_run(one, one.layout(1), one.resolve_batch(one.layout(1)))[0].activation_total
        for one in (recipe, masked)
    )
    assert with_masks - without >= 2 * 2 * 512**2
