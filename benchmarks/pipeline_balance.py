"""Partitions of a pipeline: our bounds against DeepSpeed's `uniform` and `parameters`, for GPT-2 with its vocabulary.

    python benchmarks/pipeline_balance.py               # five rounds: about eight minutes
    python benchmarks/pipeline_balance.py --quick       # does it run? The figures mean nothing.
    python benchmarks/pipeline_balance.py --save        # also writes benchmarks/results/pipeline_balance.md

One process on one thread times both stages of each partition, in fp32: forward, loss and backward of a micro-batch, the
gradients added to those before. A pipeline with many micro-batches runs at the speed of its slowest stage, so tokens/s
is a micro-batch's tokens by the time of that stage: what the partition allows, without communication, bubble and
optimizer.

The partitions take turns in each round. Prints medians, and of the ratios of tokens/s to the better of DeepSpeed's two
in the same round the median, the smallest and the largest.
"""

import argparse
import os
import statistics
import time
from itertools import pairwise

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measure.deepspeed_bounds import by_parameters, uniform
from measure.table import publish, target_met
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from toolkit.config.stage_balance import Costs, balance
from toolkit.launch.output import quiet
from toolkit.model_init.freed_memory import keep_freed_memory
from toolkit.parallel.loss import token_loss_sum
from toolkit.parallel.model_structure import ModelStructure, analyze_model
from toolkit.parallel.pipeline.balance import count_costs
from toolkit.parallel.pipeline.stage import PipelineStage

STAGES = 2
TARGET = 1.25
SEQ_LEN, MICRO_BATCH_SIZE = 256, 2
STEPS, WARMUP = 3, 2
SHAPES = {"4 x 256": (4, 256), "4 x 512": (4, 512), "6 x 384": (6, 384), "6 x 512": (6, 512), "6 x 768": (6, 768)}
"""Decoder layers and hidden size; the vocabulary is GPT-2's 50,257 in each."""
Bounds = tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each partition")
    parser.add_argument("--quick", action="store_true", help="one round of the first shape")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/pipeline_balance.md")
    options = parser.parse_args()
    quiet(debug=False)
    keep_freed_memory()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    notes = [
        f"Micro-batches of {MICRO_BATCH_SIZE} samples of {SEQ_LEN} tokens, vocabulary 50,257, tied embeddings, fp32."
    ]
    for name in list(SHAPES)[:1] if options.quick else options.shapes:
        config = gpt2(*SHAPES[name])
        with torch.device("meta"):
            twin = GPT2LMHeadModel(config)
        twin.tie_weights()
        structure = analyze_model(twin)
        costs = count_costs(twin, structure, seq_len=SEQ_LEN, micro_batch_size=MICRO_BATCH_SIZE)
        partitions = {
            "uniform": uniform(structure.count, STAGES),
            "parameters": by_parameters(*parameters(twin, structure), STAGES),
            "balance": balance(costs, STAGES),
        }
        times = measure(
            config, structure, list(dict.fromkeys(partitions.values())), 1 if options.quick else options.rounds
        )
        rows += table_rows(name, partitions, times)
        notes.append(f"{name}: {shares(costs, partitions['uniform'], times)}")
    publish(
        "pipeline_balance",
        title="Two pipeline stages: what each partition allows",
        headings=("shape", "partition", "layers", "ms a stage", "tokens/s", "ratio", "smallest", "largest", "target"),
        rows=rows,
        text_columns=4,
        notes=notes,
        save=options.save,
    )


def gpt2(layers: int, hidden: int) -> GPT2Config:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(n_layer=layers, n_embd=hidden, n_head=hidden // 64, **no_dropout)


def parameters(model: PreTrainedModel, structure: ModelStructure) -> tuple[int, list[int], int]:
    """Of the embeddings, of each layer, and of final norm and head."""

    def count(module: nn.Module, *, recurse: bool) -> int:
        return sum(parameter.numel() for parameter in module.parameters(recurse=recurse))

    before, after = (
        sum(count(model.get_submodule(name), recurse=False) for name in names)
        for names in (structure.before, structure.after)
    )
    return before, [count(layer, recurse=True) for layer in structure.layer_list(model)], after


def measure(
    config: GPT2Config, structure: ModelStructure, partitions: list[Bounds], rounds: int
) -> dict[Bounds, list[tuple[float, ...]]]:
    """Of each partition, in each round: the median seconds of each stage."""
    ids = torch.randint(config.vocab_size, (MICRO_BATCH_SIZE, SEQ_LEN))
    pipelines = {bounds: build(config, structure, bounds) for bounds in partitions}
    seconds: dict[Bounds, list[tuple[float, ...]]] = {bounds: [] for bounds in partitions}
    for _ in range(rounds):
        for bounds, stages in pipelines.items():
            steps = [step(stages, ids) for _ in range(WARMUP + STEPS)][WARMUP:]
            seconds[bounds].append(tuple(statistics.median(times) for times in zip(*steps, strict=True)))
    return seconds


def build(config: GPT2Config, structure: ModelStructure, bounds: Bounds) -> list[PipelineStage]:
    return [
        PipelineStage(GPT2LMHeadModel(config), structure, bounds=bounds, stages=[stage]).train()
        for stage in range(STAGES)
    ]


def step(stages: list[PipelineStage], ids: torch.Tensor) -> list[float]:
    """One micro-batch through the pipeline and back. Seconds of each stage."""
    first, last = stages
    marks = [time.perf_counter()]
    (hidden,) = first((ids,))
    marks.append(time.perf_counter())
    received = hidden.detach().requires_grad_()
    token_loss_sum(last((received,)), ids).backward()  # type: ignore[no-untyped-call]
    marks.append(time.perf_counter())
    hidden.backward(received.grad)
    marks.append(time.perf_counter())
    return [marks[1] - marks[0] + marks[3] - marks[2], marks[2] - marks[1]]


def table_rows(
    name: str, partitions: dict[str, Bounds], times: dict[Bounds, list[tuple[float, ...]]]
) -> list[list[str]]:
    slowest = {partition: [max(stages) for stages in times[bounds]] for partition, bounds in partitions.items()}
    theirs = [min(pair) for pair in zip(slowest["uniform"], slowest["parameters"], strict=True)]
    rows = []
    for partition, bounds in partitions.items():
        ratios = sorted(peer / own for peer, own in zip(theirs, slowest[partition], strict=True))
        middle = statistics.median(ratios)
        stages = [statistics.median(seconds) * 1e3 for seconds in zip(*times[bounds], strict=True)]
        rows.append(
            [
                name,
                partition,
                " + ".join(str(stop - start) for start, stop in pairwise(bounds)),
                " + ".join(f"{milliseconds:.0f}" for milliseconds in stages),
                f"{MICRO_BATCH_SIZE * SEQ_LEN / statistics.median(slowest[partition]):,.0f}",
                *(f"{ratio:.2f}x" for ratio in (middle, ratios[0], ratios[-1])),
                target_met(middle, TARGET, at_most=False) if partition == "balance" else "",
            ]
        )
    return rows


def shares(costs: Costs, bounds: Bounds, times: dict[Bounds, list[tuple[float, ...]]]) -> str:
    """How well the costs predict the times: the last stage's share of the time of both, in the same partition."""
    whole = costs.before + sum(costs.layers) + costs.after
    counted = (sum(costs.layers[bounds[1] :]) + costs.after) / whole
    measured = statistics.median(last / (first + last) for first, last in times[bounds])
    return (
        f"partitioned uniformly, the last stage is counted to take {counted:.1%} of the time, and took {measured:.1%}."
    )


if __name__ == "__main__":
    main()
