"""Autograd on paper: tensors that have a shape, strides and a storage, and no values; no torch."""
