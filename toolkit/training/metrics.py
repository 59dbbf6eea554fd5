"""MetricsFile, which appends the metrics of each step to metrics.jsonl; the peak memory of a rank."""

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch

from toolkit.step_metrics import StepMetrics


class MetricsFile:
    """metrics.jsonl, written line by line so that a crash loses nothing that was reported."""

    def __init__(self, path: Path, earlier: Sequence[str] = ()) -> None:
        """Start the file with the lines of an `earlier` part of the run."""
        beginning = path.with_name(f".{path.name}.tmp")
        beginning.write_text("".join(f"{line}\n" for line in earlier), encoding="utf-8")
        beginning.replace(path)  # a crash here loses no line
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(metrics.to_json() + "\n")

    def close(self) -> None:
        self._file.close()


def peak_memory_bytes(device: torch.device) -> int:
    """The peak memory of this rank so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
