"""Whether DeepSpeed's ops for NVMe can be used here: they need libaio and a compiler, once, for two minutes.

python tests/support/async_io.py      compiles them (make test-all)
"""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "build" / "torch_extensions"
OPS = ("async_io", "pin_memory")


def use_build_directory() -> None:
    """Compile ops of this environment into build/: those of another one would be compiled again in a test."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(BUILD))
    # torch asks for the program ninja, which is beside this Python also where the environment is not activated.
    programs = str(Path(sys.executable).parent)
    if programs not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"


def are_compiled() -> bool:
    """Whether both ops are in TORCH_EXTENSIONS_DIR."""
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    return all((root / op / f"{op}.so").exists() for op in OPS)


def why_not() -> str | None:
    """What this machine lacks to compile the ops, or None."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not shutil.which("ninja"):
        return "DeepSpeed's async_io needs ninja: pip install ninja"
    if not shutil.which("g++") or not AsyncIOBuilder().is_compatible(verbose=False):
        return "DeepSpeed's async_io needs g++ and libaio: apt-get install g++ libaio-dev"
    return None


def build() -> None:
    """Compile the ops, or load those that are compiled."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.cpu import PinMemoryBuilder

    for builder in (AsyncIOBuilder(), PinMemoryBuilder()):
        builder.load(verbose=False)


def skip_without_async_io() -> None:
    """Compile the ops where they are missing; skip the test where that is impossible."""
    if are_compiled() and shutil.which("ninja"):  # torch loads a compiled op by ninja as well
        return
    if reason := why_not():
        pytest.skip(reason)
    build()


def main() -> int:
    """Compile what is missing or older than its source; return 1 where that is impossible, and say why."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    use_build_directory()
    if reason := why_not():
        print(f"tests of offload to NVMe are skipped: {reason}", file=sys.stderr)
        return 1
    started = time.monotonic()
    build()
    print(f"DeepSpeed's async_io is compiled ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
