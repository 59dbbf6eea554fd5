"""Run recipes/train.py in this process."""

import contextlib
import io
import os
import runpy
from collections.abc import Sequence
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "recipes" / "train.py"


def train_here(folder: str, argv: Sequence[str]) -> str:
    """Run it in `folder`; return what it printed."""
    os.chdir(folder)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(SCRIPT))["main"](list(argv))
    return output.getvalue()
