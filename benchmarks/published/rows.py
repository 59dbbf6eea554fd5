"""Rows of a CSV file of published runs: one run each, with the text of every column."""

import csv
from pathlib import Path

from toolkit.errors import ToolkitError

GIB = 2**30
Row = dict[str, str]

_RESULTS = """step_time_s tokens_per_s_gpu tflops_gpu tflops_def mfu_pct hfu_pct peak_mem_gib peak_mem_kind
reserved_gib static_mem_gib mem_rank pp_stage fits"""
_NAMES = "row_id split source_id source_doc source_ref trust verified kind model params_b gpus_per_node gpu_mem_gb"
_SETTINGS = """framework arch layers hidden heads kv_heads ffn gated_mlp vocab tied_emb seq_len gpu n_gpus tp sp pp vpp
cp dp ep zero optimizer_sharding recompute attn_impl micro_batch global_batch grad_accum precision grad_dtype compile
notes"""
RESULTS, NAMES, SETTINGS = (frozenset(columns.split()) for columns in (_RESULTS, _NAMES, _SETTINGS))
"""What came out of a run and where it was measured; what tells it from others; what a reader has to understand."""


class MeasurementsError(ToolkitError):
    """A file of published runs that is missing, is no CSV file, or has other columns."""


def read(path: Path, *, times: bool = False) -> list[Row]:
    """All rows that say something about memory, or about time. Raises MeasurementsError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, restval="")
            names = frozenset(reader.fieldnames or ())
            known = RESULTS | NAMES | SETTINGS
            for what, wrong in (
                ("has no column", known - names),
                ("has a column that no reader knows:", names - known),
            ):
                if wrong:
                    few = ", ".join(sorted(wrong)[:5])
                    raise MeasurementsError(f"{path}: {what} {few}. Give a CSV file of published runs.")
            rows = list(reader)
    except OSError as error:
        raise MeasurementsError(f"{path}: {error.strerror}. Give the CSV file of published runs.") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise MeasurementsError(f"{path}: not a CSV file in UTF-8 ({error}). Give one with one run a row.") from error
    if times:
        return [row for row in rows if any(row[name] for name in ("step_time_s", "tokens_per_s_gpu", "tflops_gpu"))]
    told = {row["source_id"] for row in rows if row["fits"] == "0"}
    return [row for row in rows if row["peak_mem_gib"] or row["static_mem_gib"] or row["source_id"] in told]


def configuration(row: Row) -> tuple[str, ...]:
    """All settings of a row: rows that share them are one configuration."""
    return tuple(row[name] for name in sorted(SETTINGS | {"pp_stage"}))
