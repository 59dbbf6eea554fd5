"""Trainable: which parameters of a model train, as `dstk memory --trainable` says it. All others are frozen."""

from dataclasses import dataclass
from typing import Any, Self

from toolkit.errors import ConfigError

_OPTION = "--trainable"
_LORA = "r, alpha, targets, dropout"


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """All parameters, those whose names match a pattern, or those of LoRA's adapters."""

    patterns: tuple[str, ...] = ()
    """As of fnmatch."""
    rank: int = 0
    """LoRA's; 0 without LoRA."""
    targets: tuple[str, ...] = ()
    """Names of the modules that get adapters."""
    dropout: float = 0.0
    in_fp32: bool = True
    """Whether adapters stay in fp32 where the weights are in 16 bits: peft's default. DeepSpeed casts all weights."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `all`, `lora:r=16,targets=q_proj+v_proj` or patterns. Raises ConfigError."""
        kind, _, listed = text.partition(":")
        words = [word.strip() for word in (listed if kind == "lora" else text).split(",") if word.strip()]
        if text == "all":
            return cls()
        if kind != "lora":
            if not words:
                raise ConfigError.of(_OPTION, text, "it names no parameters", "write all, lora or patterns")
            return cls(patterns=tuple(sorted({*words})))
        found: dict[str, Any] = {"rank": 8, "targets": ("all-linear",)}
        for word in words:
            name, _, value = word.partition("=")
            try:
                found |= _lora_option(name, value)
            except ValueError:
                raise ConfigError.of(_OPTION, text, f"{word!r} says nothing about LoRA", f"write {_LORA}") from None
        if found["rank"] < 1 or not 0 <= found.get("dropout", 0) < 1:
            raise ConfigError.of(_OPTION, text, "r is at least 1, and dropout from 0 to below 1", "correct it")
        return cls(**found)

    @property
    def text(self) -> str:
        """What `parse` reads, of all that memory depends on; empty where all parameters train."""
        if not self.rank:
            return ",".join(self.patterns)
        options = {"r": self.rank, "targets": "+".join(self.targets)}
        options |= {"dropout": self.dropout} if self.dropout else {}
        options |= {} if self.in_fp32 else {"fp32": "no"}
        return "lora:" + ",".join(f"{name}={value}" for name, value in options.items())


def _lora_option(name: str, value: str) -> dict[str, Any]:
    """A field of Trainable from an option of LoRA. Raises ValueError."""
    match name:
        case "r":
            return {"rank": int(value)}
        case "alpha":
            float(value)  # a factor: memory does not depend on it
            return {}
        case "targets" if value:
            return {"targets": tuple(sorted({*value.split("+")}))}
        case "dropout":
            return {"dropout": float(value)}
        case "fp32":
            return {"in_fp32": value != "no"}
    raise ValueError
