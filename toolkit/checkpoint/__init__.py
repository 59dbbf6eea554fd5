"""Models on disk in Hugging Face format."""
