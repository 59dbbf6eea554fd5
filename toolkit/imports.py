"""Import torch, transformers and DeepSpeed without Python's garbage collections: in two thirds of the time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import large libraries in this block: a million objects, none of which is garbage.

    Python would go through all of them again and again. They are frozen then, so that later collections, also those
    that DeepSpeed asks for while it trains and those at the end of the process, skip them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
