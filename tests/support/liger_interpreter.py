"""Liger's Triton kernels on CPU tensors, by Triton's interpreter, which runs them row by row in numpy.

It is chosen when triton is imported, so that TRITON_INTERPRET=1 must be in the environment from the beginning.
"""

import os
from importlib.util import find_spec
from typing import Any

import numpy as np

WHY_NOT = "; ".join(
    [f"{name} is not installed" for name in ("triton", "liger_kernel") if find_spec(name) is None]
    or ["TRITON_INTERPRET=1 is not set"] * (os.environ.get("TRITON_INTERPRET") != "1")
)


def interpret() -> None:
    """Make up for what Triton 3.5's interpreter lacks: before Liger is imported."""
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    if getattr(interpreter, "is_extended", False):
        return
    interpreter.is_extended = True
    convert, patch = interpreter._implicit_cvt, interpreter._patch_lang_tensor

    def with_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    def with_index(*arguments: Any) -> None:
        patch(*arguments)
        tl.tensor.__index__ = lambda self: int(np.asarray(self.handle.data).item())

    def by_numpy(function: Any) -> Any:
        def call(x: Any, **_: Any) -> Any:
            return tl.tensor(interpreter.TensorHandle(function(x.handle.data), x.handle.dtype), x.type)

        return call

    interpreter._implicit_cvt, interpreter._patch_lang_tensor = with_floats, with_index
    libdevice.tanh, libdevice.rsqrt = by_numpy(np.tanh), by_numpy(lambda data: 1 / np.sqrt(data))
