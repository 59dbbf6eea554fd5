"""The regression matrix: strategy x ranks x accumulation x optimizer x clipping x tying, and a covering subset."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations, product
from typing import Any

STRATEGIES = ("z0", "z1", "z2", "z3", "z1-offload", "z2-offload", "z3-offload", "ddp", "fsdp")
GLOBAL_BATCH = 16
ACTIVE_CLIP = 0.2
"""Below every gradient norm of these runs (0.3 and more), so that each step is clipped; a test checks that."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to train the same 30 steps."""

    strategy: str
    ranks: int
    accumulation: int
    optimizer: str
    clipped: bool
    tied: bool

    @property
    def packing(self) -> str:
        """`padded` gives micro-batches different numbers of targets. Half of the cells, balanced over each option."""
        return "padded" if (self.optimizer == "adamw") ^ self.clipped ^ self.tied else "packed"

    def __str__(self) -> str:
        words = ("clip" if self.clipped else "noclip", "tied" if self.tied else "untied")
        return f"{self.strategy}-r{self.ranks}-a{self.accumulation}-{self.optimizer}-{'-'.join(words)}-{self.packing}"

    def changes(self) -> dict[str, Any]:
        """Keyword arguments for make_recipe."""
        stage, _, offload = self.strategy.partition("-")
        changes: dict[str, Any] = {"batch__micro_size": GLOBAL_BATCH // (self.ranks * self.accumulation)}
        if stage.startswith("z"):
            changes["parallel"] = {"zero_stage": int(stage[1:])}
            if offload:
                changes["parallel"]["offload_optimizer"] = "cpu"
                if stage == "z3":
                    changes["parallel"]["offload_params"] = "cpu"
        else:
            changes["train__engine"] = stage
        return changes | self.mathematics()

    def mathematics(self) -> dict[str, Any]:
        """The part of the changes that decides what is computed; the reference runs with these alone."""
        adam = self.optimizer == "adamw"
        return {
            # At 1e-3 AdamW amplifies rounding: the reference differs from itself by 9e-7 when only its micro-batches
            # change (2e-7 at 3e-4), which leaves no room below a bound of 1e-6.
            "optimizer": {"name": self.optimizer, "lr": 3e-4 if adam else 0.1, "weight_decay": 0.1},
            "train__grad_clip": ACTIVE_CLIP if self.clipped else 0.0,
            "overrides__tie_word_embeddings": self.tied,
            "data__packing": self.packing,
        }


def all_cells() -> list[Cell]:
    """The whole matrix."""
    options = product(STRATEGIES, (1, 2, 4), (1, 4), ("adamw", "sgd"), (False, True), (True, False))
    names = [field.name for field in fields(Cell)]
    return [Cell(**dict(zip(names, values, strict=True))) for values in options]


def covering_subset(cells: Sequence[Cell]) -> list[Cell]:
    """Cells that together show every pair of options, chosen greedily: few, and the same ones every time."""
    missing = {pair for cell in cells for pair in _pairs(cell)}
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: sum(pair in missing for pair in _pairs(cell)))
        chosen.append(best)
        missing -= set(_pairs(best))
    return chosen


def _pairs(cell: Cell) -> Iterator[tuple[Any, ...]]:
    numbered: Iterable[tuple[int, Any]] = enumerate((*astuple(cell), cell.packing))
    yield from combinations(list(numbered), 2)
