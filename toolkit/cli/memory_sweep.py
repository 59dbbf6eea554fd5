"""A grid of layouts around the one that was asked for: other ZeRO stages, micro-batches, recomputation, lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from toolkit.cli.memory_question import Question
from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.breakdown import MemoryBreakdown

_VALUES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "micro": (1, 2, 4, 8, 16),
    "recompute": ("none", "selective", "full"),
    "seq": (1024, 2048, 4096, 8192, 16384, 32768),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layout of the grid, and its stage that takes most; None where it cannot be trained."""

    values: tuple[Any, ...]
    names: tuple[str, ...]
    peak: MemoryBreakdown | None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        found = dict(zip(self.names, self.values, strict=True))
        if self.peak is None:
            return found | {"error": self.reason}
        fits = {"fits": self.peak.fits} if self.peak.device_bytes else {}
        return found | {"allocated": self.peak.allocated, "total": self.peak.total, "stage": self.peak.stage} | fits


def grid(question: Question, names: Sequence[str]) -> list[Cell]:
    """Every combination, the first name slowest. Raises LayoutError for `zero` where the engine has no such stages."""
    engine = question.recipe.train.engine
    if "zero" in names and engine != "deepspeed":
        raise LayoutError(f"--sweep zero with train.engine={engine}: only deepspeed has ZeRO stages. Leave zero out.")
    return list(_cells(question, names))


def _cells(question: Question, names: Sequence[str]) -> Iterator[Cell]:
    positions = question.model.architecture.shape.positions
    values = {name: _VALUES[name] for name in names}
    if "seq" in values and positions is not None:
        values["seq"] = tuple(length for length in values["seq"] if length <= positions) or (positions,)
    for combination in product(*values.values()):
        try:
            peak, reason = varied(question, dict(zip(names, combination, strict=True))).peak(), ""
        except (LayoutError, ModelError) as error:
            peak, reason = None, str(error)
        yield Cell(values=combination, names=tuple(names), peak=peak, reason=reason)


def varied(question: Question, changes: dict[str, Any]) -> Question:
    """The question with other values. Raises LayoutError or ModelError for what no engine runs."""
    layout, work, recipe = question.layout, question.work, question.recipe
    layout = replace(
        layout,
        zero_stage=changes.get("zero", layout.zero_stage),
        recompute=changes.get("recompute", layout.recompute),
    )
    work = replace(
        work,
        micro_batch_size=changes.get("micro", work.micro_batch_size),
        recompute=changes.get("recompute", work.recompute),
        seq_len=changes.get("seq", work.seq_len),
    )
    size = work.micro_batch_size * work.accumulation * layout.dp
    sections = {
        "parallel": {"zero_stage": layout.zero_stage, "recompute": work.recompute},
        "data": {"seq_len": work.seq_len},
        "batch": {"micro_size": work.micro_batch_size, "global_size": size},
    }
    updated = {name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()}
    cell = replace(question, layout=layout, work=work, recipe=recipe.model_copy(update=updated))
    cell.check()
    return cell
