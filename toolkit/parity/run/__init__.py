"""Parity runs: train a recipe under several strategies on local ranks, and record what a comparison needs."""
