"""Batch: how one global batch splits into ranks, accumulation steps and micro-batches.

global = micro x accumulation x dp. Position p of the global batch lies in block p // micro; block b is computed by
data-parallel rank b % dp in accumulation step b // dp. Blocks are the same whatever dp is, so everything that is seeded
by a block (dropout) is the same in every layout with the same micro-batch size.
"""

from dataclasses import dataclass
from typing import Self

from toolkit.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sizes in samples. Raises BatchError through `resolve` when they do not divide."""

    global_size: int
    micro_size: int
    dp: int

    @property
    def accumulation(self) -> int:
        """Micro-batches that each rank computes for one optimizer step."""
        return self.global_size // (self.micro_size * self.dp)

    @classmethod
    def resolve(cls, *, global_size: int, micro_size: int, dp: int) -> Self:
        """Derive the accumulation. Raises BatchError that names the nearest sizes which work."""
        if global_size % (micro_size * dp):
            per_step = micro_size * dp
            lower = global_size // per_step * per_step
            near = f"{lower} or {lower + per_step}" if lower else str(per_step)
            micro = [m for m in range(1, global_size // dp + 1) if global_size % (m * dp) == 0]
            fix = f", or batch.micro_size to one of {_some(micro)}" if micro else ""
            raise BatchError(
                f"batch.global_size={global_size} with micro_size={micro_size} on dp={dp}: "
                f"{global_size} is not a multiple of {micro_size} x {dp} = {per_step}. "
                f"Set batch.global_size to {near}{fix}."
            )
        return cls(global_size=global_size, micro_size=micro_size, dp=dp)

    def block_start(self, *, accumulation_step: int, data_rank: int) -> int:
        """Position in the global batch of the first sample of a rank's micro-batch."""
        return (accumulation_step * self.dp + data_rank) * self.micro_size


def _some(values: list[int]) -> str:
    shown = values if len(values) <= 6 else [*values[:3], *values[-2:]]
    return ", ".join(map(str, shown))
