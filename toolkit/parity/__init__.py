"""Strategies, tolerances, and the comparison of parity runs with its diagnosis."""

from toolkit.parity.bounds import Bounds
from toolkit.parity.diagnosis import Cause, Diagnosis
from toolkit.parity.parity_run import LossCurve, ParityRun, SavedTensors, TensorDifference, Tensors
from toolkit.parity.result import ParityResult
from toolkit.parity.tolerance import CurveComparison, Tolerance, compare_curves

# fmt: off
__all__ = ["Bounds", "Cause", "CurveComparison", "Diagnosis", "LossCurve", "ParityResult", "ParityRun", "SavedTensors",
           "TensorDifference", "Tensors", "Tolerance", "compare_curves"]
