"""Bounds: fixed ones, and those that reruns of a baseline measure."""

from dataclasses import replace

import numpy as np
import pytest
from nonempty import nonempty
from synthetic_run import LAYERS, STEPS, VOCABULARY, WIDTH, baseline, changed, with_gradients, with_losses

from toolkit.parity import Bounds, ParityResult, ParityRun
from toolkit.parity.bounds import extent_of
from toolkit.parity.tolerance import ENVELOPE_FACTOR, UNIT_ROUNDOFF, rounding_bound

BASELINE = baseline()
LEAST = rounding_bound(extent_of(BASELINE))


def moved(amount: float) -> ParityRun:
    """A rerun whose every number lies off by this share."""
    factor = np.float32(1 + amount)
    run = with_gradients(with_losses(BASELINE, lambda step, loss: loss * (1 + amount)), lambda value: value * factor)
    return replace(
        run,
        parameters=changed(run.parameters, lambda value: value * factor),
        first_updates=changed(run.first_updates, lambda value: value * factor),
        outputs={name: value * (1 + amount) for name, value in run.outputs.items()},
    )


def test_a_fixed_bound_is_the_same_for_everything() -> None:
    bounds = Bounds.fixed(1e-5)
    assert {bounds.gradient, bounds.update, bounds.parameters, bounds.output, *bounds.curve.at(9)} == {1e-5}


@pytest.mark.parametrize("field", ["parameters", "output"])
def test_a_measured_bound_is_a_multiple_of_the_largest_rerun(field: str) -> None:
    bounds = Bounds.measured(BASELINE, [moved(1e-4), moved(1e-3)])
    assert getattr(bounds, field) == pytest.approx(ENVELOPE_FACTOR * 1e-3, rel=1e-2)


@pytest.mark.parametrize("field", ["gradient", "update"])
def test_gradients_are_measured_over_the_norm_of_the_whole(field: str) -> None:
    bounds = Bounds.measured(BASELINE, [moved(1e-3)])
    assert 0 < getattr(bounds, field) < ENVELOPE_FACTOR * 1e-3


def test_reruns_that_agree_leave_the_bound_of_fp32_rounding() -> None:
    bounds = Bounds.measured(BASELINE, [BASELINE])
    assert (bounds.curve.at(0), bounds.gradient, bounds.parameters) == (
        (LEAST.loss, LEAST.grad_norm),
        LEAST.gradient,
        LEAST.gradient,
    )


def test_low_precision_has_no_least_bound_of_a_loss() -> None:
    bounds = Bounds.measured(BASELINE, [BASELINE], unit=UNIT_ROUNDOFF["bf16"])
    assert bounds.curve.at(STEPS) == (0.0, 0.0)


def test_low_precision_allows_weights_to_be_shown_rounded() -> None:
    bounds = Bounds.measured(BASELINE, [BASELINE], unit=UNIT_ROUNDOFF["bf16"])
    assert bounds.parameters == 2 * UNIT_ROUNDOFF["bf16"]


def test_every_rerun_is_within_the_bounds_that_it_measured() -> None:
    reruns = [moved(1e-3), moved(-5e-4)]
    bounds = Bounds.measured(BASELINE, reruns)
    assert all(ParityResult.of(rerun, BASELINE, bounds).passed for rerun in nonempty(reruns))


def test_a_run_ten_times_as_far_is_beyond_them() -> None:
    assert not ParityResult.of(moved(1e-2), BASELINE, Bounds.measured(BASELINE, [moved(1e-3)])).passed


def test_the_extent_is_read_from_a_trial() -> None:
    extent = extent_of(BASELINE)
    assert (extent.layers, extent.longest_sum, extent.largest_tensor) == (LAYERS, VOCABULARY, VOCABULARY * WIDTH)
