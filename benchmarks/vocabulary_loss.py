"""The loss over a vocabulary split over ranks, against gathering the logits: peak memory and time.

    python benchmarks/vocabulary_loss.py                # about one minute
    python benchmarks/vocabulary_loss.py --quick        # does it run? The figures mean nothing.
    python benchmarks/vocabulary_loss.py --save         # also writes benchmarks/results/vocabulary_loss.md

Each rank has its logits [n, v/t] in fp32. Both sides compute the loss and its gradient for them: `gathered` puts the
whole logits together on every rank, with as few copies as that takes, and calls F.cross_entropy; `split` is
vocab_parallel_token_loss_sum. Peak memory is the growth of the process's resident set (VmHWM) over what it held with
the logits, largest over the ranks; fresh ranks for each measurement.
"""

import argparse
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure.table import publish

from toolkit.launch.local_ranks import run_ranks
from toolkit.launch.output import quiet
from toolkit.parallel.tensor.vocabulary import VocabularyShard, vocab_parallel_token_loss_sum

SHAPES = {"GPT-2": (50_257, 2_048), "Llama 3": (128_256, 1_024)}
"""Vocabulary and tokens in a micro-batch."""
RANKS = (2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side")
    parser.add_argument("--quick", action="store_true", help="one round of a small shape")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/vocabulary_loss.md")
    options = parser.parse_args()
    quiet(debug=False)
    torch.set_num_threads(1)
    shapes = {"small": (1_001, 64)} if options.quick else SHAPES
    rows = []
    for name, (vocabulary, tokens) in shapes.items():
        for ranks in RANKS[:1] if options.quick else RANKS:
            measured = {}
            for side in ("gathered", "split"):
                runs = [worst(ranks, vocabulary, tokens, side) for _ in range(1 if options.quick else options.rounds)]
                measured[side] = [statistics.median(values) for values in zip(*runs, strict=True)]
            for side, (peak, seconds) in measured.items():
                ratio = peak / measured["gathered"][0]
                rows.append(
                    [
                        name,
                        str(ranks),
                        side,
                        f"{peak / 2**20:.0f}",
                        f"{ratio:.2f}x",
                        f"{seconds * 1e3:.0f}",
                        f"{seconds / measured['gathered'][1]:.2f}x",
                    ]
                )
    publish(
        "vocabulary_loss",
        title="Loss and gradient over a split vocabulary",
        headings=("vocabulary", "ranks", "side", "peak MiB", "ratio", "ms", "ratio of ms"),
        rows=rows,
        text_columns=3,
        notes=[f"{name}: {v:,} entries, {n:,} tokens, fp32." for name, (v, n) in shapes.items()],
        save=options.save,
    )


def worst(ranks: int, vocabulary: int, tokens: int, side: str) -> tuple[float, float]:
    """Largest peak (bytes) and time (seconds) over fresh ranks."""
    results = run_ranks(partial(measure, vocabulary, tokens, side), ranks, timeout_seconds=300)
    return max(peak for peak, _ in results), max(seconds for _, seconds in results)


def measure(vocabulary: int, tokens: int, side: str) -> tuple[float, float]:
    group = dist.group.WORLD
    assert group is not None
    shard = VocabularyShard.of(vocabulary, group)
    logits = torch.randn(1, tokens, shard.rows).requires_grad_()
    labels = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    start = time.perf_counter()
    if side == "split":
        loss = vocab_parallel_token_loss_sum(logits, labels, shard, group)
    else:
        whole = _Gathered.apply(logits[0])[:, :vocabulary]  # type: ignore[no-untyped-call]
        loss = F.cross_entropy(whole, labels[0], reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - start
    return resident("VmHWM") - before, seconds


class _Gathered(torch.autograd.Function):
    """[n, v/t] -> [n, v], with no copy but the one that is asked for; backward takes the own columns."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, logits.detach())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


def resident(field: str) -> float:
    """Bytes, from /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return float(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
