"""Two pipeline stages on two ranks: training tokens/s with our bounds against DeepSpeed's `uniform` and `parameters`.

    python benchmarks/pipeline_speed.py                 # five rounds: about nine minutes
    python benchmarks/pipeline_speed.py --quick         # does it run? The figures mean nothing.
    python benchmarks/pipeline_speed.py --save          # also writes benchmarks/results/pipeline_speed.md

The whole training step of the toolkit's pipeline engine under DeepSpeed's 1F1B schedule, ZeRO-1, fp32, one thread a
rank; only the bounds differ. Both of DeepSpeed's methods are asked for theirs (benchmarks/measure/deepspeed_bounds.py).
A round forks the two ranks for each partition in turn. benchmarks/pipeline_balance.py has the times of the stages.
"""

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import deepspeed  # noqa: F401  # before the ranks are forked
import torch
from measure.deepspeed_bounds import by_parameters, uniform
from measure.our_run import Stamps, make_recipe, our_run
from measure.rounds import Side, alternate
from measure.table import publish, target_met
from pipeline_balance import Bounds, gpt2, parameters
from transformers import GPT2LMHeadModel

from toolkit.config.recipe import Recipe
from toolkit.config.stage_balance import balance
from toolkit.launch.output import quiet
from toolkit.model_init import model_partition
from toolkit.parallel.model_structure import analyze_model
from toolkit.parallel.pipeline.balance import count_costs

TARGET = 1.25
LAYERS, HIDDEN = 6, 384
SEQ_LEN, MICRO, ACCUMULATION = 256, 2, 8
STEPS, WARMUP = 3, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each partition")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/pipeline_speed.md")
    options = parser.parse_args()
    quiet(debug=False)
    torch.set_num_threads(1)
    partitions = bounds_of_each()
    with tempfile.TemporaryDirectory() as name:
        recipe = make_recipe(
            Path(name),
            model={"name_or_path": "gpt2", "overrides": {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HIDDEN // 64}},
            seq_len=SEQ_LEN,
            batch={"global_batch_size": MICRO * ACCUMULATION, "micro_batch_size": MICRO},
            parallel={"pp": 2, "zero_stage": 1},
            train={"steps": WARMUP + (1 if options.quick else STEPS)},
        )
        sides: dict[str, Side] = {method: partial(run, recipe, bounds) for method, bounds in partitions.items()}
        times = alternate(sides, ranks=2, rounds=1 if options.quick else options.rounds, warmup=WARMUP)
    better = min(("uniform", "parameters"), key=lambda method: times[method].median)
    rows = []
    for method, bounds in partitions.items():
        ratios = sorted(times[better].over(times[method]))
        middle = statistics.median(ratios)
        rows.append(
            [
                method,
                f"{bounds[1]} + {LAYERS - bounds[1]}",
                f"{times[method].median * 1e3:.0f}",
                f"{MICRO * ACCUMULATION * SEQ_LEN / times[method].median:,.0f}",
                *(f"{ratio:.2f}x" for ratio in (middle, ratios[0], ratios[-1])),
                target_met(middle, TARGET, at_most=False) if method == "balance" else "",
            ]
        )
    publish(
        "pipeline_speed",
        title="Two ranks, pp=2: tokens/s by partition",
        headings=("partition", "layers", "ms a step", "tokens/s", "ratio", "smallest", "largest", "target"),
        rows=rows,
        text_columns=2,
        notes=[
            f"GPT-2 of {LAYERS} layers x {HIDDEN}, vocabulary 50,257, samples of {SEQ_LEN} tokens.",
            f"{MICRO} samples in a micro-batch, {ACCUMULATION} micro-batches in a step.",
        ],
        save=options.save,
    )


def bounds_of_each() -> dict[str, Bounds]:
    with torch.device("meta"):
        twin = GPT2LMHeadModel(gpt2(LAYERS, HIDDEN))
    twin.tie_weights()
    structure = analyze_model(twin)
    return {
        "uniform": uniform(structure.count, 2),
        "parameters": by_parameters(*parameters(twin, structure), 2),
        "balance": balance(count_costs(twin, structure, seq_len=SEQ_LEN, micro_batch_size=MICRO), 2),
    }


def run(recipe: Recipe, bounds: Bounds) -> Stamps:
    """On every rank: train with these bounds instead of the toolkit's."""
    setattr(model_partition, "balance", lambda costs, stages: bounds)  # noqa: B010 - a name that the module only imports
    return our_run(recipe)


if __name__ == "__main__":
    main()
