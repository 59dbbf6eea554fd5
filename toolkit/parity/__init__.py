"""Loss curves, tolerances, and the comparison of strategies."""

from toolkit.parity.compare import ParityReport, compare, parameter_differences, whole_difference
from toolkit.parity.curve import LossCurve
from toolkit.parity.gradients import GradientRow, gradient_rows, gradient_table
from toolkit.parity.tolerance import Tolerance

__all__ = [
    "GradientRow",
    "LossCurve",
    "ParityReport",
    "Tolerance",
    "compare",
    "gradient_rows",
    "gradient_table",
    "parameter_differences",
    "whole_difference",
]
