"""Optimizers of which PyTorch or DeepSpeed has none for parts of tensors."""
