"""Write docs/parity.md from the results of the whole matrix: the differences, the versions, and the date."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from cell_runs import CellRun
from matrix import ACTIVE_CLIP, FAMILIES, LAYOUTS, LONG_STEPS, PRECISIONS, STEPS, STRATEGIES, daily_cells
from results import ROOT, Result, State, read_results
from suites import MATRIX

PAGE = ROOT / "docs" / "parity.md"
COMPOSITIONS = "<!-- Compositions at random"
"""What begins here is written by `tests/fuzz/fuzz.py page`, and stays."""
COLUMNS = ("loss", "norm", "parameters", "gradient")


class IncompleteError(Exception):
    """The results are not those of a complete run that passed."""


def write_page(state: State, runs: Sequence[CellRun], path: Path = PAGE) -> Path:
    """Write the page from the results of `state`. Raises IncompleteError."""
    wanted = {str(run.cell): run for run in runs}
    results = {
        result.cell: result
        for result in read_results(state.folder(MATRIX))
        if result.cell in wanted and result.is_of(wanted[result.cell])
    }
    _, mark, compositions = (path.read_text() if path.exists() else "").partition(COMPOSITIONS)
    path.write_text(page(state, runs, results) + ("\n" * bool(mark)) + mark + compositions)
    return path


def page(state: State, runs: Sequence[CellRun], results: dict[str, Result]) -> str:
    """Return the text of the page. Raises IncompleteError."""
    missing = [str(run.cell) for run in runs if str(run.cell) not in results]
    if missing:
        raise IncompleteError(
            f"{len(missing)} of {len(runs)} cells have no result for the present code ({state.code}), among them "
            f"{missing[0]}. Run `python tests/parity/whole_matrix.py run`."
        )
    found = [(run, results[str(run.cell)]) for run in runs]
    failed = [result.cell for _, result in found if result.outcome.failure]
    if failed:
        raise IncompleteError(f"{len(failed)} of {len(runs)} cells failed, among them {failed[0]}.")
    commits = dict.fromkeys(
        result.state.commit + " with uncommitted changes" * result.state.has_changes for _, result in found
    )
    dates = sorted({result.date for _, result in found})
    return _PAGE.format(
        commits=f"commit{'s' * (len(commits) > 1)} {' and '.join(sorted(commits))}",
        dates=" to ".join(dict.fromkeys((dates[0], dates[-1]))),
        versions=found[0][1].state.versions,
        cells=len(found),
        full=len(STRATEGIES),
        layouts=len(LAYOUTS),
        daily=len(daily_cells()),
        families=len(FAMILIES),
        short=STEPS,
        long=LONG_STEPS,
        long_cells=sum(run.steps == LONG_STEPS for run in runs),
        clip=ACTIVE_CLIP,
        worst="\n".join(_worst_rows(found)),
        by_family="\n".join(_rows(found, FAMILIES, lambda run: run.cell.family)),
        by_strategy="\n".join(_rows(found, STRATEGIES, lambda run: run.cell.strategy)),
        by_layout="\n".join(_rows(found, LAYOUTS, lambda run: run.cell.strategy)),
    )


Found = Sequence[tuple[CellRun, Result]]


def _worst_rows(found: Found) -> Iterator[str]:
    for precision in PRECISIONS:
        yield _row(precision, [result for run, result in found if run.cell.precision == precision])


def _rows(found: Found, names: Iterable[str], key: Callable[[CellRun], str]) -> Iterator[str]:
    for name in names:
        for precision in PRECISIONS:
            own = [result for run, result in found if key(run) == name and run.cell.precision == precision]
            if own:
                yield _row(f"{name} | {precision}", own)


def _row(name: str, results: Sequence[Result]) -> str:
    values = [f"{max(getattr(result.outcome, column) for result in results):.1e}" for column in COLUMNS]
    return f"| {' | '.join([name, str(len(results)), *values])} |"


_PAGE = """\
# Parity: every strategy trains what one process trains

Written by `make test-all` from a run of {dates}, {commits}, {versions}, CPU ranks over gloo.

Each cell trains a small model and is compared with one plain PyTorch process
([reference_engine.py](../toolkit/engines/reference_engine.py)) by the code of `dstk compare`. The cells are all legal
combinations of strategy, family (GPT-2, Llama with fewer key-value heads than heads, Qwen3 with norms in its heads,
GPT-NeoX), optimizer (AdamW, SGD), accumulation (1, 4), clipping (off, or active in each step), tied and untied
embeddings, and precision (fp32, bf16). Legal is what `dstk validate` accepts. Half of the cells have padded samples, so
that micro-batches differ in their numbers of target tokens.

That makes **{cells} cells**: {full} strategies with every combination of options, and {layouts} more layouts with
enough combinations for every pair of options. Names are those of `dstk compare`; `sp` is Megatron sequence parallelism,
`u` Ulysses. {long_cells} cells train {long} steps, the others {short}. `make test` runs {daily} of them for {short}
steps, in which every strategy of the {full} occurs, and every pair of options and parts of a strategy.

Each cell compares

- the loss and the gradient norm of every step, and all weights after the last one as one vector;
- the first step's gradient of every parameter, gathered under its Hugging Face name (the column gives the largest
  difference of one parameter, over the norm of the whole gradient);
- the bits of all replicas of a parameter after the last step: on tensor-parallel ranks, on data-parallel replicas, and
  on the first and the last stage of a tied model.

In fp32 the bound is 1e-6, relative, for each of them. In bf16 it is measured: the baseline trains again in
micro-batches of another size and with three other rounding seeds, and a strategy may differ by four times the largest
spread of these up to the same step. The baseline is one rank of a strategy with the same rounding: ZeRO-1 for ZeRO 1 to
3, whose fp32 master weights start from weights rounded to bf16; ZeRO-0 for ZeRO-0 and DDP, which autocast over fp32
weights; FSDP for FSDP, which rounds fp32 weights for each use.

**Largest differences achieved:**

| precision | cells | loss | gradient norm | all weights | one gradient |
|---|---|---|---|---|---|
{worst}

| family | precision | cells | loss | gradient norm | all weights | one gradient |
|---|---|---|---|---|---|---|
{by_family}

## Strategies

With every combination of options.

| strategy | precision | cells | loss | gradient norm | all weights | one gradient |
|---|---|---|---|---|---|---|
{by_strategy}

## More layouts

With combinations that show every pair of options.

| layout | precision | cells | loss | gradient norm | all weights | one gradient |
|---|---|---|---|---|---|---|
{by_layout}

## What the numbers say

*All weights*: `||w - w_ref|| / ||w_ref||` of all parameters as one vector. Single tensors have no bound: a bias that
starts at zero is still small at the end, so its relative difference is large. The key part of attention biases has no
effect: softmax does not change when a constant is added to all scores of a query, so the true gradient of a key bias is
zero, the computed one is rounding noise, and Adam scales it to updates of full size.

The bound of fp32 holds as long as rounding is not amplified. At a learning rate of 1e-3 instead of 3e-4 the reference
differs from itself by 9e-7 in the gradient norm when only the size of its micro-batches changes, and correct strategies
by up to 3.4e-6 in 30 steps: training is chaotic, and 1e-6 is meaningful only while the amplification is small.

A norm is a sum of many squares in fp32. Over a large tensor on a CPU its rounding reaches several 1e-6, and a tensor
that is split over ranks is summed in another order: with a vocabulary of 4,000 the norms of two correct layouts differ
by 6e-6 while every gradient agrees to 4e-8. The vocabulary here is 321, which no tp divides.

SGD is in the matrix because Adam hides constant factors: a gradient that is twice too large leaves an Adam curve almost
unchanged. Clipping at {clip} is in it because it makes the update depend on the norm of the whole model; a cell fails
if a step of its baseline is not clipped.

There are three kinds of bf16. ZeRO-1, 2 and 3 keep the weights in bf16 beside fp32 master weights. DeepSpeed without
ZeRO would accumulate gradients in bf16, so `zero_stage: 0` uses autocast over fp32 weights instead, as DDP does; FSDP
rounds fp32 weights for each use. They differ only in rounding. Without ZeRO, tp and pp are rejected in bf16.

The comparison itself is tested: mistakes are planted one by one, and each must be found
([test_planted_faults.py](../tests/parity/test_planted_faults.py), [test_matrix.py](../tests/parity/test_matrix.py)).
Document masking, one key-value head for two ranks and the validation loss are in
[test_parallel.py](../tests/parity/test_parallel.py), more layouts and families of Ulysses in
[test_ulysses.py](../tests/parity/test_ulysses.py).
"""
