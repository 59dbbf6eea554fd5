"""Megatron tensor parallelism for Hugging Face models."""
