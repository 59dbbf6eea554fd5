"""The regression matrix of tensor parallelism and pipelines: layout x recompute x optimizer x tying, and a subset."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

ACTIVE_CLIP = 0.2
"""Below every gradient norm of these runs, so that each step is clipped; a test checks that."""
ACCUMULATION = 4
GLOBAL_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class ParallelCell:
    """One way to train the same 30 steps. `sp`: Megatron sequence parallelism."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    sp: bool = False
    recompute: bool = False
    optimizer: str = "adamw"
    tied: bool = True

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> str:
        """`tp2-pp2-dp2-z1-sp`."""
        axes = [f"{name}{size}" for name in ("tp", "pp", "dp") if (size := getattr(self, name)) > 1]
        return "-".join([*axes, f"z{self.zero}", *(["sp"] if self.sp else [])])

    def __str__(self) -> str:
        words = ("recompute" if self.recompute else "keep", self.optimizer, "tied" if self.tied else "untied")
        return f"{self.layout}-{'-'.join(words)}"

    def changes(self) -> dict[str, Any]:
        """Keyword arguments for make_recipe."""
        return {
            "batch__micro_size": GLOBAL_BATCH // (self.dp * ACCUMULATION),
            "parallel": {
                "tp": self.tp,
                "pp": self.pp,
                "zero_stage": self.zero,
                "sequence_parallel": self.sp,
                "recompute": "full" if self.recompute else "none",
            },
        } | self.mathematics()

    def mathematics(self) -> dict[str, Any]:
        """The part of the changes that decides what is computed; the reference runs with these alone."""
        adam = self.optimizer == "adamw"
        return {
            "optimizer": {"name": self.optimizer, "lr": 3e-4 if adam else 0.1, "weight_decay": 0.1},
            "train__grad_clip": ACTIVE_CLIP,
            "overrides__tie_word_embeddings": self.tied,
            "overrides__n_layer": 4,
            # Odd, so that every tp pads it.
            "overrides__vocab_size": 321,
            # Micro-batches with different numbers of targets.
            "data__packing": "padded",
        }


def _layouts() -> Iterator[dict[str, Any]]:
    for tp, zero, dp, sp in product((2, 4), (0, 1, 2, 3), (1, 2), (False, True)):
        yield {"tp": tp, "zero": zero, "dp": dp, "sp": sp}
    for pp, zero, dp in product((2, 4), (0, 1), (1, 2)):
        yield {"pp": pp, "zero": zero, "dp": dp}
    for zero, sp in product((0, 1), (False, True)):
        yield {"tp": 2, "pp": 2, "dp": 2, "zero": zero, "sp": sp}


def all_cells() -> list[ParallelCell]:
    """The whole matrix: each layout twice, with AdamW and SGD, tied and untied, recomputing and not.

    Which of the four pairings of optimizer and tying, and which of the two recomputes, alternates over the layouts.
    """
    cells = []
    for number, layout in enumerate(_layouts()):
        tied_adam, first = (number + number // 2) % 2 == 0, number // 2 % 2 == 0
        cells.append(ParallelCell(**layout, optimizer="adamw", tied=tied_adam, recompute=first))
        cells.append(ParallelCell(**layout, optimizer="sgd", tied=not tied_adam, recompute=not first))
    return cells


def covering_subset(cells: Sequence[ParallelCell]) -> list[ParallelCell]:
    """Cells of up to 4 ranks, and two of 8, that together show every pair of options; the same ones every time."""
    small = [cell for cell in cells if cell.ranks <= 4]
    chosen = [cell for cell in cells if cell.ranks == 8 and cell.pp == 2 and cell.optimizer == "sgd" and cell.tied][1:3]
    missing = {pair for cell in small for pair in _pairs(cell)} - {pair for cell in chosen for pair in _pairs(cell)}
    while missing:
        best = max(small, key=lambda cell: sum(pair in missing for pair in _pairs(cell)))
        chosen.append(best)
        missing -= set(_pairs(best))
    return chosen


def _pairs(cell: ParallelCell) -> Iterator[tuple[Any, ...]]:
    axes = (f"{cell.tp}x{cell.pp}", cell.zero, cell.sp, cell.recompute, cell.optimizer, cell.tied, cell.dp)
    yield from combinations(list(enumerate(axes)), 2)
