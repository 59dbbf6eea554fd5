"""Train Hugging Face GPT models with DeepSpeed and Megatron-style parallelism, and know that the result is right."""

__version__ = "0.1.0"
