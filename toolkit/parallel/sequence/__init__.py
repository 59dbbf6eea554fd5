"""Ulysses: the ranks of a group share each sequence and, inside attention, exchange positions for heads."""
