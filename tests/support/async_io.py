"""Whether DeepSpeed's op for NVMe can be used here: it needs libaio, a compiler, and two minutes the first time."""

import os
import shutil
from pathlib import Path

import pytest


def skip_without_async_io(*, builds: bool) -> None:
    """Skip a test where the op is not there; one that `builds` compiles it, where that is possible."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    if not shutil.which("ninja"):
        pytest.skip("ninja is not installed, which loads DeepSpeed's async_io")
    if any(root.glob("*/async_io/async_io.so")):
        return
    if not builds:
        pytest.skip("DeepSpeed's async_io is not compiled yet: the tests marked whole do it, in two minutes")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not shutil.which("g++") or not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io needs g++ and libaio: apt install g++ libaio-dev")
