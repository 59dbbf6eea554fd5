"""Recordings of activation memory: a model's own forward and backward pass on tensors without memory."""
