"""Rows of published measurements: one run each, from a CSV file whose columns benchmarks/published_memory.py names."""

import csv
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. Numbers that the source does not tell are None; words that it does not tell are empty."""

    row_id: str
    source_id: str
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
    """All rows of a CSV file that describe a model. Raises FileNotFoundError."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for entry in csv.DictReader(file) if (row := _row(entry)) is not None]


def _row(entry: dict[str, str]) -> Row | None:
    if not entry["layers"] or not entry["hidden"]:
        return None
    given: dict[str, Any] = {
        field.name: _value(getattr(field.type, "__name__", str(field.type)), entry[field.name]) for field in fields(Row)
    }
    defaults = {"tp": 1, "pp": 1, "cp": 1, "heads": 1, "micro_batch": 1, "ffn": 4 * given["hidden"], "vocab": 0}
    for name, value in defaults.items():
        given[name] = value if given[name] is None else given[name]
    given["kv_heads"] = given["kv_heads"] or given["heads"]
    return Row(**given)


def _value(kind: str, text: str) -> Any:
    if kind == "str":
        return text
    if kind.startswith("bool"):
        return text == "1"
    if not text:
        return None
    number = float(text)
    return int(number) if kind.startswith("int") else number
