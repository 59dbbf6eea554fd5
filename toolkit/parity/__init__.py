"""Loss curves, tolerances, and the comparison of strategies."""

from toolkit.parity.compare import ParityReport, compare, parameter_differences, whole_difference
from toolkit.parity.curve import LossCurve
from toolkit.parity.tolerance import Tolerance

__all__ = ["LossCurve", "ParityReport", "Tolerance", "compare", "parameter_differences", "whole_difference"]
