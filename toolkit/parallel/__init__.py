"""Megatron-style tensor parallelism and pipeline stages for Hugging Face models. Process groups are passed in."""
