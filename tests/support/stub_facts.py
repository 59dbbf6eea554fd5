"""What the stub GPU says of itself, and what was asked of it: for both sides of its process."""

NAME = "NVIDIA H100 80GB HBM3"
"""What `torch.cuda.get_device_name` returns: a GPU of the catalogue."""
MEMORY_BYTES = 80 * 2**30
PEAK_BYTES = 123_456_789
"""What `torch.cuda.max_memory_allocated` returns."""
LOG: list[tuple[str, ...]] = []
"""Calls of streams, events and `torch.cuda`, in their order: an operation, and what it was given."""
