"""Training: launch, data, engines, the loop."""
