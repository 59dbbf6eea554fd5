"""SourcePart: the i-th of n parts of a source, contiguous and of about the same size."""

import re
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class SourcePart:
    """Part `number` of `count` of a source, from 1. Positions are in bytes: no part reads what another one has."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `2/4`. Raises ValueError."""
        match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"{text} is not a shard: shards are 1/4, 2/4, 3/4 and 4/4, at most 99999.")
        return cls(number=int(match[1]), count=int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def name(self) -> str:
        """The directory of its shard."""
        return f"{self.number:05}-of-{self.count:05}"

    def has(self, position: int, total: int) -> bool:
        """Whether what begins at `position` of `total` bytes is in this part."""
        return self._index(position, total) == self.number - 1

    def overlaps(self, start: int, end: int, total: int) -> bool:
        """Whether something that begins in [start, end) may be in this part."""
        return self._index(start, total) < self.number <= self._index(max(start, end - 1), total) + 1

    def _index(self, position: int, total: int) -> int:
        return min(position * self.count // max(total, 1), self.count - 1)


WHOLE = SourcePart()
