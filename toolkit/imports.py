"""Import torch, transformers and DeepSpeed in two thirds of the time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Import large libraries in this block: a million objects, none of which is garbage.

    Python would go through all of them again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
