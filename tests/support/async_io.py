"""Whether DeepSpeed's op for NVMe can be used here: it needs libaio, a compiler, and two minutes the first time."""

import os
import shutil
from pathlib import Path

import pytest

OPS = ("async_io", "pin_memory")


def skip_without_async_io(*, builds: bool) -> None:
    """Skip a test where the ops are not there; one that `builds` compiles them, where that is possible."""
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    if not shutil.which("ninja"):
        pytest.skip("ninja is not installed, which loads DeepSpeed's async_io")
    if all((root / op / f"{op}.so").exists() for op in OPS):
        return
    if not builds:
        pytest.skip("DeepSpeed's async_io is not compiled yet: the tests marked whole do it, in two minutes")
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.cpu import PinMemoryBuilder

    if not shutil.which("g++") or not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io needs g++ and libaio: apt install g++ libaio-dev")
    for builder in (AsyncIOBuilder(), PinMemoryBuilder()):
        builder.load(verbose=False)
