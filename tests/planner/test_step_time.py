"""The time model: exact FLOPs, terms that add up, and the direction of what a layout changes."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from training_setups import changed, model_of, step_request

from toolkit.config.layout import Layout, Recompute
from toolkit.config.pipeline_schedules import schedule_of
from toolkit.config.simulate_schedule import ScheduleCosts, simulate
from toolkit.estimate.flops import train_flops_per_token
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.profile_activations import stage_layers
from toolkit.estimate.profile_stages import stage_bounds
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.recorded.recordings import parameters
from toolkit.estimate.trainable import Trainable
from toolkit.hardware import gpu, gpus
from toolkit.models.shape import ModelShape, find_config
from toolkit.models.weights import head_matmul_parameters, layer_matmul_parameters
from toolkit.planner.bubble import bubble_seconds
from toolkit.planner.cluster import Cluster
from toolkit.planner.collectives import LINK_SHARE, RankGroup, all_gather, all_reduce, group
from toolkit.planner.data_parallel_time import data_seconds, offload_seconds
from toolkit.planner.execution import Execution, profiles
from toolkit.planner.kernels import matmul_seconds
from toolkit.planner.layer_time import RankWork, attention_products, mlp_products
from toolkit.planner.step_request import StepRequest
from toolkit.planner.step_time import StepTime, predict_step
from toolkit.planner.trained import Trained

H100 = gpu("H100-80")
CLUSTER = Cluster.of(H100)


def shape_of(name: str) -> ModelShape:
    config = find_config(name)
    assert config is not None
    return ModelShape.from_config(config)


def setup(layout: str = "dp8-z1", model: str = "llama-3-8b", **changes: object) -> StepRequest:
    fields = {"micro_batch_size": 1, "accumulation": 8, "seq_len": 4096, "cluster": CLUSTER} | changes
    return step_request(shape_of(model), Layout.parse(layout), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "gpt3-175b"])
def test_the_products_of_a_layer_have_its_exact_flops(name: str) -> None:
    # tests/estimate/test_flops.py holds train_flops_per_token against torch.utils.flop_counter.
    shape, tokens = shape_of(name), 64
    work = RankWork(tokens=tokens, seq_len=tokens, tp=1, sequence_parallel=False)
    layer = sum(2 * m * n * k for m, n, k in (*attention_products(shape, work), *mlp_products(shape, work)))
    attention = 4 * tokens * tokens * shape.attention_dim
    head = 2 * tokens * head_matmul_parameters(shape)
    assert 3 * (shape.layers * (layer + attention) + head) == tokens * train_flops_per_token(shape, tokens)


def test_tiled_mlps_are_computed_again_whatever_else_is_recomputed() -> None:
    one = setup("dp8-z1", seq_len=65536)
    shape = one.shape
    mlp = 2 * 65536 * (3 if shape.gated else 2) * shape.hidden * shape.ffn * shape.layers * one.setup.accumulation
    added = []
    for recompute in ("none", "full", "every_2"):
        layout = replace(one.layout, recompute=recompute)
        plain = predict_step(changed(one, layout=layout))
        tiled = predict_step(changed(one, layout=replace(layout, tiled_mlp=True)))
        added.append(tiled.recompute - plain.recompute)
        assert tiled.seconds == pytest.approx(plain.seconds + added[-1])
    assert added == pytest.approx([added[0]] * 3)
    # Products below the peak, the activation, and a fifth for the sums of the weights' gradients.
    assert 1.5 * mlp < added[0] * plain.peak_flops < 2.5 * mlp


def test_tensor_parallel_ranks_share_the_products_equally() -> None:
    shape = shape_of("llama-3-8b")

    def flops(tp: int) -> int:
        work = RankWork(tokens=64, seq_len=64, tp=tp, sequence_parallel=False)
        return sum(m * n * k for m, n, k in (*attention_products(shape, work), *mlp_products(shape, work)))

    assert flops(8) * 8 == flops(1)


def test_the_terms_add_up_to_the_step() -> None:
    step = predict_step(setup("dp2-tp2-pp2-z1"))
    assert sum(step.terms.values()) == pytest.approx(step.seconds)
    assert step.tokens_per_second_per_gpu * step.seconds * 8 == pytest.approx(2 * 8 * 4096)
    assert 0 < step.mfu < 1


def test_the_bubble_is_a_fixed_number_of_micro_batches() -> None:
    few, many = (predict_step(setup("pp4", accumulation=m)) for m in (8, 32))
    assert few.bubble == pytest.approx(many.bubble)
    assert many.compute == pytest.approx(4 * few.compute)


@pytest.mark.parametrize(
    "stages", [(1.0, 1.0, 1.0, 1.0), (1.2, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.5), (0.7, 1.0, 1.3, 1.1)]
)
@pytest.mark.parametrize("micro_batches", [2, 4, 8, 32])
def test_the_bubble_is_that_of_the_simulated_schedule(stages: tuple[float, ...], micro_batches: int) -> None:
    costs = ScheduleCosts(
        forward=[time / 4 for time in stages],
        backward=[time / 2 for time in stages],
        weight=[time / 4 for time in stages],
    )
    timeline = simulate(schedule_of("1f1b", pp=len(stages), micro_batches=micro_batches), costs)
    step = micro_batches * max(stages) + bubble_seconds(stages, 0.25, micro_batches)
    assert step == pytest.approx(timeline.makespan, rel=0.005)


def test_virtual_stages_divide_the_bubble() -> None:
    plain = predict_step(setup("pp4"))
    interleaved = predict_step(setup("pp4", execution=Execution(virtual_stages=2)))
    assert interleaved.bubble == pytest.approx(plain.bubble / 2)
    assert interleaved.pipeline > plain.pipeline


def test_a_stage_with_more_layers_sets_the_pace() -> None:
    even, uneven = (predict_step(setup("pp2", bounds=bounds)) for bounds in ((0, 16, 32), (0, 12, 32)))
    assert uneven.compute > even.compute


def test_full_recomputation_repeats_the_forward_pass_of_the_layers() -> None:
    step = setup("dp8-tp1-z1")
    again = predict_step(changed(step, layout=replace(step.layout, recompute="full")))
    assert 0.15 < again.recompute / again.compute < 1 / 3
    assert again.compute == pytest.approx(predict_step(step).compute)


def test_every_second_layer_takes_half_of_it_and_stages_count_their_own() -> None:
    def again(recompute: Recompute, **changes: object) -> float:
        step = setup("pp2" if changes else "dp8-tp1-z1", **changes)
        return predict_step(changed(step, layout=replace(step.layout, recompute=recompute))).recompute

    assert again("every_2") == pytest.approx(again("full") / 2)
    # Layers 0 to 16 and 17 to 31: the slower stage has nine of those that are recomputed, of 17.
    assert again("every_2", bounds=(0, 17, 32)) == pytest.approx(again("full", bounds=(0, 17, 32)) * 9 / 17)


def test_offloaded_activations_take_time_where_the_link_is_slower_than_the_layers() -> None:
    def waits(seconds_per_byte: float, recompute: Recompute) -> float:
        step = setup("dp8-tp1-z1")
        layout = replace(step.layout, recompute=recompute, offload_activations=True)
        cluster = replace(step.cluster, host_bytes_per_second=1 / seconds_per_byte)
        return predict_step(changed(step, layout=layout, cluster=cluster)).offload

    assert waits(1 / 2e12, "none") == 0
    assert waits(1 / 5e10, "full") == 0
    # On a link that hides nothing, a recomputed layer of Llama 3 8B sends h = 4096 of some 86,000 numbers a token.
    inside = 4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336
    assert waits(1.0, "none") / waits(1.0, "full") == pytest.approx(inside / 4096, rel=1e-3)


def test_offload_moves_the_update_to_the_host() -> None:
    step = setup("dp8-z2")
    plain = predict_step(step)
    offloaded = predict_step(changed(step, layout=replace(step.layout, offload_optimizer="cpu")))
    # What stays on the GPU: the norm of the gradients, and what an engine takes for any step.
    assert CLUSTER.step_overhead_seconds < offloaded.optimizer < plain.optimizer
    assert offloaded.optimizer + offloaded.offload > plain.optimizer


SMALL_SHAPES = (
    # hidden, layers, vocab, gated: BLOOM's smallest neighbors, a layer alone, a deep one, a wide vocabulary.
    (64, 1, 128, False),
    (256, 4, 2048, False),
    (256, 48, 512, True),
    (768, 12, 50304, False),
    (1024, 2, 250880, True),
)
SMALL_LAYOUTS = ("dp8-z2", "dp8-z3", "dp1-z2", "dp1-z3", "dp4-tp2-z2", "tp8-z3", "dp4-u2-z3")


@pytest.mark.parametrize("name", gpus())
def test_no_offloaded_layout_is_predicted_faster_than_the_same_one_without(name: str) -> None:
    cluster = Cluster.of(gpu(name))
    for hidden, layers, vocab, gated in SMALL_SHAPES:
        shape = replace(
            shape_of("gpt2"), hidden=hidden, layers=layers, vocab=vocab, gated=gated,
            heads=8, kv_heads=8, head_dim=hidden // 8, ffn=4 * hidden, embed_dim=hidden,
        )  # fmt: skip
        optimizers = ("adamw", "sgd", "muon") if name == H100.name else ("adamw",)
        for text, accumulation, optimizer in product(SMALL_LAYOUTS, (1, 16), optimizers):
            asked = setup(text, accumulation=accumulation, seq_len=128, cluster=cluster, optimizer=optimizer)
            asked = changed(asked, model=model_of(shape))
            plain = predict_step(asked).seconds
            for offloaded in offloads(asked.layout):
                there = predict_step(changed(asked, layout=offloaded))
                assert there.seconds > plain, (text, offloaded, shape)


def offloads(layout: Layout) -> list[Layout]:
    """The same layout with the optimizer on the host or on its drives, and with the parameters besides."""
    found = [replace(layout, offload_optimizer="cpu")]
    if layout.zero_stage == 3:
        found.append(replace(layout, offload_optimizer="nvme"))
        found.append(replace(layout, offload_optimizer="cpu", offload_params="cpu"))
    return found


def test_what_offloading_costs_is_fixed_for_a_small_model_and_grows_with_a_large_one() -> None:
    def offload(text: str, **changes: object) -> float:
        asked = setup(text, **changes)
        return predict_step(changed(asked, layout=replace(asked.layout, offload_optimizer="cpu"))).offload

    tiny = replace(setup("dp8-z3").shape, hidden=64, ffn=64, vocab=64, embed_dim=64, head_dim=2)
    asked = changed(setup("dp8-z3", accumulation=1), model=model_of(tiny))
    overhead = predict_step(changed(asked, layout=replace(asked.layout, offload_optimizer="cpu"))).offload
    # Four copies of a piece of each parameter of 32 layers, and less than two milliseconds for all else.
    assert 4 * 12 * 32 * 7e-6 < overhead < 4 * 12 * 32 * 7e-6 + 2e-3
    # ZeRO-2 adds gradients up on the GPU; ZeRO-3 has every micro-batch's copied up and down.
    assert offload("dp8-z2", accumulation=16) == pytest.approx(offload("dp8-z2", accumulation=1))
    more = offload("dp8-z3", accumulation=16) - offload("dp8-z3", accumulation=1)
    assert more == pytest.approx(15 * 2 * 12 * 32 * 7e-6)
    # Eight times the replicas, an eighth of the bytes.
    assert offload("dp64-z2") / offload("dp8-z2") == pytest.approx(1 / 8, rel=0.05)


def test_files_on_nvme_take_their_bytes_through_the_drive() -> None:
    step = setup("dp8-z3")
    in_memory, in_files = (
        predict_step(changed(step, layout=replace(step.layout, offload_optimizer=device))).offload
        for device in ("cpu", "nvme")
    )
    each = 32 * step.parameters / 8  # gradient, master and two moments, read and written
    assert in_files - in_memory == pytest.approx(each / 1.6e9)


def test_a_second_partition_keeps_the_backward_gathers_inside_a_node() -> None:
    step = setup("dp16-z3")
    near = predict_step(changed(step, layout=replace(step.layout, hpz=8)))
    assert near.data < predict_step(step).data


def test_a_tile_more_than_a_wave_takes_a_wave_more() -> None:
    rows, columns = 256 * 11, 128 * 12  # 132 tiles on 132 multiprocessors
    assert H100.multiprocessors == 132
    full, one_more = (matmul_seconds(H100, m, columns, 8192, "bf16") for m in (rows, rows + 1))
    assert one_more > 1.5 * full


def test_large_products_approach_the_measured_share_of_the_peak_from_below() -> None:
    peak, share = H100.peak_flops("bf16"), H100.matmul_fraction["bf16"]
    assert peak is not None
    reached = 2 * 8192**3 / matmul_seconds(H100, 8192, 8192, 8192, "bf16") / peak
    assert 0.7 * share < reached < share


def test_groups_take_the_network_only_beyond_a_node() -> None:
    assert group(CLUSTER, size=8, stride=1) == RankGroup(local=8, nodes=1)
    assert group(CLUSTER, size=16, stride=4) == RankGroup(local=2, nodes=8)
    assert group(CLUSTER, size=4, stride=16) == RankGroup(local=1, nodes=4)


def test_an_all_reduce_is_two_gathers_over_the_slowest_link() -> None:
    size = 8e9
    inside, beyond = RankGroup(local=8, nodes=1), RankGroup(local=2, nodes=4)
    assert all_reduce(CLUSTER, inside, size) == pytest.approx(2 * all_gather(CLUSTER, inside, size), rel=1e-3)
    slower = CLUSTER.link_bytes_per_second / (2 * CLUSTER.network_bytes_per_second)
    assert all_gather(CLUSTER, beyond, size) / all_gather(CLUSTER, inside, size) == pytest.approx(slower, rel=0.1)


@pytest.mark.parametrize(
    ("kilobytes", "microseconds"),
    [(128, 38.5), (1024, 76.7), (4096, 134.5), (16384, 245), (65536, 590), (262144, 2122)],
)
def test_all_reduces_take_what_nccl_tests_measured_on_eight_a100s(kilobytes: int, microseconds: float) -> None:
    cluster = Cluster.of(gpu("A100-80"))
    seconds = all_reduce(cluster, group(cluster, size=8, stride=1), 1024.0 * kilobytes)
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.2)


@pytest.mark.parametrize(
    ("rule", "bounds"), [("layers", (0, 4, 8, 12, 16)), ("modules", (0, 4, 9, 14, 16)), ("costs", (0, 6, 11, 16, 16))]
)
def test_stages_begin_where_the_frameworks_cut_them(rule: str, bounds: tuple[int, ...]) -> None:
    # 19 modules on 4 stages: 5, 5, 5 and 4. Costs: the head weighs as much as 4 layers, so that a share is 5 of 20.
    config = {"model_type": "llama", "vocab_size": 131072, "hidden_size": 2048, "num_attention_heads": 32,
              "num_hidden_layers": 16, "intermediate_size": 8192}  # fmt: skip
    assert stage_bounds(ModelShape.from_config(config), 4, rule) == bounds  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["megatron", "megatron-2021", "nanotron", "aleph-alpha-scaling", "automodel"])
@pytest.mark.parametrize("layers", [16, 30, 32])
def test_time_and_memory_cut_a_frameworks_stages_alike(name: str, layers: int) -> None:
    config = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "num_attention_heads": 8,
              "num_hidden_layers": layers, "intermediate_size": 4096}  # fmt: skip
    model = ModelFacts.from_config(config)
    one = step_request(model.shape, Layout(pp=8), micro_batch_size=1, accumulation=8, seq_len=4096, cluster=CLUSTER)
    stages = changed(one, execution=Execution(framework=name)).stages
    in_memory = stage_layers(FrameworkProfile(name=name), model, 8)
    assert stages == [len(own_layers) for own_layers in in_memory]


def test_tied_embeddings_are_summed_over_the_first_and_the_last_stage() -> None:
    tied, untied = setup("pp2", "gpt2"), setup("pp2", "gpt2")
    untied = changed(untied, model=model_of(replace(untied.shape, tied=False)))
    assert predict_step(tied).data > predict_step(untied).data == 0


def test_whole_activations_take_as_many_times_longer_as_there_are_tensor_parallel_ranks() -> None:
    def moved(framework: str) -> float:
        requests = (setup("tp4-pp2", execution=Execution(framework=framework), micro_batch_size=m) for m in (8, 16))
        few, many = (predict_step(request).pipeline for request in requests)
        return many - few

    assert moved("aleph-alpha-scaling") == pytest.approx(4 * moved("megatron"))


def test_data_parallel_communication_hides_behind_the_backward_pass_where_the_framework_overlaps_it() -> None:
    times = [
        predict_step(setup("dp64-z0", execution=Execution(framework=name))).data
        for name in ("megatron", "megatron-2021")
    ]
    assert times[0] < times[1] / 2


def test_every_profile_names_its_source_and_the_same_facts() -> None:
    optional = {"unfused_norm", "reduces_all", "sends_whole", "copies_shards"}
    facts = {name: frozenset(row) - optional for name, row in profiles().items()}
    assert len(set(facts.values())) == 1
    assert all(row["source"] for row in profiles().values())


def test_every_gpu_has_what_the_time_model_needs() -> None:
    for name in gpus():
        found = gpu(name)
        assert found.multiprocessors >= 1
        assert found.memory_bytes_per_second > found.network_bytes_per_second
        assert all(0.3 < share < 1 for share in found.matmul_fraction.values())


LORA = "lora:r=4,targets=all-linear,fp32=no"


def trained_of(name: str, text: str) -> Trained:
    return Trained.of(parameters(config_text(find_config(name) or {}), text), dropout=False)


def counted_flops(name: str, text: str, seq_len: int, *, input_has_gradient: bool) -> float:
    """What torch counts of a token, forward and backward; LoRA's layers are peft's."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.recorder.frozen import freeze

    config = AutoConfig.for_model(**(find_config(name) or {}), use_cache=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    freeze(model, Trainable.parse(text))
    if input_has_gradient:
        model.enable_input_require_grads()
    tokens = torch.zeros(2, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return counter.get_total_flops() / (2 * seq_len)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_frozen_weights_have_no_gradients_among_the_flops(name: str) -> None:
    shape, s = shape_of(name), 16
    formula = trained_of(name, LORA).flops_per_token(shape, s)
    assert formula == counted_flops(name, LORA, s, input_has_gradient=True)
    # Otherwise the first layer's queries, keys and values have none: the known error.
    missing = shape.attention_dim + 2 * shape.kv_dim + 4 * (1 if shape.learned_positions else 3)
    assert formula - counted_flops(name, LORA, s, input_has_gradient=False) == 2 * shape.hidden * missing


def test_the_backward_pass_ends_at_the_first_layer_that_trains() -> None:
    shape, s, text = shape_of("llama-tiny"), 16, "model.layers.3.*,lm_head*"
    trained = trained_of("llama-tiny", text)
    assert trained.flops_per_token(shape, s) == counted_flops("llama-tiny", text, s, input_has_gradient=False)
    recomputed = trained.recomputed.flops_per_token(shape, s)
    assert recomputed == counted_flops("llama-tiny", text, s, input_has_gradient=True)


def test_only_what_trains_is_reduced_and_updated_and_zero3_gathers_all() -> None:
    trained = trained_of("llama-tiny", LORA)

    def both(layout: str) -> tuple[StepTime, StepTime]:
        # With links so slow that nothing is hidden.
        asked = setup(layout, "llama-tiny", cluster=Cluster.of(H100, link_bytes_per_second=1e6))
        return predict_step(asked), predict_step(replace(asked, trained=trained))

    full, adapters = both("dp8-z1")
    share = trained.layer * 4 / (4 * layer_matmul_parameters(shape_of("llama-tiny")))
    assert adapters.data / full.data == pytest.approx(0.5 * share, rel=0.7)
    assert adapters.optimizer < full.optimizer
    full, adapters = both("dp8-z3")
    assert 0.3 < adapters.data / full.data < 0.7  # two gathers, and a reduction of four bytes for each two of a gather


def experts_setup(layout: str, model: str = "qwen3-30b-a3b", **changes: object) -> StepRequest:
    config = find_config(model)
    assert config is not None
    fields = {"micro_batch_size": 4, "accumulation": 8, "seq_len": 4096, "cluster": CLUSTER} | changes
    shape = ModelFacts.from_config(config).shape
    return step_request(shape, Layout.parse(layout), **fields)  # type: ignore[arg-type]


def test_expert_parallel_ranks_exchange_every_routed_row_four_times_a_layer() -> None:
    asked = experts_setup("dp8-ep8-z1")
    experts = asked.shape.experts
    assert experts is not None
    rows = 4 * 4096 * experts.per_token
    sent = 8 * asked.shape.layers * 4 * rows * asked.shape.hidden * 2 * 7 / 8
    bandwidth = LINK_SHARE * CLUSTER.link_bytes_per_second
    assert predict_step(asked).expert == pytest.approx(sent / bandwidth, rel=0.05)
    assert predict_step(experts_setup("dp8-z1")).expert == 0.0


def test_recomputation_exchanges_rows_once_more_each_way() -> None:
    asked = experts_setup("dp8-ep8-z1")
    again = changed(asked, layout=replace(asked.layout, recompute="full"))
    assert predict_step(again).expert == pytest.approx(1.5 * predict_step(asked).expert)


def test_an_exchange_across_nodes_takes_longer_and_deepep_shortens_it() -> None:
    inside, across = (experts_setup(f"dp64-ep{ep}-z1") for ep in (8, 64))
    merged = replace(across, execution=Execution(framework="megatron", dispatcher="deepep"))
    neighbors = replace(across, execution=Execution(framework="megatron", dispatcher="deepep", routing="consecutive"))
    seconds = [predict_step(one).expert for one in (inside, neighbors, merged, across)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1]


def test_the_busiest_rank_computes_and_receives_in_proportion_to_its_load() -> None:
    asked = experts_setup("dp8-ep8-z1")
    even, uneven = predict_step(asked), predict_step(changed(asked, imbalance=1.5))
    assert uneven.expert == pytest.approx(1.5 * even.expert, rel=0.02)
    assert even.compute < uneven.compute < 1.5 * even.compute
    alone = experts_setup("dp8-z1")
    assert predict_step(changed(alone, imbalance=1.5)) == predict_step(alone)


def test_many_experts_with_few_rows_each_take_longer_than_their_flops() -> None:
    one = matmul_seconds(H100, 8192, 2048, 2048, "bf16")
    assert matmul_seconds(H100, 1024, 2048, 2048, "bf16", 8) == pytest.approx(one, rel=0.1)
    assert matmul_seconds(H100, 64, 2048, 2048, "bf16", 128) > 1.5 * one


def test_gradients_of_experts_are_reduced_over_the_replicas_that_have_the_same_ones() -> None:
    spread = experts_setup("dp64-ep64-z1")
    assert spread.routed * 64 == pytest.approx(experts_setup("dp64-z1").routed)
    # Nobody else has them: nothing of them is exchanged.
    assert data_seconds(spread, 0, 0) < data_seconds(experts_setup("dp64-ep8-z1"), 0, 0) / 3


@pytest.mark.parametrize("model", ["mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v3"])
def test_the_weights_of_a_rank_add_up_to_the_models(model: str) -> None:
    alone = experts_setup("dp1", model)
    whole = ModelFacts.from_config(find_config(model) or {}).parameters.numel
    assert alone.parameters + alone.routed == pytest.approx(whole, rel=2e-3)  # without norms and biases
    split = experts_setup("dp4-ep4-tp2-z1", model)
    assert 8 * split.routed == pytest.approx(alone.routed)


def test_passes_without_gradients_take_the_forward_pass_each() -> None:
    request = setup()
    once = predict_step(request)
    three = predict_step(replace(request, setup=replace(request.setup, forward_passes=2)))
    assert once.reference == 0
    assert three.reference == 2 * once.forward
    assert 0.2 < once.forward / once.compute < 0.5
    assert three.seconds == pytest.approx(once.seconds + three.reference)


def test_gradients_of_weights_take_no_more_than_the_backward_pass_that_reaches_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[ScheduleCosts] = []

    def waiting(_: object, costs: ScheduleCosts) -> float:
        seen.append(costs)
        return 0.0

    monkeypatch.setattr("toolkit.planner.step_time.waiting_seconds", waiting)
    late = Trained.of(parameters(config_text(find_config("llama-3-8b") or {}), "*.31.*"), dropout=False)
    predict_step(replace(setup("pp4-zbh1"), trained=late))
    (costs,) = seen
    assert min(costs.backward) > 0


def test_attention_is_recomputed_in_the_layers_that_the_backward_pass_reaches() -> None:
    late = Trained.of(parameters(config_text(find_config("llama-3-8b") or {}), "*.31.*"), dropout=False)
    one = setup("dp8-z1")
    one = changed(one, layout=replace(one.layout, recompute="selective"))
    all_train = predict_step(one).recompute
    assert predict_step(replace(one, trained=late)).recompute == pytest.approx(all_train / 32)


def test_ends_on_one_rank_reduce_no_tied_embeddings() -> None:
    assert data_seconds(setup("pp4-zbv", "gpt2"), 0.0, 0.0) == 0.0
    assert data_seconds(setup("pp4-zbh1", "gpt2"), 0.0, 0.0) > 0.0


def test_half_of_the_messages_of_a_step_are_of_its_forward_pass() -> None:
    asked = setup("pp4", cluster=replace(CLUSTER, cores=2, slowdown=1.0))
    slow = replace(asked, cluster=replace(asked.cluster, send_seconds=1.0))
    step, slower = predict_step(asked), predict_step(slow)
    assert slower.pipeline > step.pipeline
    assert slower.forward - step.forward == pytest.approx((slower.pipeline - step.pipeline) / 2)


def test_products_in_fp32_write_four_bytes_an_element() -> None:
    kind = gpu("A100-80")
    seconds = matmul_seconds(kind, 16384, 16384, 1, "fp32")
    assert seconds > 4 * 16384**2 / kind.memory_bytes_per_second


@pytest.mark.parametrize("layout", [{"offload_optimizer": "cpu"}, {"offload_params": "cpu"}])
def test_weights_in_fp32_take_twice_as_long_to_come_from_the_host(layout: dict[str, Any]) -> None:
    one = setup("dp8-z3")
    one = changed(one, layout=replace(one.layout, **layout))
    link = one.cluster.host_bytes_per_second
    in_fp32 = replace(one, execution=Execution(precision="fp32"))
    added = offload_seconds(in_fp32, 1e9) - offload_seconds(one, 1e9)
    copies = 1 if "offload_optimizer" in layout else 1 + 2 * one.setup.accumulation
    assert added == pytest.approx(2 * copies * one.parameters / one.replicas / link)
