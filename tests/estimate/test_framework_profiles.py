"""Profiles of other frameworks: published closed forms, figures of logs, and options that a profile does not have."""

from typing import Any

import pytest
from training_setups import memory_request, training_setup

from toolkit.config.layout import Layout
from toolkit.errors import ConfigError, LayoutError
from toolkit.estimate.framework_profile import FrameworkProfile, profile
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.profile_activations import activations, stage_layers
from toolkit.hardware import gpu

GPT = {"model_type": "gpt2", "n_embd": 512, "n_layer": 12, "n_head": 8, "n_positions": 1024, "vocab_size": 50304}
SMALL = ModelFacts.from_config(GPT)
WIDE = ModelFacts.from_config(
    GPT | {"n_embd": 8192, "n_inner": 32768, "n_head": 32, "n_layer": 64, "vocab_size": 50688}
)
LLAMA = ModelFacts.from_config(
    {"model_type": "llama", "vocab_size": 131072, "tie_word_embeddings": True, "hidden_size": 2048}
    | {"num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
)
WORK = {"micro_batch_size": 4, "seq_len": 1024, "accumulation": 64, "attention": "eager"}
MIB = 2**20


@pytest.mark.parametrize("dp", [1, 8, 64])
@pytest.mark.parametrize(
    ("framework", "zero_stage", "bytes_whole", "bytes_sharded"),
    [
        # Megatron-LM, theoretical_memory_usage.py: 18 bytes, or 6 + 12 / D with the distributed optimizer.
        (FrameworkProfile(name="megatron"), 0, 18, 0),
        (FrameworkProfile(name="megatron"), 1, 6, 12),
        # fp16 main gradients, and fp32 copies of them until the next step begins.
        (FrameworkProfile(name="megatron", precision="fp16"), 1, 4, 16),
        (FrameworkProfile(name="nanotron"), 1, 6, 12),
        (FrameworkProfile(name="megatron-2021", precision="fp16"), 0, 20, 0),
    ],
)
def test_states_follow_the_published_sums(
    framework: FrameworkProfile, zero_stage: int, bytes_whole: int, bytes_sharded: int, dp: int
) -> None:
    whole = WIDE.parameters.rank_parameters(by_decay=False)
    resident = framework.states(whole, shards=dp, zero_stage=zero_stage).resident
    held = resident.total - resident.model_buffers - resident.buckets
    assert held == pytest.approx((bytes_whole + bytes_sharded / dp) * whole.numel)


@pytest.mark.parametrize(
    ("precision", "bytes_whole", "bytes_sharded"),
    # fp16 without ZeRO: weights, masters, moments. bf16: weights and fp32 gradients, and the rest over the replicas.
    [("fp16", 14, 0), ("bf16", 6, 12)],
)
def test_megatron_deepspeed_keeps_what_its_optimizer_keeps(
    precision: Any, bytes_whole: int, bytes_sharded: int
) -> None:
    whole = WIDE.parameters.rank_parameters(by_decay=False)
    resident = FrameworkProfile(name="megatron-deepspeed", precision=precision).states(whole, shards=8, zero_stage=0)
    held = resident.resident.total - whole.buffer_bytes - resident.resident.counters
    assert held == pytest.approx((bytes_whole + bytes_sharded / 8) * whole.numel, rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "logged", "workspaces"),
    [
        # Megatron-LM, tests/functional_tests/test_cases/gpt, mem-allocated-bytes on A100 with 8 data-parallel ranks:
        # gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files has two cuBLAS workspaces of 32 MiB
        # (CUBLAS_WORKSPACE_CONFIG=:4096:8, forward and backward thread) and TransformerEngine's of 4 MiB;
        ("bf16", 552_128_512, (32 + 32 + 4) * MIB),
        # gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather has no TransformerEngine,
        # but a buffer of scores, 4 samples x 8 heads x 1024 x 1024 in 16 bits.
        ("fp16", 518_880_768, (32 + 32 + 64) * MIB),
    ],
)
def test_megatron_states_match_logged_runs(precision: Any, logged: int, workspaces: int) -> None:
    whole = SMALL.parameters.rank_parameters(by_decay=False)
    states = FrameworkProfile(name="megatron", precision=precision).states(whole, shards=8, zero_stage=1)
    assert states.resident.total == pytest.approx(logged - workspaces, rel=1e-4)


@pytest.mark.parametrize(("zero_stage", "logged_gib"), [(0, 25.07), (1, 14.76)])
def test_nanotron_states_match_logged_runs(zero_stage: int, logged_gib: float) -> None:
    # The benchmark's table behind the Ultra-Scale Playbook (bench_final2_mfu2.csv): "Mem Alloc" of the 1.34B model with
    # dp=8 and micro-batches of one. It is the most that is allocated in the update, cuBLAS's two workspaces included.
    whole = LLAMA.parameters.rank_parameters(by_decay=False)
    states = FrameworkProfile(name="nanotron").states(whole, shards=8, zero_stage=zero_stage)
    assert states.resident.total + states.step == pytest.approx(logged_gib * 2**30 - 2 * 32 * MIB, rel=1e-3)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute"),
    [(1, False, "none"), (8, False, "none"), (8, True, "none"), (8, True, "selective"), (8, False, "full")],
)
def test_a_megatron_layer_keeps_what_korthikanti_counts(tp: int, sequence_parallel: bool, recompute: Any) -> None:
    # Equations 1, 2, 4 and 6 of "Reducing Activation Recomputation", and 16sb of the norms' statistics.
    s, b, h, a = 1024, 4, 8192, 32
    whole, scores = s * b * h, 5 * a * s * s * b / tp
    expected = {
        (1, False, "none"): 34 * whole + scores + 16 * s * b,
        (8, False, "none"): whole * (10 + 24 / tp) + scores + 16 * s * b,
        (8, True, "none"): 34 * whole / tp + scores + 16 * s * b / tp,
        (8, True, "selective"): 34 * whole / tp + 16 * s * b / tp,
        (8, False, "full"): 2 * whole,
    }[tp, sequence_parallel, recompute]
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel, recompute=recompute)
    found = activations(training_setup(WIDE, layout, **WORK), FrameworkProfile(name="megatron"), 0, 64)
    assert found.layers / 64 == expected


def test_a_stage_of_megatron_of_2021_matches_its_log() -> None:
    # A stage in the middle, on a V100, between two steps: 15492.846 MiB. 20 bytes a parameter, and the last input with
    # its gradient.
    framework = FrameworkProfile(name="megatron-2021", precision="fp16")
    stages = memory_request(
        WIDE, Layout(tp=4, pp=16), WORK | {"accumulation": 256, "recompute": "full"}, framework
    ).stages()
    assert stages[7].static == pytest.approx(15492.84619140625 * MIB, rel=1e-4)


def test_a_stage_of_megatron_deepspeed_matches_its_log() -> None:
    # Logged on a V100 behind the first stage: 10837.395 MiB between two steps, 17461.948 MiB at the peak.
    framework = FrameworkProfile(name="megatron-deepspeed", precision="fp16")
    stages = memory_request(
        WIDE, Layout(tp=4, pp=16), WORK | {"accumulation": 256, "recompute": "full"}, framework
    ).stages()
    assert stages[1].static == pytest.approx(10837.39501953125 * MIB, rel=2e-3)
    assert stages[1].allocated == pytest.approx(17461.94775390625 * MIB, rel=0.03)


@pytest.mark.parametrize(("stage", "plain", "interleaved"), [(0, 4, 2 * 3 + 2 * 4 + 1), (3, 1, 2 * 4 + 1)])
def test_chunks_in_flight_follow_the_schedules(stage: int, plain: int, interleaved: int) -> None:
    setup = training_setup(SMALL, Layout(pp=4), **WORK)
    for chunks, expected in ((1, plain), (3, interleaved)):
        framework = FrameworkProfile(name="megatron", virtual_stages=chunks)
        assert activations(setup, framework, stage, 3).in_flight == expected


def test_layers_are_divided_as_each_framework_divides_them() -> None:
    # nanotron's head, 131072 x 2048, costs as much as four of the layers: the last of four stages has none of them.
    counts = [len(layers) for layers in stage_layers(FrameworkProfile(name="nanotron"), LLAMA, 4)]
    assert sum(counts) == 16
    assert counts[-1] < counts[0]
    # Embedding, norm and head are items of Aleph Alpha's list: 19 over 4 stages.
    items = stage_layers(FrameworkProfile(name="aleph-alpha-scaling"), LLAMA, 4)
    assert [len(layers) for layers in items] == [4, 5, 5, 2]


def test_the_parts_of_every_stage_add_up() -> None:
    for name in ("megatron", "megatron-2021", "megatron-deepspeed"):
        framework = FrameworkProfile(name=name, precision="fp16")
        stages = memory_request(WIDE, Layout(dp=2, tp=4, pp=8, zero_stage=1), WORK, framework, gpu("A100-80")).stages()
        assert len(stages) == 8
        for stage in stages:
            assert stage.allocated + stage.framework + stage.nccl + stage.margin == stage.total
            assert stage.static < stage.allocated
            assert min(stage.activations.values()) >= 0


def test_options_are_read_from_the_command_line() -> None:
    found = profile("megatron:virtual_stages=3,dropout=false,loss=fused,precision=fp16")
    assert found == FrameworkProfile(name="megatron", virtual_stages=3, dropout=False, loss="fused", precision="fp16")


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("fairscale", {"framework": "fairscale"}),
        ("megatron:virtual_stages=0", {"--framework": "megatron:virtual_stages=0"}),
        ("megatron:dropout=maybe", {"--framework": "megatron:dropout=maybe"}),
        ("megatron:compiled=true", {"compiled": True, "framework": "megatron"}),
        ("nanotron:virtual_stages=2", {"virtual_stages": 2, "framework": "nanotron"}),
        ("nanotron:precision=fp16", {"precision": "fp16", "framework": "nanotron"}),
        ("megatron-2021:loss=fused", {"loss": "fused", "framework": "megatron-2021"}),
    ],
)
def test_an_option_that_no_fact_answers_is_refused(text: str, given: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        profile(text)
    assert dict(caught.value.refusal.settings) == given


@pytest.mark.parametrize(
    ("option", "remedy"), [("dropot", "Did you mean dropout?"), ("chunks", "choose precision, "), ("name", "choose ")]
)
def test_an_unknown_option_of_a_profile_gets_the_nearest_one_or_the_list(option: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        profile(f"megatron:{option}=1")
    assert caught.value.refusal.field == "--framework"
    assert caught.value.refusal.remedy[0].startswith(remedy)


def test_layouts_that_a_profile_does_not_cover_are_refused() -> None:
    framework = FrameworkProfile(name="nanotron")
    torchtitan, flash = FrameworkProfile(name="torchtitan"), WORK | {"attention": "flash"}
    selective = flash | {"recompute": "selective"}
    for field, layout, work, profiled in (
        ("attention", Layout(), WORK, framework),
        ("framework", Layout(dp=2), WORK | {"attention": "sdpa"}, torchtitan),
        ("framework", Layout(dp=2, zero_stage=3), flash, framework),
        ("recompute", Layout(), selective, framework),
    ):
        with pytest.raises(LayoutError) as caught:
            memory_request(LLAMA, layout, work, profiled).peak()
        assert (caught.value.refusal.field, dict(caught.value.refusal.settings)["framework"]) == (field, profiled.name)


@pytest.mark.parametrize("name", ["nanotron", "aleph-alpha-scaling", "torchtitan"])
def test_an_mlp_that_a_profile_does_not_have_is_refused(name: str) -> None:
    work = WORK | {"attention": "sdpa" if name == "torchtitan" else "flash"}
    layout = Layout()
    if name == "torchtitan":
        layout = Layout(dp=2, zero_stage=3, recompute="selective")
    with pytest.raises(LayoutError, match="MLPs without a gate") as caught:
        memory_request(SMALL, layout, work, FrameworkProfile(name=name)).peak()
    assert dict(caught.value.refusal.settings) == {"framework": name, "model_type": "gpt2"}
