"""Published training runs, predicted by the function that `dstk memory` calls, and by the plain formulas.

    python benchmarks/published_memory.py dev.csv                               # all sources
    python benchmarks/published_memory.py dev.csv --source megatron_golden --worst 20
    python benchmarks/published_memory.py dev.csv --save                        # writes results/published_memory.md

The file has one run a row: model shape, layout, batch, precision, and the memory that was measured
(`benchmarks/published/rows.py` names its columns). `benchmarks/published/reader.py` turns columns into public options
of the estimate (a `TrainingSetup`, a DeepSpeed config or a framework's profile) and refuses values
that it does not understand. Nothing here computes memory but the plain formulas, and nothing is read from names.
"""

import argparse
import sys
from pathlib import Path

from measure.table import publish_all
from published import tables
from published.outcomes import outcomes
from published.rows import MeasurementsError, read

from toolkit.errors import ToolkitError

_NOTES = (
    "an error is predicted / measured - 1; signed: the median with its sign; static: allocated between two steps",
    "rows with the same settings are one configuration; refused: a column has a value that no option means",
    "plain formulas: states of the ZeRO paper (Rajbhandari et al. 2020) and activations of Korthikanti et al. 2022",
)


def main() -> int:
    options = _options()
    try:
        rows = read(options.file)
        sources = dict.fromkeys(row["source_id"] for row in rows)
        if options.source is not None and options.save:
            raise MeasurementsError(f"--save with --source {options.source}: the page has all sources. Leave one out.")
        if options.source is not None and options.source not in sources:
            raise MeasurementsError(f"--source {options.source}: no such source. Choose one of {', '.join(sources)}.")
    except ToolkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    found = outcomes(row for row in rows if options.source in (None, row["source_id"]))
    sheets = [
        tables.errors_sheet(found),
        tables.setups_sheet(found),
        tables.results_sheet(found),
        tables.refusals_sheet(found),
    ]
    if options.worst:
        sheets.append(tables.worst_sheet(found, options.worst))
    publish_all("published_memory", sheets=[sheet for sheet in sheets if sheet.rows], notes=_NOTES, save=options.save)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="CSV file of published runs")
    parser.add_argument("--source", help="only this source_id")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N largest errors of each source")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/published_memory.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
