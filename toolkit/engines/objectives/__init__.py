"""Objectives of a run: pure functions of log-probabilities, and what makes token weights of them."""
