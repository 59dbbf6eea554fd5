"""Weights for a model on the meta device: drawn or read, a decoder layer at a time, only what a rank keeps."""

from toolkit.train.weights.initial import initialise
from toolkit.train.weights.meta import parameters_on_meta
from toolkit.train.weights.part import ModelPart, OnLayer
from toolkit.train.weights.stored import read_weights

__all__ = ["ModelPart", "OnLayer", "initialise", "parameters_on_meta", "read_weights"]
