"""Stage boundaries: costs counted from the model, and the partition whose slowest stage is fastest."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from nonempty import nonempty
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from toolkit.config.layout import Recompute
from toolkit.config.pipeline_schedules import KINDS, Kind, Schedule, schedule_of
from toolkit.config.simulate_schedule import SIMULATED_STAGES, ScheduleCosts, simulate
from toolkit.config.stage_balance import Costs, balance, balance_schedule
from toolkit.errors import LayoutError
from toolkit.estimate.flops import train_flops_per_token
from toolkit.models.shape import ModelShape
from toolkit.parallel.model_structure import analyze_model
from toolkit.parallel.pipeline.balance import count_costs
from toolkit.parallel.pipeline.stage import PipelineStage


def costs_of(*layers: float, before: float = 0.0, after: float = 0.0) -> Costs:
    return Costs(before=before, layers=layers, after=after)


def partitions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every allowed partition."""
    for inner in combinations_with_replacement(range(layers + 1), stages - 1):
        bounds = (0, *inner, layers)
        if all(start < stop for start, stop in list(pairwise(bounds))[:-1]):
            yield bounds


def slowest(costs: Costs, bounds: tuple[int, ...]) -> float:
    times = [sum(costs.layers[start:stop]) for start, stop in pairwise(bounds)]
    times[0] += costs.before
    times[-1] += costs.after
    return max(times)


def most_kept(bounds: tuple[int, ...]) -> int:
    return max((len(bounds) - 1 - stage) * (stop - start) for stage, (start, stop) in enumerate(pairwise(bounds)))


@pytest.mark.parametrize("seed", range(200))
def test_no_partition_is_better_in_time_then_memory_then_early_layers(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(1, 7)
    # Whole numbers make ties, which are exact in any order of summing.
    costs = costs_of(*(draw.randint(1, 3) for _ in range(layers)), before=draw.randint(0, 4), after=draw.randint(0, 12))
    stages = draw.randint(1, layers)
    best = min(partitions(layers, stages), key=lambda bounds: (slowest(costs, bounds), most_kept(bounds), bounds))
    assert balance(costs, stages) == best


def step_time(costs: Costs, schedule: Schedule, bounds: Sequence[int]) -> float:
    """Simulate a step of all micro-batches; a third of each stage is F, B and W."""
    thirds = [sum(costs.layers[start:stop]) / 3 for start, stop in pairwise(bounds)]
    thirds[0] += costs.before / 3
    thirds[-1] += costs.after / 3
    return simulate(schedule, ScheduleCosts(forward=thirds, backward=thirds, weight=thirds)).makespan


def fastest_and_balanced(kind: Kind, draw: random.Random) -> tuple[float, float]:
    """Draw a model of equal layers, embeddings and a head: its balanced step, over the fastest of all partitions, and
    over that whose slowest stage is fastest."""
    pp = draw.choice((2, 3))
    schedule = schedule_of(kind, pp=pp, micro_batches=draw.randint(pp, 5 * pp))
    layers = [1.0] * (len(schedule.rank_of) + draw.randint(1, 5))
    costs = costs_of(*layers, before=draw.random() / 2, after=draw.choice((0.3, 1.0, 2.5)))
    times = [step_time(costs, schedule, bounds) for bounds in partitions(len(layers), len(schedule.rank_of))]
    reached = step_time(costs, schedule, balance_schedule(costs, schedule))
    return reached / min(times), reached / step_time(costs, schedule, balance(costs, len(schedule.rank_of)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_simulated_step_is_fastest_or_nearly_so(kind: Kind) -> None:
    draw = random.Random(0)
    over_fastest, over_balanced = zip(*(fastest_and_balanced(kind, draw) for _ in range(40)), strict=True)
    assert max(over_fastest) < 1.06
    assert sum(over_fastest) / 40 < 1.01
    assert max(over_balanced) < 1 + 1e-9
    if kind != "gpipe":
        assert min(over_balanced) < 0.99, "the simulation shortens some steps"


def test_more_stages_than_are_simulated_have_the_fastest_slowest_rank() -> None:
    schedule = schedule_of("interleaved", pp=SIMULATED_STAGES, micro_batches=SIMULATED_STAGES)
    costs = costs_of(*[1.0] * 4 * SIMULATED_STAGES, after=3.0)
    bounds = balance_schedule(costs, schedule)
    first, last = bounds[1], bounds[-1] - bounds[-2]
    assert first == 2
    assert last == 0, "the head is as long as three layers, and this rank has another stage"


@pytest.mark.parametrize("seed", range(50))
def test_no_partition_is_faster_where_costs_have_fractions(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(2, 9)
    costs = costs_of(*(draw.uniform(0.1, 3) for _ in range(layers)), before=draw.random(), after=draw.uniform(0, 9))
    stages = draw.randint(2, min(4, layers))
    best = min(slowest(costs, bounds) for bounds in partitions(layers, stages))
    assert slowest(costs, balance(costs, stages)) == pytest.approx(best, rel=1e-9)


def test_one_stage_has_every_layer() -> None:
    assert balance(costs_of(1, 2, 3, before=1, after=9), 1) == (0, 3)


def test_as_many_stages_as_layers_is_one_layer_each() -> None:
    assert balance(costs_of(1, 1, 1, 1), 4) == (0, 1, 2, 3, 4)


def test_a_head_as_slow_as_all_layers_is_a_stage_of_its_own() -> None:
    assert balance(costs_of(1, 1, 1, 1, after=10), 2) == (0, 4, 4)


def test_every_stage_has_a_layer_where_the_head_may_not_be_alone() -> None:
    heavy = Costs(before=0.0, layers=(1.0,) * 6, after=20.0)
    assert balance(heavy, 3)[-2] == 6
    for stages in range(1, 7):
        bounds = balance(heavy, stages, head_alone=False)
        assert all(start < stop for start, stop in pairwise(bounds))


def test_a_slow_embedding_leaves_its_stage_one_layer() -> None:
    assert balance(costs_of(1, 1, 1, 1, before=10), 2) == (0, 1, 4)


def test_layers_of_different_cost_are_partitioned_by_cost_and_not_by_number() -> None:
    assert balance(costs_of(4, 1, 1, 1, 1), 2) == (0, 1, 5)


def test_with_equal_times_the_earlier_stage_gets_less() -> None:
    assert balance(costs_of(1, 1, 1), 2) == (0, 1, 3)


def test_stages_that_wait_for_a_slow_head_share_the_layers_by_the_micro_batches_they_keep() -> None:
    # Stages 0 and 1 keep 3 and 2 micro-batches: 3 · 2 and 2 · 4 layers' activations, where 0 and 6 would be 12.
    assert balance(costs_of(*[1] * 6, after=20), 3) == (0, 2, 6, 6)


def test_a_deep_model_is_partitioned_quickly_into_many_stages() -> None:
    bounds = balance(costs_of(*[1] * 256, after=3), 64)
    assert max(stop - start for start, stop in pairwise(bounds)) == 5


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_layers_are_refused(stages: int) -> None:
    with pytest.raises(LayoutError) as caught:
        balance(costs_of(1, 1, 1), stages)
    assert caught.value.refusal.settings == (("pp", stages),)
    assert caught.value.refusal.remedy == (("pp", "1 to 3"),)


def gpt2(*, vocab: int = 1000, layers: int = 3) -> PreTrainedModel:
    config = GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=vocab, bos_token_id=None, eos_token_id=None)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    model.tie_weights()
    return model


def counted(
    model: PreTrainedModel, *, recompute: Recompute = "none", flops_per_byte: float = 0.0, micro: int = 4
) -> Costs:
    return count_costs(
        model,
        analyze_model(model),
        seq_len=32,
        micro_batch_size=micro,
        recompute=recompute,
        flops_per_byte=flops_per_byte,
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_flops_of_all_parts_are_those_of_the_estimate(recompute: Recompute) -> None:
    model = gpt2()
    costs = counted(model, recompute=recompute)
    expected = train_flops_per_token(ModelShape.from_config(model.config.to_dict()), 32, recompute=recompute == "full")
    assert costs.before + sum(costs.layers) + costs.after == expected


def test_the_head_costs_six_flops_a_weight() -> None:
    assert counted(gpt2()).after == 6 * 64 * 1000


def test_recomputing_adds_a_third_to_layers_and_nothing_to_the_head() -> None:
    plain, again = counted(gpt2()), counted(gpt2(), recompute="full")
    assert again.layers == tuple(flops * 4 / 3 for flops in plain.layers)
    assert (again.before, again.after) == (plain.before, plain.after)


def test_selective_recomputation_adds_the_products_of_queries_with_keys_and_of_scores_with_values() -> None:
    plain, again = counted(gpt2()), counted(gpt2(), recompute="selective")
    assert again.layers == tuple(flops + 4 * 64 * 32 for flops in plain.layers)  # 2 x 2 x hidden x positions a token
    assert (again.before, again.after) == (plain.before, plain.after)


def test_the_gradient_of_the_embedding_weighs_less_with_a_larger_micro_batch() -> None:
    small, large = (counted(gpt2(), flops_per_byte=3.0, micro=micro).before for micro in (1, 8))
    assert small == 3.0 * 16 * 64 * (1000 + 1024) / 32
    assert large == small / 8


def test_the_loss_passes_six_times_over_the_logits() -> None:
    head = counted(gpt2(), flops_per_byte=1.0).after
    parameters = 64 * 1000 + 2 * 64
    assert head == 6 * 64 * 1000 + 16 * parameters / (4 * 32) + 6 * 4 * 1000


def test_layers_of_different_kinds_have_costs_of_their_own() -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        model.model.layers[1].mlp = type(model.model.layers[1].mlp)(LlamaConfig(hidden_size=64, intermediate_size=256))
    thin, wide = counted(model).layers
    assert wide - thin == 6 * 3 * 64 * 128


def test_a_large_vocabulary_moves_layers_away_from_the_head() -> None:
    assert [balance(counted(gpt2(vocab=vocab, layers=6)), 2) for vocab in (8, 3300, 50_000)] == [
        (0, 3, 6),
        (0, 5, 6),
        (0, 6, 6),
    ]


def test_counting_leaves_no_hook_behind() -> None:
    model = gpt2()
    counted(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in nonempty(model.modules()))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_last_stage_without_layers_trains_the_same(checkpointing: bool) -> None:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=100, tie_word_embeddings=False, **dropout)
    config.bos_token_id = config.eos_token_id = None
    whole = GPT2LMHeadModel(config)
    stages = []
    for stage in range(2):
        part = GPT2LMHeadModel(config)
        part.load_state_dict(whole.state_dict())
        if checkpointing:
            part.gradient_checkpointing_enable({"use_reentrant": False})
        stages.append(PipelineStage(part, analyze_model(whole), bounds=(0, 2, 2), stages=[stage]))
    ids = torch.arange(16).view(2, 8)
    whole.train()
    for model in (lambda: stages[1](stages[0].train()((ids,))), lambda: whole(input_ids=ids).logits):
        model().square().sum().backward()
    expected = dict(whole.named_parameters())
    found = {name: p for stage in stages for name, p in stage.model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad, expected[name].grad)
