"""The schema of metrics.jsonl: what training writes is what reports and trackers read."""

import json
import math
from typing import Any

import pytest

from toolkit.errors import ReportError
from toolkit.step_metrics import StepMetrics

EVERY_FIELD: dict[str, Any] = {
    "step": 3,
    "loss": 2.5,
    "lr": 1e-4,
    "grad_norm": 0.75,
    "tokens": 1024,
    "seconds": 0.5,
    "memory_bytes": 2**30,
    "skipped": True,
    "eval_loss": 2.75,
    "eval_losses": {"web": 2.5, "code": 3.0},
    "source_loss": {"books": 2.25},
    "source_tokens": {"books": 512},
    "router_aux_loss": 1.01,
    "router_z_loss": 0.25,
    "expert_load": 1.5,
    "unused_experts": 0.125,
    "layer_expert_load": (None, 1.5),
    "objective": {"rewards/margins": 0.25},
    "slow_ranks": {"rank 1 (node2) forward": 1.5},
    "margins": (0, 2, 1),
    "batch": "abc",
}


def test_every_field_survives_a_line() -> None:
    assert set(EVERY_FIELD) == set(StepMetrics.model_fields)
    assert StepMetrics.from_json(StepMetrics(**EVERY_FIELD).to_json()).model_dump() == EVERY_FIELD


def test_a_value_that_is_not_finite_is_null_in_the_line_and_nan_again() -> None:
    line = StepMetrics(step=1, loss=math.nan, grad_norm=math.inf, source_loss={"books": math.nan}).to_json()
    assert json.loads(line) == {
        "step": 1,
        "loss": None,
        "lr": None,
        "grad_norm": None,
        "tokens": 0,
        "seconds": None,
        "source_loss": {"books": None},
    }
    metrics = StepMetrics.from_json(line)
    assert math.isnan(metrics.loss)
    assert metrics.source_loss is not None
    assert math.isnan(metrics.source_loss["books"])


def test_a_value_that_is_missing_is_not_called_not_finite() -> None:
    assert StepMetrics.from_json('{"step": 1, "loss": 2.5}').not_finite == ()
    assert StepMetrics.from_json('{"step": 1, "loss": null, "eval_loss": null}').not_finite == ("loss", "eval_loss")


def test_trackers_get_every_number() -> None:
    scalars = StepMetrics(**EVERY_FIELD).scalars()
    numbers = {name: value for name, value in EVERY_FIELD.items() if isinstance(value, float | int)}
    parts = {"eval_loss/web": 2.5, "eval_loss/code": 3.0, "source_loss/books": 2.25, "source_tokens/books": 512}
    parts |= {"rewards/margins": 0.25, "slow_ranks/rank 1 (node2) forward": 1.5}
    assert scalars.keys() == (numbers.keys() - {"step", "skipped"}) | parts.keys() | {"tokens_per_second"}
    assert scalars["tokens_per_second"] == 2048
    assert scalars.items() >= parts.items()


BAD_LINES = ('{"step": 1}', '{"step": "1", "loss": 2.0}', '{"step": -1, "loss": 2.0}', "[1, 2]", "{")


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_is_no_step_is_refused(line: str) -> None:
    with pytest.raises(ReportError, match=r"not a step .* object with step and loss"):
        StepMetrics.from_json(line)
