"""Execution: how a program runs a layer, as far as its time goes: kernels, what overlaps, what the host takes.

The facts of each framework stand in time_profiles.json with the source that shows them: bytes that element-wise kernels
move per element (forward, backward), bytes a parameter of accumulation and update, and which communication overlaps.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import ConfigError
from toolkit.hardware import MatmulPrecision

Format = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
"""Format of the layers' matrix products. The LM head and attention of 8 and 4-bit formats compute in bf16."""
Kernel = Literal["eager", "unfused", "fused-softmax", "flash1", "flash2", "flash3", "cudnn", "flex", "tiles"]

UNITS: Mapping[Format, MatmulPrecision] = {
    "fp32": "fp32", "tf32": "tf32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4",
}  # fmt: skip
QUANTIZED: Mapping[str, float] = {"fp8": 5, "mxfp8": 6, "nvfp4": 9}
"""Bytes per element of a product's input and of its gradient: read in 16 bits, written along rows and along columns
with their scales (TransformerEngine: transpose caches); nvfp4 also takes a random Hadamard transform."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """A framework and the kernels that its user chose."""

    framework: str = "toolkit"
    precision: Format = "bf16"
    attention: Kernel = "flash2"
    compiled: bool = False
    """Whether torch.compile fuses the element-wise kernels of a layer."""
    fused_norm: bool = True
    virtual_stages: int = 1
    context_parallel: int = 1
    dropout: bool = False
    loss: Literal["plain", "fused", "compiled"] = "plain"
    dispatcher: Literal["", "all-to-all", "deepep"] = ""
    """Dispatcher that brings tokens to the ranks of their experts; empty for the framework's own. DeepEP sends a token
    once to each rank that has any of its experts, and once to each node."""
    routing: Literal["random", "consecutive"] = "random"
    """How a token's top-k experts are drawn: at random, or consecutive, which some benchmarks force."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a framework without a profile."""
        if self.framework not in profiles():
            raise ConfigError.of("framework", self.framework, "it has no profile", f"choose {', '.join(profiles())}")

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """The framework's row of time_profiles.json."""
        return profiles()[self.framework]

    @property
    def unit(self) -> MatmulPrecision:
        """Precision of the layers' matrix products."""
        return UNITS[self.precision]

    @property
    def attention_precision(self) -> MatmulPrecision:
        """Precision of everything but the layers' matrix products: 16 bits, or 32 where the layers have 32."""
        return self.unit if self.unit not in ("fp8", "fp4") else "bf16"

    @property
    def activation_bytes(self) -> int:
        """Bytes of an activation's element."""
        return 4 if self.unit in ("fp32", "tf32") else 2


@cache
def profiles() -> dict[str, dict[str, Any]]:
    """Return the facts of every framework, by its name."""
    return dict(json.loads(Path(__file__).with_name("time_profiles.json").read_text(encoding="utf-8")))
