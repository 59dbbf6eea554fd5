"""Names of Megatron-LM's datasets in recipes: the prefix of .idx and .bin, or one of these files."""

import glob
import os

SUFFIXES = (".idx", ".bin")


def megatron_prefix(source: str) -> str | None:
    """Return the prefix that `data.source` names; None for any other source. A directory of that name comes first."""
    path = os.path.expanduser(source)
    if path.endswith(SUFFIXES) and not os.path.isdir(path) and not glob.has_magic(path):
        return path[: -len(".idx")]
    is_prefix = not os.path.exists(path) and any(os.path.isfile(path + suffix) for suffix in SUFFIXES)
    return path if is_prefix else None
