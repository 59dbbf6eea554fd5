"""Samples: which tokens make a sample, which samples make a global batch, and which of them a rank reads."""
