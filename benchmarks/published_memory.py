"""Published training runs against the memory estimate, and against the formulas of DeepSpeed, Megatron and others.

    python benchmarks/published_memory.py dev.csv                               # all sources
    python benchmarks/published_memory.py dev.csv --source megatron_golden --worst 20
    python benchmarks/published_memory.py dev.csv --save                        # writes results/published_memory.md

The file has one run a row: model shape, layout, batch, precision, and the memory that was measured
(`benchmarks/published/rows.py` names its columns). For each source and kind of measurement (allocated by PyTorch,
reserved by its allocator, taken of the GPU as nvidia-smi tells) a line of errors, predicted / measured - 1: the median
and the 95th percentile of their sizes, and the signed median. Formulas of others are judged by the same rows. Runs that
are not modelled are counted, with the reason.

Nothing is fitted to the rows: each source has a module in `benchmarks/published/` whose docstring says which mechanisms
of the framework it follows, and where they can be read.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from measure.table import publish_all
from published import tables
from published.rows import MeasurementsError, read, shapeless
from published.sources import SOURCES, outcomes

from toolkit.errors import ToolkitError

_NOTES = (
    (
        f"targets, all of trust A: median <= {tables.MEDIAN_PERCENT} % and p95 <= {tables.P95_PERCENT} % of peaks, "
        f"{tables.STATIC_PERCENT} % of static memory; the line `targets` pools Megatron, DeepSpeed ZeRO and FSDP2"
    ),
    "static: allocated between two steps",
    f"does it fit: recall >= {tables.RECALL_PERCENT} %, precision >= {tables.PRECISION_PERCENT} % of `does not fit`",
    "formulas of others: benchmarks/published/formulas.py has each with its source; empty where they say nothing",
)


def main() -> int:
    options = _options()
    try:
        chosen = _chosen(options.source, saves=options.save)
        rows = [row for row in read(options.file) if chosen is None or row.source_id == chosen]
        shapes = shapeless(options.file)
    except ToolkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    found = outcomes(rows)
    sheets = [
        tables.errors_sheet(found),
        tables.formulas_sheet(found),
        tables.fits_sheet(found),
        tables.reasons_sheet(found, Counter() if chosen else shapes),
    ]
    if options.worst:
        sheets.append(tables.worst_sheet(found, options.worst))
    publish_all("published_memory", sheets=[sheet for sheet in sheets if sheet.rows], notes=_NOTES, save=options.save)
    return 1 if any(outcome.failed for outcome in found) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="CSV file of published runs")
    parser.add_argument("--source", help="only this source_id")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N largest errors of each source")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/published_memory.md")
    return parser.parse_args()


def _chosen(source: str | None, *, saves: bool) -> str | None:
    if source is not None and saves:
        raise MeasurementsError(f"--save with --source {source}: the page has all sources. Leave one of the two out.")
    if source is not None and source not in SOURCES:
        raise MeasurementsError(f"--source {source}: no such source. Choose one of {', '.join(SOURCES)}.")
    return source


if __name__ == "__main__":
    sys.exit(main())
