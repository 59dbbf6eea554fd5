"""Published step times, predicted by the function that `dstk plan --layout` calls, and by a constant MFU.

    python benchmarks/published_throughput.py dev.csv                             # all sources
    python benchmarks/published_throughput.py dev.csv --source vtrain_single --worst 20
    python benchmarks/published_throughput.py dev.csv --save                      # results/published_throughput.md

The file has one run a row (`benchmarks/published/rows.py` names its columns). `benchmarks/published/time_reader.py`
turns columns into public options of the time model (model shape, layout, batch, GPU, network, framework) and refuses
values that it does not understand. Nothing here computes a time.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from measure.table import Sheet, publish_all
from published.rows import MeasurementsError, read
from published.times import errors_sheet, ranking_sheet, timed_runs, worst_sheet

from toolkit.errors import ToolkitError

_NOTES = (
    "an error is predicted / measured - 1 of a step's seconds; refused: a column has a value that no option means",
    "40 % MFU: a planner that knows only that; the source's median MFU: one that was told the source's own median",
    "development: sources looked at while the global constants were chosen; docs/time-model.md says what changed later",
    "first choice: the run of a group whose predicted step is shortest",
)


def main() -> int:
    options = _options()
    try:
        rows = read(options.file, times=True)
        sources = dict.fromkeys(row["source_id"] for row in rows)
        if options.source is not None and (options.save or options.source not in sources):
            advice = "the page has all sources" if options.save else f"choose one of {', '.join(sources)}"
            raise MeasurementsError(f"--source {options.source}: {advice}.")
    except ToolkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    found = timed_runs(row for row in rows if options.source in (None, row["source_id"]))
    counts = Counter((run.row["source_id"], run.refused) for run in found if run.refused)
    refusals = [[source, reason, str(count)] for (source, reason), count in counts.most_common()]
    sheets = [
        errors_sheet(found),
        ranking_sheet(found),
        Sheet(title="Refused", headings=["source", "column and value", "rows"], rows=refusals, text_columns=2),
    ]
    if options.worst:
        sheets.append(worst_sheet(found, options.worst))
    publish_all("published_throughput", sheets=[s for s in sheets if s.rows], notes=_NOTES, save=options.save)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="CSV file of published runs")
    parser.add_argument("--source", help="only this source_id")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N largest errors of each source")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/published_throughput.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
