"""TeacherTable: what a teacher says in the place of each token of a text, on disk beside the token cache.

    teacher-<digest>/
        ids.bin        the teacher's top k tokens, uint32, for each token of the split
        logps.bin      their log-probabilities and, last, that of all others together, fp32
        progress.json  how many rows of samples are in it

Tokens that are no target have no values: the files are sparse there. Any rank maps them into its memory, and reads the
rows of its samples.
"""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.parallel.distilled_loss import TeacherTokens

_IDS = np.dtype("<u4")
_LOGPS = np.dtype("<f4")
_PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True)
class TeacherTable:
    """The table of one split of a text."""

    folder: Path
    tokens: int
    """Tokens of the split."""
    top_k: int

    def create(self) -> None:
        """Make the files, empty, where they are not there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, width, dtype in self._files:
            path = self.folder / name
            path.touch()
            os.truncate(path, self.tokens * width * dtype.itemsize)

    @property
    def rows(self) -> int:
        """Count the rows of samples that are in it."""
        try:
            return int(json.loads((self.folder / _PROGRESS).read_text())["rows"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def commit(self, rows: int) -> None:
        """Record that so many rows are in it, on disk."""
        temporary = self.folder / f".{_PROGRESS}.tmp"
        temporary.write_text(json.dumps({"rows": rows}))
        temporary.replace(self.folder / _PROGRESS)

    def write(self, places: NDArray[np.int64], tokens: TeacherTokens) -> None:
        """Write what is known of targets at `places` [n] in the split. Other ranks write other places meanwhile."""
        ids, logps = self._maps("r+")
        ids[places] = tokens.ids.cpu().numpy()
        logps[places] = tokens.logps.cpu().numpy()
        ids.flush()
        logps.flush()

    def read(self, places: NDArray[np.int64]) -> TeacherTokens:
        """Read what is known at `places` [...], and at places of -1 anything that is a distribution."""
        ids_map, logps_map = self._read_maps
        ids = ids_map[places].astype(np.int64)
        logps = logps_map[places].astype(np.float32)
        ids[places < 0] = np.arange(self.top_k)
        logps[places < 0] = -np.log(self.top_k + 1)
        return TeacherTokens(ids=torch.from_numpy(ids), logps=torch.from_numpy(logps))

    @property
    def _files(self) -> tuple[tuple[str, int, np.dtype[Any]], ...]:
        return ("ids.bin", self.top_k, _IDS), ("logps.bin", self.top_k + 1, _LOGPS)

    @cached_property
    def _read_maps(self) -> tuple[Any, Any]:
        return self._maps("r")

    def _maps(self, mode: Any) -> tuple[Any, Any]:
        first, second = (
            np.memmap(self.folder / name, dtype=dtype, mode=mode, shape=(self.tokens, width))
            for name, width, dtype in self._files
        )
        return first, second
