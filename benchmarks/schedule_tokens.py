"""Two pipeline ranks: training tokens/s of each schedule against DeepSpeed's own 1F1B, with few and many micro-batches.

    python benchmarks/schedule_tokens.py              # five rounds, about half an hour, on an idle machine
    python benchmarks/schedule_tokens.py --quick      # does it run? The figures mean nothing.
    python benchmarks/schedule_tokens.py --save       # also writes benchmarks/results/schedule_tokens.md

The whole training step of the toolkit's pipeline engine, ZeRO-1, fp32, one thread a rank; only the schedule
differs. A round forks the two ranks for each schedule in turn. benchmarks/schedule_bubbles.py has the waits alone.
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
from measure.our_run import make_recipe, our_run
from measure.rounds import Side, alternate
from measure.table import publish, target_met

from toolkit.config.pipeline_schedules import Kind
from toolkit.launch.output import quiet

MICRO_BATCHES = (2, 4, 8)
SCHEDULES: tuple[Kind, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v")
OWN = "DeepSpeed's 1F1B"
FEW = 2
FASTER = 1.08
"""Tokens/s of the fastest schedule over DeepSpeed's own, at least, with FEW micro-batches."""
NEVER_SLOWER = 0.99
"""The same with any number of micro-batches."""
LAYERS, HIDDEN = 8, 384
VOCABULARY = 8192
"""Small beside this hidden size, as that of a model worth a pipeline is: the head takes less time than two layers."""
SEQ_LEN, MICRO = 128, 2
STEPS, WARMUP = 4, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each schedule")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/schedule_tokens.md")
    options = parser.parse_args()
    quiet(debug=False)
    torch.set_num_threads(1)
    rows = []
    for micro_batches in MICRO_BATCHES:
        rows += _rows(micro_batches, rounds=1 if options.quick else options.rounds, steps=1 if options.quick else STEPS)
    publish(
        "schedule_tokens",
        title="Two ranks, pp=2: tokens/s by schedule",
        headings=("micro-batches", "schedule", "ms a step", "tokens/s", "ratio", "smallest", "largest", "target"),
        rows=rows,
        text_columns=2,
        notes=[
            f"GPT-2 of {LAYERS} layers x {HIDDEN}, vocabulary {VOCABULARY:,}, samples of {SEQ_LEN} tokens.",
            f"{MICRO} samples in a micro-batch.",
            "Ratios are tokens/s over those of DeepSpeed's own 1F1B in the same round: the median, and all rounds.",
        ],
        save=options.save,
    )


def _rows(micro_batches: int, *, rounds: int, steps: int) -> list[list[str]]:
    """Measure every schedule with so many micro-batches."""
    tokens = MICRO * micro_batches * SEQ_LEN
    with tempfile.TemporaryDirectory() as name:
        sides: dict[str, Side] = {}
        for label, kind in ((OWN, None), *((kind, kind) for kind in SCHEDULES)):
            recipe = make_recipe(
                Path(name),
                model={
                    "name_or_path": "gpt2",
                    "overrides": {
                        "n_layer": LAYERS,
                        "n_embd": HIDDEN,
                        "n_head": HIDDEN // 64,
                        "vocab_size": VOCABULARY,
                    },
                },
                seq_len=SEQ_LEN,
                batch={"global_batch_size": MICRO * micro_batches, "micro_batch_size": MICRO},
                parallel={"pp": 2, "zero_stage": 1, "schedule": kind},
                train={"steps": WARMUP + steps},
            )
            sides[label] = partial(our_run, recipe)
        times = alternate(sides, ranks=2, rounds=rounds, warmup=WARMUP)
    ratios = {label: sorted(times[OWN].over(times[label])) for label in times}
    medians = {label: statistics.median(of_rounds) for label, of_rounds in ratios.items() if label != OWN}
    fastest = max(medians, key=lambda label: medians[label])
    target = FASTER if micro_batches == FEW else NEVER_SLOWER
    return [
        [
            str(micro_batches),
            label,
            f"{times[label].median * 1e3:.0f}",
            f"{tokens / times[label].median:,.0f}",
            *(f"{ratio:.2f}x" for ratio in (statistics.median(of_rounds), of_rounds[0], of_rounds[-1])),
            target_met(medians[label], target, at_most=False) if label == fastest else "",
        ]
        for label, of_rounds in ratios.items()
    ]


if __name__ == "__main__":
    main()
