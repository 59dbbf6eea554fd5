"""StepMetrics: what a run records of each optimizer step, one JSON object per line of metrics.jsonl.

One schema for the code that writes it (training), reads it (reports) or passes it on (trackers, callbacks).
"""

import json
import math
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, ValidationError

from toolkit.errors import ReportError
from toolkit.files import first_problem
from toolkit.units import LARGEST_COUNT


def _nan_of_null(value: Any) -> Any:
    return math.nan if value is None else value


MARGIN_EDGES = (-10.0, -3.0, -1.0, -0.3, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Margins of rewards between which pairs are counted: each bin has its lower edge, and the outer ones have no end."""
Measured = Annotated[float, BeforeValidator(_nan_of_null)]
"""A number that may be NaN or infinite, which JSON does not have: it is written as null, and null is read as NaN."""


class StepMetrics(BaseModel):
    """One optimizer step. Losses are in nats per token. Fields without a value in this step or run are None.

    A run of this toolkit writes all fields up to `memory_bytes`. Logs of other writers may have `step` and `loss` only:
    the others are then NaN, 0 or None.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    step: NonNegativeInt
    """Counts from 1."""
    loss: Measured
    """The mean loss of the step's target tokens."""
    lr: Measured = math.nan
    grad_norm: Measured = math.nan
    """The L2 norm of the whole gradient before clipping."""
    tokens: NonNegativeInt = 0
    """Target tokens of the step, over all ranks."""
    seconds: Measured = math.nan
    """The wall time of the step, without validation and checkpoints."""
    memory_bytes: NonNegativeInt | None = None
    """The peak of rank 0 so far: allocated on its GPU, or resident where there is none."""
    skipped: bool = False
    """Whether no weight changed: fp16 overflowed, or the loss or the gradient was not finite."""
    eval_loss: Annotated[float | None, BeforeValidator(_nan_of_null)] = None
    """The mean loss of the validation targets; absent, not None, in steps that do not validate."""
    eval_losses: dict[str, Measured] | None = None
    """The loss of each validation set, where sets have names."""
    source_loss: dict[str, Measured] | None = None
    """The loss of each source of a mixture that has targets in this step."""
    source_tokens: dict[str, int] | None = None
    """The target tokens of each source of a mixture that has some in this step."""
    router_aux_loss: float | None = None
    """The loss that balances experts, without its coefficient."""
    router_z_loss: float | None = None
    """The loss that keeps router logits small, without its coefficient."""
    expert_load: float | None = None
    """The load of the busiest expert over the mean load, as the mean over layers; 1 is balanced."""
    unused_experts: float | None = None
    """The share of experts without a token."""
    layer_expert_load: tuple[float | None, ...] | None = None
    """`expert_load` of each decoder layer; None for a layer without experts."""
    objective: dict[str, Measured] | None = None
    """Metrics of an objective of preference tuning, with the names of TRL: `rewards/chosen`, `rewards/rejected`,
    `rewards/margins`, `rewards/accuracies`, `logps/chosen` and `logps/rejected`, and `kl` or `delta`; in nats."""
    slow_ranks: dict[str, Measured] | None = None
    """How many times as long as others a rank takes that these wait for, by rank, host and phase."""
    margins: tuple[Annotated[int, Field(ge=0, le=LARGEST_COUNT)], ...] | None = None
    """The pairs of the step by their margin of rewards, counted between MARGIN_EDGES."""
    batch: str | None = None
    """A hash of the step's samples and their order, equal in every layout."""

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read one line of metrics.jsonl. Raises ReportError, which says what is wrong with the line."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            raise ReportError(
                f"not a step ({first_problem(error)}). A line of metrics.jsonl is an object with step and loss; remove "
                "or repair the line."
            ) from None

    def to_json(self) -> str:
        """Write one line of metrics.jsonl: what is not finite as null, and no fields that are None or not skipped."""
        record = {name: value for name, value in self.model_dump().items() if value is not None}
        if not self.skipped:
            del record["skipped"]
        return json.dumps({name: _null_of_nonfinite(value) for name, value in record.items()})

    @property
    def not_finite(self) -> tuple[str, ...]:
        """The names of losses and of the gradient norm that were measured and are not finite."""
        fields = ("loss", "grad_norm", "eval_loss")
        return tuple(name for name in fields if name in self.model_fields_set and not self._is_finite(name))

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens a second, of all ranks together; None where the time is not known."""
        is_timed = math.isfinite(self.seconds) and self.seconds > 0
        return self.tokens / self.seconds if self.tokens and is_timed else None

    def scalars(self) -> dict[str, float]:
        """Every number of the step by name, for trackers; those of a source or set as `source_loss/NAME`."""
        numbers: dict[str, float] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name == "step" or isinstance(value, bool | str | tuple):
                continue
            if isinstance(value, dict):
                prefix = {"eval_losses": "eval_loss/", "objective": ""}.get(name, f"{name}/")
                numbers |= {f"{prefix}{part}": number for part, number in value.items()}
            elif value is not None:
                numbers[name] = value
        if self.tokens_per_second is not None:
            numbers["tokens_per_second"] = self.tokens_per_second
        return numbers

    def _is_finite(self, name: str) -> bool:
        value = getattr(self, name)
        return value is None or math.isfinite(value)


def _null_of_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _null_of_nonfinite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
