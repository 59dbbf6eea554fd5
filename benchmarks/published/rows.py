"""Rows of published measurements: one run each, from a CSV file whose columns benchmarks/published_memory.py names."""

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError

GIB = 2**30
MEASURED_KINDS = ("mem", "mem+thr", "fit", "capacity")
"""Kinds of rows that say something about memory, also where nothing else is known of them."""


class MeasurementsError(ToolkitError):
    """A file of measurements that is missing, is no CSV file, lacks a column, or has a word where a number belongs."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. Numbers that the source does not tell are None; words that it does not tell are empty."""

    row_id: str
    source_id: str
    source_ref: str
    """The document or log that the figures stand in."""
    trust: str
    """A: logged by a machine, or a table with the whole configuration. B: a part is missing. C: coarse."""
    kind: str
    framework: str
    model: str
    arch: str
    params_b: float | None
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated_mlp: bool
    vocab: int
    """As padded by the framework."""
    tied_emb: bool
    seq_len: int
    gpu: str
    gpu_mem_gb: float | None
    n_gpus: int | None
    tp: int
    sp: bool
    """Sequence parallelism of Megatron's kind."""
    pp: int
    vpp: int | None
    """Model chunks of a stage, for interleaved schedules."""
    cp: int
    dp: int | None
    ep: int | None
    zero: int | None
    optimizer_sharding: str
    recompute: str
    attn_impl: str
    micro_batch: int
    global_batch: int | None
    grad_accum: int | None
    precision: str
    grad_dtype: str
    compile: str
    peak_mem_gib: float | None
    peak_mem_kind: str
    reserved_gib: float | None
    static_mem_gib: float | None
    mem_rank: str
    pp_stage: int | None
    fits: bool
    notes: str

    @property
    def micro_batches(self) -> int | None:
        """That pass through a pipeline, or are accumulated, in one step."""
        if self.grad_accum is not None or self.global_batch is None or self.dp is None:
            return self.grad_accum
        return max(1, self.global_batch // (self.dp * self.micro_batch))


def read(path: Path) -> list[Row]:
    """All rows of a CSV file that describe a model. Raises MeasurementsError."""
    return [_row(path, entry) for entry in _entries(path) if _has_shape(entry)]


def shapeless(path: Path) -> Counter[str]:
    """source_id -> rows about memory that do not say which model they ran. Raises MeasurementsError."""
    return Counter(
        entry["source_id"] for entry in _entries(path) if not _has_shape(entry) and entry["kind"] in MEASURED_KINDS
    )


def _entries(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, restval="")
            missing = {field.name for field in fields(Row)} - set(reader.fieldnames or ())
            if missing:
                few = ", ".join(sorted(missing)[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
                raise MeasurementsError(f"{path}: has no column {few}. Give a CSV file of published measurements.")
            yield from reader
    except OSError as error:
        raise MeasurementsError(f"{path}: {error.strerror}. Give the CSV file of published measurements.") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise MeasurementsError(f"{path}: not a CSV file in UTF-8 ({error}). Give one with one run a row.") from error


def _has_shape(entry: dict[str, str]) -> bool:
    return bool(entry["layers"] and entry["hidden"])


def _row(path: Path, entry: dict[str, str]) -> Row:
    given: dict[str, Any] = {}
    for field in fields(Row):
        text = entry[field.name]
        try:
            given[field.name] = _value(getattr(field.type, "__name__", str(field.type)), text)
        except ValueError:
            raise MeasurementsError(
                f"{path}: row {entry['row_id']} has {field.name}={text}, which is not a number. Mend the row."
            ) from None
    defaults = {"tp": 1, "pp": 1, "cp": 1, "heads": 1, "micro_batch": 1, "ffn": 4 * given["hidden"], "vocab": 0}
    for name, value in defaults.items():
        given[name] = value if given[name] is None else given[name]
    given["kv_heads"] = given["kv_heads"] or given["heads"]
    for field in fields(Row):
        if given[field.name] is None and "None" not in str(field.type):
            raise MeasurementsError(f"{path}: row {entry['row_id']} has no {field.name}. Fill it in, or take it out.")
    return Row(**given)


def _value(kind: str, text: str) -> Any:
    if kind == "str":
        return text
    if kind.startswith("bool"):
        return text == "1"
    if not text:
        return None
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return int(number) if kind.startswith("int") else number
