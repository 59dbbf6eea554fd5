"""The parameters of a model, tensor by tensor, from its config alone: what each rank holds of them under any cut."""

from toolkit.estimate.parameters.architecture import Architecture
from toolkit.estimate.parameters.holdings import Group, Holdings
from toolkit.estimate.parameters.tensor import Tensor

__all__ = ["Architecture", "Group", "Holdings", "Tensor"]
