"""A decoder model's operations, in the order in which Hugging Face's code runs them, on tensors without values."""
