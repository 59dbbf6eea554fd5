"""What the benchmarks share: a timed run of the toolkit, and a table for the screen and for benchmarks/results/."""
