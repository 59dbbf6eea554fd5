"""Context parallelism: ranks share each sequence, and an attention of our own that needs positions but no masks."""
