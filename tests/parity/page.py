"""docs/parity.md from a run of the whole matrix: what was achieved, with versions and date."""

import datetime
import platform
import re
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
from cells import STRATEGIES

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
COLUMNS = ("loss", "norm", "parameters", "parameter")


def write_page(reports: Sequence[pytest.TestReport]) -> None:
    """Write the table of the largest differences per strategy and number of ranks."""
    worst: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0.0))
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for report in reports:
        cell = re.search(rf"\[({'|'.join(STRATEGIES)})-r(\d)-", report.nodeid)
        values = dict(report.user_properties)
        if cell is None or "loss" not in values:
            continue
        key = (cell[1], int(cell[2]))
        counts[key] += 1
        for column in COLUMNS:
            worst[key][column] = max(worst[key][column], float(values[column]))  # type: ignore[arg-type]
    if sum(counts.values()) < 400:
        raise pytest.UsageError(f"--write-parity-page with {sum(counts.values())} cells: run the whole matrix.")
    rows = [
        f"| {strategy} | {ranks} | {counts[strategy, ranks]} | "
        + " | ".join(f"{worst[strategy, ranks][column]:.1e}" for column in COLUMNS)
        + " |"
        for strategy in STRATEGIES
        for ranks in (1, 2, 4)
    ]
    PAGE.write_text(_TEXT.format(rows="\n".join(rows), cells=sum(counts.values()), **_facts(worst)))


def _facts(worst: dict[tuple[str, int], dict[str, float]]) -> dict[str, str]:
    packages = ("torch", "deepspeed", "transformers", "accelerate")
    return {
        "date": datetime.date.today().isoformat(),
        "versions": ", ".join(f"{name} {version(name)}" for name in packages),
        "python": platform.python_version(),
    } | {f"max_{column}": f"{max(row[column] for row in worst.values()):.1e}" for column in COLUMNS}


_TEXT = """\
# Parity: every strategy trains what one process trains

Written by `make test-all` on {date}, Python {python}, {versions}, CPU ranks over gloo, fp32.

Each cell trains 30 steps of a small GPT-2 and is held against `train.engine: reference`, a plain PyTorch loop in one
process ([reference_engine.py](../toolkit/train/engines/reference_engine.py)). Compared are the loss and the gradient
norm of every step and the weights after the last one. The matrix crosses 9 strategies with 1, 2 and 4 ranks,
accumulation 1 and 4, AdamW and SGD, clipping off and active at every step, tied and untied embeddings; half of the
cells have different numbers of target tokens in each micro-batch. That makes {cells} cells. `make test` runs a subset
in which every pair of options occurs.

Bounds: 1e-6 relative for the loss and the gradient norm of each step and for all weights as one vector. **Largest
differences achieved: loss {max_loss}, gradient norm {max_norm}, all weights {max_parameters}.**

| strategy | ranks | cells | loss | gradient norm | all weights | worst single tensor |
|---|---|---|---|---|---|---|
{rows}

The bound holds where rounding is not amplified. At a learning rate of 1e-3 instead of 3e-4 the reference differs from
itself by 9e-7 in the gradient norm when only the size of its micro-batches changes, and correct strategies by up to
3.4e-6: training is a chaotic system, and 1e-6 says something only while its amplification is small.

*All weights*: `||w - w_ref|| / ||w_ref||` of all parameters as one vector. *Worst single tensor*: the same per tensor,
reported and not bounded: a bias that starts at zero is small after 30 steps, so its relative difference is large.
The key part of attention biases is left out of that column: softmax does not change when a constant is added to all
scores of a query, so the true gradient of a key bias is zero, what is computed is rounding noise, and Adam scales it to
steps of full size.

SGD is in the matrix because Adam hides constant factors: a gradient that is twice too large leaves an Adam curve almost
unchanged. Clipping is active in half of the cells because it makes the update depend on the norm of the whole model.

## Low precision

fp16 and bf16 round every value, so two correct runs differ by more than 1e-6. How much is measured, not guessed: the
bf16 tests rerun the baseline in five summation orders (micro-batches of 16, 8, 4, 2 and 1 samples), and every strategy
must stay within twice the spread of those reruns, step by step
([test_mathematics.py](../tests/distributed/test_mathematics.py)).

There are two kinds of bf16. ZeRO-1, 2 and 3 hold the weights in bf16 beside fp32 master weights. DeepSpeed without ZeRO
would accumulate gradients in bf16, so `zero_stage: 0` uses autocast over fp32 weights instead, as DDP does. Both learn
the same; their rounding differs.
"""
