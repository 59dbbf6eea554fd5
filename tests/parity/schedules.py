"""Cells of the regression matrix that run a pipeline schedule of the toolkit's own."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from matrix import Cell, Mathematics
from mixtures import MixtureCell
from typing_extensions import override

SCHEDULES = ("1f1b", "gpipe", "x2", "zbh1", "zbv")
FAMILIES = (("gpt2", True), ("llama", False), ("qwen3", True), ("qwen3", False))
"""Families and whether their embeddings are tied."""
LAYOUTS = ("pp2", "pp4", "tp2-pp2", "pp2-dp2", "tp2-pp2-dp2-sp")


@dataclass(frozen=True, kw_only=True)
class ScheduleCell(Cell):
    """A cell whose model has a layer for each stage."""

    @property
    @override
    def mathematics(self) -> Mathematics:
        where = self.where
        return replace(super().mathematics, layers=max(2, where.pp * where.chunks))

    @property
    @override
    def has_replicas(self) -> bool:
        # Down the ranks and up again, the first and the last stage are on one rank.
        ends = self.tied and self.where.schedule != "zb-v"
        return self.where.tp > 1 or self.ranks > self.where.model_size or ends


@dataclass(frozen=True, kw_only=True)
class MixtureScheduleCell(ScheduleCell, MixtureCell):
    """The same of a mixture of experts."""

    @property
    @override
    def mathematics(self) -> Mathematics:
        where = self.where
        return replace(MixtureCell.mathematics.fget(self), layers=max(2, where.pp * where.chunks))  # type: ignore[attr-defined]

    @property
    @override
    def has_replicas(self) -> bool:
        return ScheduleCell.has_replicas.fget(self)  # type: ignore[attr-defined,no-any-return]


def strategy(layout: str, schedule: str, zero_stage: int, *, recomputes: bool) -> str:
    """`pp2`, `x2`, 1 -> `pp2x2-z1`."""
    pipeline = re.sub(r"(pp\d)", rf"\g<1>{schedule}" if schedule == "x2" else rf"\g<1>-{schedule}", layout)
    return "-".join([pipeline, f"z{zero_stage}", *["recompute"] * recomputes])


def schedule_cells() -> Iterator[Cell]:
    """Every schedule with every layout and family, recomputation and ZeRO stage."""
    for layout, schedule, zero_stage, recomputes in product(LAYOUTS, SCHEDULES, (0, 1), (False, True)):
        name = strategy(layout, schedule, zero_stage, recomputes=recomputes)
        for number, (family, tied) in enumerate(FAMILIES):
            yield ScheduleCell(
                strategy=name, family=family, optimizer=("adamw", "sgd")[number % 2], accumulation=4, clipped=True,
                tied=tied, precision="fp32",
            )  # fmt: skip
        yield MixtureScheduleCell(
            strategy=name, family="qwen3_moe", optimizer="adamw", accumulation=4, clipped=True, tied=False,
            precision="fp32",
        )  # fmt: skip
        if zero_stage == 1:
            yield ScheduleCell(
                strategy=name, family="llama", optimizer="adamw", accumulation=4, clipped=True, tied=True,
                precision="bf16",
            )  # fmt: skip
    for name in ("pp2-zbh1w1-z1", "pp2-zbvw2-z0"):
        yield ScheduleCell(
            strategy=name, family="gpt2", optimizer="sgd", accumulation=4, clipped=True, tied=True, precision="fp32",
        )  # fmt: skip
    for schedule, optimizer in product(SCHEDULES, ("muon", "adafactor")):
        yield ScheduleCell(
            strategy=strategy("pp2", schedule, 1, recomputes=False), family="gpt2", optimizer=optimizer,
            accumulation=4, clipped=True, tied=True, precision="fp32",
        )  # fmt: skip
    for layout, schedule, zero_stage in product(("pp2-dp2-ep2", "tp2-pp2-dp2-ep2"), SCHEDULES, (0, 1)):
        yield MixtureScheduleCell(
            strategy=strategy(layout, schedule, zero_stage, recomputes=False), family="qwen3_moe", optimizer="adamw",
            accumulation=4, clipped=True, tied=False, precision="fp32",
        )  # fmt: skip
