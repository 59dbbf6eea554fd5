"""What the benchmarks share: a small recipe, a timed run of the toolkit, rounds that alternate, and a table."""
