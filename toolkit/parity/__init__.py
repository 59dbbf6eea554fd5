"""Trials, tolerances, and the comparison of strategies with its diagnosis."""

from toolkit.parity.bounds import Bounds
from toolkit.parity.compare import ParityReport, compare, parameter_differences, whole_difference
from toolkit.parity.curve import LossCurve
from toolkit.parity.diagnosis import Cause, Diagnosis
from toolkit.parity.gradients import GradientRow, gradient_rows, gradient_table
from toolkit.parity.tolerance import Tolerance
from toolkit.parity.trial import SavedTensors, Tensors, Trial
from toolkit.parity.verdict import Verdict

__all__ = [
    "Bounds",
    "Cause",
    "Diagnosis",
    "GradientRow",
    "LossCurve",
    "ParityReport",
    "SavedTensors",
    "Tensors",
    "Tolerance",
    "Trial",
    "Verdict",
    "compare",
    "gradient_rows",
    "gradient_table",
    "parameter_differences",
    "whole_difference",
]
