"""A CUDA device without CUDA: a process in which torch has one GPU, whose tensors are fake and have no memory.

`StubProcess` starts it and calls functions there, each in a fork of its own. stub_cuda.cpp is what torch's C++ code
asks of a device (autograd's streams, pinned memory, generators), stub_torch_cuda.py what Python code asks of
`torch.cuda`. Both are for torch's CPU build: tests that have a GPU do not need them.
"""

import ctypes
import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import traceback
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
BUILD = Path(__file__).parents[2] / "build" / "stub_cuda"


def why_not() -> str:
    """Return why this machine cannot build the device; empty where it can."""
    if "+cpu" not in version("torch") and find_spec("nvidia") is not None:
        return "torch has its own CUDA: make test-gpu"
    return "" if shutil.which("g++") else "the stub device needs g++: apt-get install g++"


def compiled() -> Path:
    """Compile stub_cuda.cpp, unless it has been for this source and this torch; return the library."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder = Path(spec.origin).parent
    key = hashlib.sha256(f"{version('torch')} {torch_folder}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    library = BUILD / f"{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        include = torch_folder / "include"
        lib = torch_folder / "lib"
        command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", str(SOURCE), "-o", str(made), f"-I{include}"]
        command += [f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
        subprocess.run(command, check=True)
        made.replace(library)
    return library


class StubProcess:
    """A process with a stub device, which has imported `preloaded` and forks itself for each call."""

    def __init__(self, *preloaded: str) -> None:
        library = compiled()
        context = get_context("spawn")
        self._connection, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end, str(library), preloaded))
        self._process.start()
        end.close()

    def call(self, module: str, name: str, *arguments: Any) -> Any:
        """Return what a function of a module returns there. Raises AssertionError with its traceback if it raises."""
        self._connection.send((module, name, arguments))
        result, failure = pickle.loads(self._connection.recv_bytes())
        assert not failure, failure
        return result

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, library: str, preloaded: tuple[str, ...]) -> None:
    _install(library)
    for name in preloaded:
        import_module(name)
    forks = get_context("fork")
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            return
        process = forks.Process(target=_call, args=(connection, module, name, arguments))
        process.start()
        process.join()
        if process.exitcode:
            connection.send_bytes(pickle.dumps((None, f"{name} ended with exit code {process.exitcode}")))


def _call(connection: Connection, module: str, name: str, arguments: tuple[Any, ...]) -> None:
    result = None
    failure = ""
    try:
        result = getattr(import_module(module), name)(*arguments)
    except BaseException:
        failure = traceback.format_exc()
    connection.send_bytes(pickle.dumps((result, failure)))


def _install(library: str) -> None:
    """Give this process a GPU. torch must not be imported yet, nor DeepSpeed, which then chooses its accelerator."""
    assert "torch" not in sys.modules, "torch has looked for CUDA already"
    os.environ["DS_ACCELERATOR"] = "cuda"
    ctypes.CDLL(library)
    import_module("stub_torch_cuda").install()
