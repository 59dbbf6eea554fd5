"""Bounds: how far a parity run may differ from the baseline in everything that is compared, and why that far."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from toolkit.parity import tolerance
from toolkit.parity.parity_run import ParityRun, Tensors, tensor_differences, whole_difference
from toolkit.parity.signs import decided_updates


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Relative bounds. `unit` is the unit roundoff of the training precision."""

    curve: tolerance.Tolerance
    gradient: float
    """Bound of one parameter's gradient in the first step, over the norm of the whole gradient."""
    update: float
    """Bound of one parameter's first update, over the norm of the whole update."""
    parameters: float
    """Bound of all parameters as one vector, after the last step."""
    output: float
    """Bound of the root mean square of a layer's output in the first step."""
    unit: float = tolerance.FP32_UNIT

    @classmethod
    def fixed(cls, bound: float = tolerance.FP32_RELATIVE) -> Self:
        """Return one bound for everything: what our own engines must meet on small models in fp32."""
        return cls(curve=tolerance.Tolerance.fp32(bound), gradient=bound, update=bound, parameters=bound, output=bound)

    @classmethod
    def measured(cls, baseline: ParityRun, reruns: Sequence[ParityRun], *, unit: float = tolerance.FP32_UNIT) -> Self:
        """Measure bounds from reruns of the baseline that round differently; in fp32 at least `rounding_bound`.

        A low precision has no useful a-priori bound (products in series of 2^-8 each): there the reruns decide.
        """
        factor = tolerance.ENVELOPE_FACTOR
        curve = tolerance.Tolerance.envelope([baseline.curve, *(rerun.curve for rerun in reruns)], factor=factor)
        gradient = factor * max(_largest(rerun.first_gradients, baseline.first_gradients) for rerun in reruns)
        updates = [decided_updates(rerun, baseline, gradient) for rerun in reruns]
        update = factor * max(_largest(update, baseline.first_updates) for update in updates)
        parameters = factor * max(whole_difference(rerun.parameters, baseline.parameters) for rerun in reruns)
        output = factor * max(
            (
                tolerance.relative(rerun.outputs[name], value)
                for rerun in reruns
                for name, value in baseline.outputs.items()
            ),
            default=0.0,
        )
        if unit > tolerance.FP32_UNIT:
            # Some strategies report their rounded copy of the weights, others the fp32 master weights.
            parameters = max(parameters, 2 * unit)
            return cls(curve=curve, gradient=gradient, update=update, parameters=parameters, output=output, unit=unit)
        least = tolerance.rounding_bound(extent_of(baseline))
        return cls(
            curve=curve.at_least(least),
            gradient=max(gradient, least.gradient),
            update=max(update, least.gradient),
            parameters=max(parameters, least.gradient),
            output=max(output, least.loss),
        )


def extent_of(run: ParityRun) -> tolerance.ModelExtent:
    """Return the model sizes that rounding depends on, from the parameters of a run."""
    shapes = [value.shape for value in run.initial.values()]
    return tolerance.ModelExtent(
        layers=max(1, sum(" " not in name for name in run.outputs) - 1),
        longest_sum=max(max(shape, default=1) for shape in shapes),
        largest_tensor=max(int(np.prod(shape)) for shape in shapes),
    )


def _largest(tensors: Tensors, baseline: Tensors) -> float:
    return max((row.difference for row in tensor_differences(tensors, baseline)), default=0.0)
