"""Head and loss in chunks of tokens, against full logits: peak memory, and CPU time of a pass.

    python benchmarks/chunked_loss.py                # some minutes
    python benchmarks/chunked_loss.py --quick        # does it run? The figures mean nothing.
    python benchmarks/chunked_loss.py --save         # also writes benchmarks/results/chunked_loss.md

One pass is forward and backward, of a head alone or of a whole model. `plain` computes F.cross_entropy from full logits
(toolkit/parallel/loss.py); `chunked` is the loss inside the head (toolkit/parallel/chunked_loss.py), with the chunks
that training takes. The sides take turns in one process. Peak memory is the growth of the process's resident set
(VmHWM) over what it held before the pass; freed memory is given back before each. Time is the process's CPU time, whose
ratio is that of the same round: the median over rounds.
"""

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measure.table import publish
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.models.chunked_head import HeadFormula
from toolkit.parallel.chunked_loss import LossInHead
from toolkit.parallel.loss import token_loss_sum

HEADS = {"head, fp32": (128_256, 256, 4_096, torch.float32), "head, bf16": (128_256, 256, 4_096, torch.bfloat16)}
"""Vocabulary, hidden size, tokens and dtype."""
MODELS = {
    "model, fp32": LlamaConfig(
        hidden_size=512,
        intermediate_size=1_536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=32_000,
    )
}
MODEL_TOKENS = 1_024


class HeadOnly(nn.Module):
    """A head in the place of a model."""

    def __init__(self, vocabulary: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
        self.config = LlamaConfig()

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.head(inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--quick", action="store_true", help="one round of a small shape")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/chunked_loss.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = {"small": (1_001, 16, 300, torch.float32)} if options.quick else HEADS
    rows = []
    for name, shape in heads.items():
        rows += measured(name, of_head(*shape), 1 if options.quick else options.rounds)
    for name, config in {} if options.quick else MODELS.items():
        rows += measured(name, of_model(config), options.rounds)
    publish(
        "chunked_loss",
        title="Head and loss in chunks of tokens",
        headings=("what", "loss", "peak MiB", "ratio", "CPU ms", "ratio of ms"),
        rows=rows,
        text_columns=2,
        notes=[
            *(f"{name}: {v:,} entries, {h:,} features, {n:,} tokens." for name, (v, h, n, _) in heads.items()),
            f"model: Llama with 8 layers of 512 features, 32,000 entries, {MODEL_TOKENS:,} tokens.",
        ],
        save=options.save,
    )


def of_head(vocabulary: int, hidden: int, tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """A pass of each side."""
    torch.manual_seed(1)
    plain, inside = (HeadOnly(vocabulary, hidden, dtype) for _ in range(2))
    placed = LossInHead(inside, HeadFormula())
    states = torch.randn(1, tokens, hidden).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (1, tokens))

    def chunked() -> None:
        placed.labels = labels
        inside(states).loss.backward()

    return {"plain": lambda: _backward(token_loss_sum(plain(states), labels)), "chunked": chunked}


def of_model(config: LlamaConfig) -> dict[str, Callable[[], None]]:
    """A pass of each side."""
    torch.manual_seed(1)
    plain, inside = (LlamaForCausalLM(config) for _ in range(2))
    placed = LossInHead.of(inside)
    assert placed is not None
    ids, labels = (torch.randint(config.vocab_size, (1, MODEL_TOKENS)) for _ in range(2))

    def chunked() -> None:
        placed.labels = labels
        inside(input_ids=ids, use_cache=False).loss.backward()

    def whole() -> None:
        _backward(token_loss_sum(plain(input_ids=ids, use_cache=False).logits, labels))

    return {"plain": whole, "chunked": chunked}


def _backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def measured(name: str, sides: dict[str, Callable[[], None]], rounds: int) -> list[list[str]]:
    """A row for each side, after one pass that does not count."""
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, run in sides.items():
            peak, seconds = one_pass(run)
            found[side] += [(peak, seconds)] if number else []
    rows = []
    for side, values in found.items():
        peaks, times = ([value[at] for value in values] for at in range(2))
        pairs = zip(values, found["plain"], strict=True)
        ratios = [[value[at] / plain[at] for at in range(2)] for value, plain in pairs]
        peak_ratio, time_ratio = (statistics.median(each[at] for each in ratios) for at in range(2))
        peak, milliseconds = statistics.median(peaks) / 2**20, statistics.median(times) * 1e3
        rows.append([name, side, f"{peak:.0f}", f"{peak_ratio:.2f}x", f"{milliseconds:.0f}", f"{time_ratio:.2f}x"])
    return rows


def one_pass(run: Callable[[], None]) -> tuple[float, float]:
    """Peak in bytes, and CPU seconds. Gradients of earlier passes stay, so that a pass adds to them."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, start = resident("VmRSS"), time.process_time()
    run()
    seconds = time.process_time() - start
    return resident("VmHWM") - before, seconds


def resident(field: str) -> float:
    """Bytes, from /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return float(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
