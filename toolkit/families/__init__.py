"""Families: what a Hugging Face family needs so that it can be cut. Most of it is read from the model itself."""
