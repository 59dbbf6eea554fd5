"""`parallel: auto`: what the ranks of a launch run on, and the plan of a recipe for them."""
