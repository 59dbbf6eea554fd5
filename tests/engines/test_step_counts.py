"""A training step waits for the device once, reads a gradient once for its norm, and sends what closed forms say.

Counts are of the fourth step, and the same on any machine (benchmarks/measure/step_counter.py): a change that adds a
read, a cast or a collective fails here. docs/step-counts.md derives the formulas.
"""

import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.host_read import read_together
from toolkit.parallel.host_numbers import draw_number
from toolkit.training.train import train

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from measure.step_counter import BACKWARD, FORWARD, UPDATE, CountedStep, StepCounter, StepCounts

LAYERS = 2
HIDDEN = 32
SEQ_LEN = 32
MICRO_BATCHES = 2
SAMPLES = 2
MODEL = {
    "name_or_path": "llama-tiny",
    "overrides": {
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
    },
}
EXPERTS = 4
EXPERTS_PER_TOKEN = 2
MODEL_OF_EXPERTS = {
    "name_or_path": "qwen3-30b-a3b",
    "overrides": {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "vocab_size": 320,
    },
}
LAYOUTS = {
    "reference": "fp32",
    "dp2-ddp": "bf16",
    "dp2-z0": "fp32",
    "dp2-z1": "bf16",
    "dp2-z2": "bf16",
    "dp2-z3": "bf16",
    "tp2-z1": "bf16",
    "tp2-z1-sp": "bf16",
    "pp2-z0": "fp32",
    "pp2-z1": "bf16",
    "u2-z3": "bf16",
}
Counted = Callable[[str], list[tuple[StepCounts, int]]]


def count(recipe: Recipe) -> tuple[StepCounts, int]:
    """Counts of a step of this rank, and the elements of the gradients that it has."""
    step = CountedStep()
    train(Job.of(recipe, dist.get_world_size()), [step], in_memory=True)
    assert step.result is not None
    assert step.facts is not None
    return step.result, step.facts.parameters


@pytest.fixture(scope="module")
def counted(make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]]) -> Callable[[str], Any]:
    @cache
    def run(layout: str) -> Any:
        strategy = Strategy.parse(layout)
        size = strategy.world_size(1)
        recipe = make_recipe(
            model=MODEL_OF_EXPERTS if strategy.ep > 1 else MODEL,
            precision=LAYOUTS.get(layout, "bf16"),
            batch={
                "global_batch_size": MICRO_BATCHES * SAMPLES * size // strategy.model_size,
                "micro_batch_size": SAMPLES,
            },
            train__steps=5,
            train__grad_clip=1e-3,
        )
        return ranks(count, size, strategy.apply(recipe, size))

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_waits_for_the_device_at_the_end_of_a_step_alone(counted: Counted, layout: str) -> None:
    """Once for the loss, the norm, the fingerprint of the batch and whether a rank wants to stop."""
    for counts, _ in counted(layout):
        reads = Counter({(read.phase, read.place.partition(":")[0]): n for read, n in counts.host_reads.items()})
        assert reads == {(UPDATE, "toolkit/engines/host_read.py"): 1}


@pytest.mark.parametrize("layout", ["reference", "dp2-ddp", "dp2-z0", "dp2-z2", "dp2-z3", "dp2-z1", "tp2-z1"])
def test_the_norm_reads_every_gradient_once(counted: Counted, layout: str) -> None:
    strategy = Strategy.parse(layout)
    replicas = 2 if strategy.zero_stage in (2, 3) else 1  # that share out the gradients
    for counts, parameters in counted(layout):
        # What remains are the norms of pieces, a 1,024th and one of each parameter, and the padding of shards.
        assert counts.norm_bytes == pytest.approx(4 * parameters / replicas, rel=0.05)


@pytest.mark.parametrize("layout", ["dp2-z1", "tp2-z1", "pp2-z1"])
def test_zero_1_fills_no_gradients_with_zeros(counted: Counted, layout: str) -> None:
    """The first gradient of a step overwrites that of the step before."""
    for counts, _ in counted(layout):
        assert counts.moved_by_name[UPDATE, "_foreach_mul_"]
        assert not counts.moved_by_name[UPDATE, "zero_"] + counts.moved_by_name[UPDATE, "_foreach_zero_"]


def test_zero_3_updates_from_the_gradients_where_they_are(counted: Counted) -> None:
    """Loss and norm alone are joined for the host."""
    for counts, parameters in counted("dp2-z3"):
        assert 0 < counts.moved_by_name[UPDATE, "cat"] < parameters // 10


WHOLE = 2 * SAMPLES * SEQ_LEN * HIDDEN
"""Bytes of the hidden states of a micro-batch, in bf16."""


def sent(counts: StepCounts, kind: str, size: int) -> int:
    """How many collectives of a kind have so many bytes on average, outside of the update."""
    calls = [call for call in counts.collectives if call.kind == kind and call.phase != UPDATE]
    number = sum(counts.collectives[call] for call in calls)
    assert sum(counts.collective_bytes[call] for call in calls) == number * size
    return number


def test_sequence_parallelism_gathers_and_scatters_as_the_closed_form_says(counted: Counted) -> None:
    """Beside those of the layers, one gather before the head and one in the backward pass of the embeddings."""
    for counts, _ in counted("tp2-z1-sp"):
        assert sent(counts, "reduce_scatter", WHOLE) == 4 * LAYERS * MICRO_BATCHES
        assert sent(counts, "allgather", WHOLE) == (4 * LAYERS + 2) * MICRO_BATCHES


def test_tensor_parallelism_sums_four_times_a_layer_and_at_both_ends(counted: Counted) -> None:
    """A cross-entropy over shards of the vocabulary sums three numbers of each token in fp32, in two calls."""
    for counts, _ in counted("tp2-z1"):
        calls = [call for call in counts.collectives if call.phase != UPDATE and call.group_size == 2]
        assert {call.kind for call in calls} == {"allreduce"}
        assert sum(counts.collectives[call] for call in calls) == (4 * LAYERS + 4) * MICRO_BATCHES
        size = sum(counts.collective_bytes[call] for call in calls)
        assert size == ((4 * LAYERS + 2) * WHOLE + 12 * SAMPLES * SEQ_LEN) * MICRO_BATCHES


COLUMN_FEATURES = HIDDEN + 2 * (HIDDEN // 2) + 2 * 256
"""Outputs of queries, of keys and values, which have half as many heads, and of gate and up."""


@pytest.mark.parametrize(("layout", "kind"), [("tp2-z1", "allreduce"), ("tp2-z1-sp", "reduce_scatter")])
def test_weight_gradients_are_computed_while_the_gradient_of_the_input_is_summed(
    counted: Counted, layout: str, kind: str
) -> None:
    """Each of two ranks multiplies half of the outputs of queries, keys, values, gate and up."""
    for counts, _ in counted(layout):
        calls = [call for call in counts.collectives if call.phase == BACKWARD and call.kind == kind and call.is_async]
        # Two in each layer. Sequence parallelism sums nothing in front of the head.
        ends = MICRO_BATCHES if kind == "allreduce" else 0
        assert sum(counts.collectives[call] for call in calls) == 2 * LAYERS * MICRO_BATCHES + ends
        products = 2 * SAMPLES * SEQ_LEN * HIDDEN * COLUMN_FEATURES // 2
        assert sum(counts.flops_meanwhile[call] for call in calls) == products * LAYERS * MICRO_BATCHES


def test_a_pipeline_sends_each_hidden_state_and_its_gradient_once(counted: Counted) -> None:
    for counts, _ in counted("pp2-z1"):
        assert sent(counts, "send", WHOLE) == MICRO_BATCHES
        assert sent(counts, "recv", WHOLE) == MICRO_BATCHES


def test_ulysses_exchanges_queries_keys_values_and_outputs_once_each_way(counted: Counted) -> None:
    """Each rank sends its half of the positions, with all heads; keys and values have half as many as queries."""
    queries = 2 * SAMPLES * (SEQ_LEN // 2) * HIDDEN
    for counts, _ in counted("u2-z3"):
        for phase in (FORWARD, BACKWARD):
            calls = [call for call in counts.collectives if (call.kind, call.phase) == ("alltoall", phase)]
            assert sum(counts.collectives[call] for call in calls) == 4 * LAYERS * MICRO_BATCHES
            sent_bytes = sum(counts.collective_bytes[call] for call in calls)
            assert sent_bytes == (queries + queries // 2 + queries // 2 + queries) * LAYERS * MICRO_BATCHES


def test_expert_parallelism_sends_a_row_for_each_token_and_expert_there_and_back(counted: Counted) -> None:
    """A rank sends all of its rows and gets back as many; how many it gets in between depends on the routers, but all
    ranks together get what they send. Before, ranks tell each other how many, in one number of 8 bytes an expert."""
    ranks = counted("dp2-ep2-z2")
    rows = 2 * SAMPLES * SEQ_LEN * EXPERTS_PER_TOKEN * HIDDEN
    for phase in (FORWARD, BACKWARD):
        calls = Counter[bool]()
        sent_bytes = Counter[bool]()
        for counts, _ in ranks:
            for call, number in counts.collectives.items():
                if (call.kind, call.phase) == ("alltoall", phase):
                    calls[call.is_async] += number
                    sent_bytes[call.is_async] += counts.collective_bytes[call]
        exchanges = len(ranks) * LAYERS * MICRO_BATCHES
        assert calls[True] == 2 * exchanges
        assert sent_bytes[True] == 2 * exchanges * rows
        assert calls[False] == exchanges * (phase == FORWARD)
        assert sent_bytes[False] == 8 * EXPERTS * calls[False]


def overlap() -> list[tuple[int, int]]:
    """Operations, and operations of products, between the start and the wait of two sums over ranks."""
    counter = StepCounter()
    value = torch.ones(4)
    matrix = torch.ones(8, 8)
    counter.start()
    work = dist.all_reduce(value, async_op=True)
    matrix.mm(matrix).add_(1.0)
    work.wait()
    dist.all_reduce(value)
    counts = counter.stop()
    assert sum(counts.collectives.values()) == 2
    return [(counts.operations_meanwhile[call], counts.flops_meanwhile[call]) for call in counts.waits]


def test_what_is_computed_while_a_collective_runs_is_counted(ranks: Callable[..., list[Any]]) -> None:
    """Of the asynchronous one alone: a product of 8 x 8 matrices, and an addition."""
    assert ranks(overlap, 2) == [[(2, 2 * 8**3)], [(2, 2 * 8**3)]]


def test_bytes_and_allocations_of_an_operation_are_what_it_reads_writes_and_returns() -> None:
    """Twelve bytes a tensor: read and written in place, then read into a new one, then overwritten; a view is free."""
    values = torch.ones(3)
    other = torch.ones(3)
    counter = StepCounter()
    counter.start()
    values.mul_(2.0)
    other.copy_(values.neg().view(3, 1).flatten())
    counts = counter.stop()
    moved = {name: size for (_, name), size in counts.moved_by_name.items()}
    assert moved == {"mul_": 24, "neg": 24, "copy_": 24}
    assert (counts.allocations, counts.allocated_bytes) == (1, 12)


def test_a_number_from_the_hosts_random_generator_waits_for_no_device() -> None:
    """Tensor-parallel ranks seed their dropout with such numbers, in every block."""
    counter = StepCounter()
    counter.start()
    assert draw_number() != draw_number()
    counts = counter.stop()
    assert not counts.host_reads
    assert counts.counter_reads == 2


def test_reading_one_number_more_is_counted() -> None:
    """The counter sees what the tests above are about."""
    counter = StepCounter()
    counter.start()
    values = torch.ones(3)
    read_together(values.double(), values.sum())
    assert bool((values > 0).all())
    reads = counter.stop().host_reads
    assert sorted(read.operation for read in reads) == ["_local_scalar_dense", "tolist"]
    assert {read.phase for read in reads} == {FORWARD}
    assert BACKWARD not in counter.counts.operations
