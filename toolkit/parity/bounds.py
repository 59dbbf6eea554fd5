"""Bounds: what a trial may differ by from the baseline, in everything that is compared, and where that comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from toolkit.parity.compare import whole_difference
from toolkit.parity.gradients import gradient_rows
from toolkit.parity.tolerance import (
    ENVELOPE_FACTOR,
    FP32_RELATIVE,
    FP32_UNIT,
    Extent,
    Tolerance,
    relative,
    rounding_bound,
)
from toolkit.parity.trial import Tensors, Trial


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """All relative. `unit` is the unit roundoff of the precision that is trained in."""

    curve: Tolerance
    gradient: float
    """Of one parameter's gradient in the first step, over the norm of the whole gradient."""
    update: float
    """The same of the first update."""
    parameters: float
    """Of all parameters as one vector, after the last step."""
    output: float
    """Of the root mean square of a layer's output in the first step."""
    unit: float = FP32_UNIT

    @classmethod
    def fixed(cls, bound: float = FP32_RELATIVE) -> Self:
        """The same for everything: what our own engines are held to on small models in fp32."""
        curve = Tolerance(loss=(bound,), grad_norm=(bound,), source=f"fp32 summation order: {bound:g}")
        return cls(curve=curve, gradient=bound, update=bound, parameters=bound, output=bound)

    @classmethod
    def measured(cls, baseline: Trial, reruns: Sequence[Trial], *, unit: float = FP32_UNIT) -> Self:
        """From reruns of the baseline that round differently; in fp32 never less than `rounding_bound`.

        A low precision has no bound that would be of use (products in series of 2^-8 each): there the reruns decide.
        """
        factor = ENVELOPE_FACTOR
        curve = Tolerance.envelope([baseline.curve, *(rerun.curve for rerun in reruns)], factor=factor)
        gradient = factor * max(_worst_row(rerun.first_gradients, baseline.first_gradients) for rerun in reruns)
        update = factor * max(_worst_row(rerun.first_updates, baseline.first_updates) for rerun in reruns)
        parameters = factor * max(whole_difference(rerun.parameters, baseline.parameters) for rerun in reruns)
        output = factor * max(
            (relative(rerun.outputs[name], value) for rerun in reruns for name, value in baseline.outputs.items()),
            default=0.0,
        )
        if unit > FP32_UNIT:
            # One strategy shows its rounded copy of the weights that another one keeps in fp32.
            parameters = max(parameters, 2 * unit)
            return cls(curve=curve, gradient=gradient, update=update, parameters=parameters, output=output, unit=unit)
        least = rounding_bound(extent_of(baseline))
        return cls(
            curve=curve.at_least(least),
            gradient=max(gradient, least.gradient),
            update=max(update, least.gradient),
            parameters=max(parameters, least.gradient),
            output=max(output, least.loss),
        )


def extent_of(trial: Trial) -> Extent:
    """The sizes that rounding depends on, from the parameters of a trial."""
    shapes = [value.shape for value in trial.initial.values()]
    return Extent(
        layers=max(1, len(trial.outputs) - 1),
        longest_sum=max(max(shape, default=1) for shape in shapes),
        largest_tensor=max(int(np.prod(shape)) for shape in shapes),
    )


def _worst_row(values: Tensors, baseline: Tensors) -> float:
    rows = gradient_rows(values, baseline)
    return rows[0].difference if rows else 0.0
