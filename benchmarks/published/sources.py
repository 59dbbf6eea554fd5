"""Which module models which source, and what came out for each of its rows."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

from published.formulas import FORMULAS, FormulaBytes
from published.prediction import Prediction
from published.rows import GIB, MEASURED_KINDS, Row
from toolkit.errors import ToolkitError


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of published runs."""

    module: str
    """Of the package `published`: it has `predict(row) -> Prediction | str`. Empty: nothing models the source."""
    reason: str = ""
    """Why nothing models it."""
    is_target: bool = False
    """Whether the targets are about it: Megatron with or without its distributed optimizer, DeepSpeed's ZeRO, FSDP2."""
    tells_fit: bool = False
    """Whether it also lists runs that did not fit."""
    measured: str = ""
    """The kind of its peaks, where the rows call it something else."""


SOURCES: Mapping[str, Source] = {
    "megatron_golden": Source(module="megatron_core", is_target=True),
    "simumax_b200": Source(module="megatron_core", is_target=True),
    "bigscience_logs": Source(module="bigscience", is_target=True),
    "bigscience_tr11": Source(module="bigscience", tells_fit=True),
    "torchtitan_202412": Source(module="fsdp", is_target=True),
    "ds_bf16_master": Source(module="zero3"),
    "nanotron_ultrascale": Source(module="nanotron", tells_fit=True, measured="reserved"),
    "alephalpha_want23": Source(module="aleph_alpha", tells_fit=True),
    "alpa_v100": Source(module="", reason="XLA compiles the whole step and plans its memory: not modelled"),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One row, and what is said of it."""

    row: Row
    prediction: Prediction | None
    reason: str
    """Why there is no prediction."""
    failed: bool
    """Whether the module is missing or broken, and not the row beyond what it models."""
    formulas: Mapping[str, FormulaBytes]

    @property
    def measured_peak(self) -> float | None:
        """Bytes; of the kind that `peak_kind` names."""
        return None if self.row.peak_mem_gib is None else self.row.peak_mem_gib * GIB

    @property
    def measured_static(self) -> float | None:
        """Bytes allocated between two steps."""
        return None if self.row.static_mem_gib is None else self.row.static_mem_gib * GIB


def outcomes(rows: Sequence[Row]) -> list[Outcome]:
    """Of the rows that say something about memory, in their order."""
    return [_outcome(row) for row in rows if is_about_memory(row)]


def is_about_memory(row: Row) -> bool:
    """Whether a row has a peak or tells whether a run fits; one that ran does, where others of its source did not."""
    source = SOURCES.get(row.source_id)
    return row.kind in MEASURED_KINDS or (source is not None and source.tells_fit)


def peak_kind(row: Row) -> str:
    """What was measured: allocated by PyTorch, reserved by its allocator, taken of the GPU, or planned by XLA."""
    source = SOURCES.get(row.source_id)
    if source is not None and source.measured:
        return source.measured
    for word, name in (("nvidia-smi", "nvidia-smi"), ("reserved", "reserved"), ("XLA", "XLA")):
        if word in row.peak_mem_kind:
            return name
    return "allocated"


def _outcome(row: Row) -> Outcome:
    found, failed = _predict(row)
    return Outcome(
        row=row,
        prediction=None if isinstance(found, str) else found,
        reason=found if isinstance(found, str) else "",
        failed=failed,
        formulas={name: formula(row) for name, formula in FORMULAS.items()},
    )


def _predict(row: Row) -> tuple[Prediction | str, bool]:
    """(prediction or reason, whether it is the module's fault)."""
    source = SOURCES.get(row.source_id)
    if source is None:
        return "no module for this source", False
    if not source.module:
        return source.reason, False
    try:
        found = _module(source.module).predict(row)
    except ToolkitError as error:
        return str(error), False
    except Exception as error:
        # One source that is broken must not hide what the others say; the script ends with 1 all the same.
        return f"published.{source.module} fails: {type(error).__name__}: {error}", True
    assert isinstance(found, Prediction | str)
    return found, False


@lru_cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"published.{name}")
