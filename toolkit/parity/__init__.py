"""Loss curves, tolerances, and the comparison of strategies."""
