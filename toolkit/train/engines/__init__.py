"""Engines: who does the arithmetic. `create` builds the one that a recipe names."""
