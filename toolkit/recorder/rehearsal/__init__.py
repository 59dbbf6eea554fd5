"""Rehearsals: a training step of every kind of rank of a layout, on tensors without memory and without other ranks."""
