"""What sharing out experts costs and saves: steps of a mixture with ep against the same ranks without it.

    python benchmarks/expert_parallelism.py             # five rounds: about five minutes
    python benchmarks/expert_parallelism.py --quick     # does it run? The figures mean nothing.
    python benchmarks/expert_parallelism.py --save      # also writes benchmarks/results/expert_parallelism.md

Two CPU ranks in fp32 train the same Qwen3-MoE on the same samples: plain ZeRO-2, where every rank has all experts and
averages all their gradients; ep2, where each has half, exchanges tokens, and averages none of them; and tensor
parallelism with whole and with inner experts. All agree in loss, which is checked. A round forks the ranks for each
side in turn. Prints medians of all counted steps, and of the ratios to ZeRO-2 in the same round the median, the
smallest and the largest.

A second table has a DeepSeek-V2 of the same size, whose shared expert runs while tokens are on their way, against the
same ranks without that. gloo computes what it sends on the same cores, so there is little to hide behind.
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

from measure.our_run import make_recipe, our_run
from measure.rounds import Side, alternate
from measure.table import publish

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.launch.output import quiet

SIDES = ("dp2-z2", "dp2-ep2-z2", "tp2-z2", "tp2-z2-inner")
STEPS, WARMUP = 20, 4
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/expert_parallelism.md")
    options = parser.parse_args()
    quiet(debug=False)
    with tempfile.TemporaryDirectory() as name:
        recipe = make_mixture_recipe(Path(name), WARMUP + 3 if options.quick else STEPS)
        sides: dict[str, Side] = {side: partial(our_run, Strategy.parse(side).apply(recipe, 2)) for side in SIDES}
        times = alternate(sides, ranks=2, rounds=1 if options.quick else options.rounds, warmup=WARMUP)
    first = times[SIDES[0]]
    for side in SIDES:
        assert abs(times[side].losses[-1] / first.losses[-1] - 1) < 1e-4, side
    rows = []
    for side in SIDES:
        ratios = times[side].over(first)
        three = (statistics.median(ratios), ratios[0], ratios[-1])
        losses = f"{times[side].losses[-1]:.5f}"
        rows.append([side, f"{times[side].median * 1e3:.0f}", *(f"{ratio:.2f}x" for ratio in three), losses])
    publish(
        "expert_parallelism",
        title="Two ranks, fp32: a mixture of 32 experts, 4 of each token",
        headings=("side", "ms a step", "ratio to dp2-z2", "smallest", "largest", "last loss"),
        rows=rows,
        notes=["Qwen3-MoE of 4 layers x 256, experts of width 256, samples of 128 tokens, 4 in a step."],
        save=options.save,
    )


def make_mixture_recipe(folder: Path, steps: int) -> Recipe:
    """All sides start from it."""
    return make_recipe(
        folder,
        model={"name_or_path": "qwen3-30b-a3b", "overrides": SHAPE},
        seq_len=128,
        batch={"global_batch_size": 4, "micro_batch_size": 2},
        train={"steps": steps},
    )


if __name__ == "__main__":
    main()
