"""Estimates of what a run costs: memory and FLOPs, from configs alone."""
