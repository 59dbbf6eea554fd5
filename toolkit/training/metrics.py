"""Metrics of a step, one JSON object per line."""

import json
import math
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step. `step` counts from 1; losses in nats per token; `tokens` are the step's target tokens."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    memory_bytes: int
    """Peak so far: allocated on the GPU, or resident where there is none."""
    skipped: bool = False
    eval_loss: float | None = None
    eval_losses: dict[str, float] | None = None
    """Of each validation set, where they have names."""
    source_loss: dict[str, float] | None = None
    """Of a mixture: the loss of each source that has targets in this step."""
    source_tokens: dict[str, int] | None = None
    router_aux_loss: float | None = None
    """Where it is on: the loss that balances experts, without its coefficient."""
    router_z_loss: float | None = None
    expert_load: float | None = None
    """Of a model with experts: the load of the busiest one over the mean, the mean over layers."""
    unused_experts: float | None = None
    """The share of experts without a token."""
    layer_expert_load: tuple[float | None, ...] | None = None
    """`expert_load` of each decoder layer, None where a layer has no experts."""
    batch: str | None = None
    """A hash of the step's samples and their order, the same in every layout."""

    def to_json(self) -> str:
        """One line of metrics.jsonl; values that are not finite become null, and absent ones are omitted."""
        record: dict[str, Any] = {key: value for key, value in asdict(self).items() if value is not None}
        if not self.skipped:
            del record["skipped"]
        return json.dumps({key: _if_finite(value) for key, value in record.items()})


def _if_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _if_finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """metrics.jsonl, written line by line so that a crash loses nothing that was reported."""

    def __init__(self, path: Path, kept: Sequence[str] = ()) -> None:
        """Start the file with the lines `kept` of an earlier part of the run."""
        beginning = path.with_name(f".{path.name}.tmp")
        beginning.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
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
