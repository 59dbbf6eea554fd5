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
from toolkit.engines.base import read_together
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
            model=MODEL,
            precision=LAYOUTS[layout],
            batch={
                "global_batch_size": MICRO_BATCHES * SAMPLES * size // strategy.model_size,
                "micro_batch_size": SAMPLES,
            },
            train__steps=5,
            train__grad_clip=1e-3,
        )
        return ranks(count, size, strategy.apply(recipe, size), timeout_seconds=300)

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_waits_for_the_device_at_the_end_of_a_step_alone(counted: Counted, layout: str) -> None:
    """Once for the loss, the norm, the fingerprint of the batch and whether a rank wants to stop."""
    for counts, _ in counted(layout):
        reads = Counter({(read.phase, read.place.partition(":")[0]): n for read, n in counts.host_reads.items()})
        assert reads == {(UPDATE, "toolkit/engines/base.py"): 1}


@pytest.mark.parametrize("layout", ["reference", "dp2-ddp", "dp2-z0", "dp2-z2", "dp2-z3", "dp2-z1", "tp2-z1"])
def test_the_norm_reads_every_gradient_once(counted: Counted, layout: str) -> None:
    strategy = Strategy.parse(layout)
    replicas = 2 if strategy.zero_stage in (2, 3) else 1  # that share out the gradients
    for counts, parameters in counted(layout):
        # What remains are the norms of pieces, a 1,024th and one of each parameter, and the padding of shards.
        assert counts.norm_bytes == pytest.approx(4 * parameters / replicas, rel=0.05)


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


def test_a_pipeline_sends_each_hidden_state_and_its_gradient_once(counted: Counted) -> None:
    for counts, _ in counted("pp2-z1"):
        assert sent(counts, "send", WHOLE) == MICRO_BATCHES
        assert sent(counts, "recv", WHOLE) == MICRO_BATCHES


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
