"""The parameters of a model, one by one, from its config alone, and what each rank holds of them in any layout."""

from toolkit.estimate.parameters.architecture import Architecture
from toolkit.estimate.parameters.model_config import ModelConfig
from toolkit.estimate.parameters.parameter import Parameter, ParameterGroup, RankParameters

__all__ = ["Architecture", "ModelConfig", "Parameter", "ParameterGroup", "RankParameters"]
