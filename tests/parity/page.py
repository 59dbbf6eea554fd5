"""docs/parity.md and docs/parity-parallel.md from a run of the whole matrices: what was achieved, versions, date."""

import datetime
import platform
import re
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
from cells import STRATEGIES
from cells import all_cells as strategy_cells
from parallel_cells import all_cells as parallel_cells

DOCS = Path(__file__).parents[2] / "docs"
COLUMNS = ("loss", "norm", "parameters", "parameter")
PARALLEL_COLUMNS = ("loss", "norm", "parameters", "gradient")
Worst = dict[tuple[str, ...], dict[str, float]]


def write_pages(reports: Sequence[pytest.TestReport]) -> None:
    """Write the page of each matrix of which all cells have run: the largest differences per strategy or layout."""
    worst, counts = _largest(reports, rf"strategies\.py.*\[({'|'.join(STRATEGIES)})-r(\d)-", COLUMNS)
    cut, cut_counts = _largest(reports, r"parallel\.py.*one_process_trains\[(.*)-(?:keep|recompute)-", PARALLEL_COLUMNS)
    whole = sum(counts.values()) == len(strategy_cells())
    whole_cut = sum(cut_counts.values()) == len(parallel_cells())
    if not (whole or whole_cut):
        raise pytest.UsageError("--write-parity-page: no matrix has run as a whole. Run all of tests/parity.")
    if whole:
        ordered = [(strategy, ranks) for strategy in STRATEGIES for ranks in ("1", "2", "4")]
        _write("parity.md", _STRATEGIES, ordered, worst, counts, COLUMNS)
    if whole_cut:
        _write("parity-parallel.md", _PARALLEL, list(cut), cut, cut_counts, PARALLEL_COLUMNS)


def _write(
    name: str,
    text: str,
    keys: Sequence[tuple[str, ...]],
    worst: Worst,
    counts: dict[tuple[str, ...], int],
    columns: Sequence[str],
) -> None:
    rows = ([*key, str(counts[key]), *(f"{worst[key][column]:.1e}" for column in columns)] for key in keys)
    maxima = {f"max_{column}": f"{max(row[column] for row in worst.values()):.1e}" for column in columns}
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    (DOCS / name).write_text(text.format(rows=table, cells=sum(counts.values()), **_versions(), **maxima))


def _largest(
    reports: Sequence[pytest.TestReport], pattern: str, columns: Sequence[str]
) -> tuple[Worst, dict[tuple[str, ...], int]]:
    """Of each group of cells (what the pattern captures) the largest value of each column, and how many cells."""
    worst: Worst = defaultdict(lambda: dict.fromkeys(columns, 0.0))
    counts: dict[tuple[str, ...], int] = defaultdict(int)
    for report in reports:
        cell = re.search(pattern, report.nodeid)
        values = dict(report.user_properties)
        if cell is None or "loss" not in values:
            continue
        counts[cell.groups()] += 1
        for column in columns:
            found = float(values[column])  # type: ignore[arg-type]
            worst[cell.groups()][column] = max(worst[cell.groups()][column], found)
    return worst, counts


def _versions() -> dict[str, str]:
    packages = ("torch", "deepspeed", "transformers", "accelerate")
    return {
        "date": datetime.date.today().isoformat(),
        "versions": ", ".join(f"{name} {version(name)}" for name in packages),
        "python": platform.python_version(),
    }


_STRATEGIES = """\
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

The layouts of tensor parallelism and pipelines have a page of their own: [parity-parallel.md](parity-parallel.md).

## Low precision

fp16 and bf16 round every value, so two correct runs differ by more than 1e-6. How much is measured, not guessed: the
bf16 tests rerun the baseline in five summation orders (micro-batches of 16, 8, 4, 2 and 1 samples), and every strategy
must stay within twice the spread of those reruns, step by step
([test_mathematics.py](../tests/distributed/test_mathematics.py)).

There are two kinds of bf16. ZeRO-1, 2 and 3 hold the weights in bf16 beside fp32 master weights. DeepSpeed without ZeRO
would accumulate gradients in bf16, so `zero_stage: 0` uses autocast over fp32 weights instead, as DDP does. Both learn
the same; their rounding differs.
"""


_PARALLEL = """\
# Parity of tensor parallelism and pipelines

Written by `make test-all` on {date}, Python {python}, {versions}, CPU ranks over gloo, fp32.

Each cell trains 30 steps of a GPT-2 with 4 layers and a vocabulary of 321, which no tp divides, and is held against
`train.engine: reference`, one plain PyTorch process
([reference_engine.py](../toolkit/train/engines/reference_engine.py)). Accumulation 4, micro-batches with different
numbers of targets, clipping active at every step. Each layout is trained with AdamW and with SGD, tied and untied, with
activations kept and recomputed: {cells} cells. `sp` is Megatron sequence parallelism. `make test` runs a subset in
which every pair of options occurs.

Compared are

- the loss and the gradient norm of every step (bound 1e-6 relative), and all weights after the last one as one vector;
- the first step's gradient of every parameter, gathered under its Hugging Face name (the column gives the largest
  difference of one parameter, over the norm of the whole gradient; bound 1e-6);
- the bits of every copy of a parameter after 30 steps: on tensor-parallel ranks, on replicas, and on the first and the
  last stage of a tied model.

**Largest differences achieved: loss {max_loss}, gradient norm {max_norm}, all weights {max_parameters}, one gradient
{max_gradient}.**

| layout | cells | loss | gradient norm | all weights | one gradient |
|---|---|---|---|---|---|
{rows}

Llama and Qwen3 (fewer key-value heads than ranks, norms inside heads) and bf16, within the spread of its own reruns,
are in [test_parallel.py](../tests/parity/test_parallel.py). What the comparison is worth is tested as well: known
mistakes are planted one by one, and each must be caught
([test_planted_faults.py](../tests/parity/test_planted_faults.py)).

A norm is a sum of many squares in fp32. Over a large tensor on a CPU its rounding reaches several 1e-6, and a tensor
that is split over ranks is summed in another order: with a vocabulary of 4,000 the norms of two correct layouts differ
by 6e-6 while every gradient agrees to 4e-8.
"""
