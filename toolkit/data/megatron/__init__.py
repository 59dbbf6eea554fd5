"""Datasets of Megatron-LM: a .bin of ids that is mapped into memory, and the .idx that says where documents begin."""
