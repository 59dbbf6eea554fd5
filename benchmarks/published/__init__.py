"""Published runs, and what the estimate and the formulas of others say of them."""
