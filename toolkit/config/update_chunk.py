"""The size of the chunks in which optimizers update, on which the memory estimate of their temporaries agrees."""

UPDATE_CHUNK_ELEMENTS = 2**24
"""Elements in one step of an update: whole matrices (or one that is larger) for Muon, runs of a matrix for others."""
