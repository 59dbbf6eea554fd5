"""Hosts of a test, and the tests between them. A package: `interruptions.py` is also a name in tests/support."""
