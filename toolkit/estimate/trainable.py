"""Trainable: which parameters of a model train, as `dstk memory --trainable` or a recipe says it. Others are frozen."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from toolkit.config.recipe import ModelSection
from toolkit.errors import ConfigError
from toolkit.estimate.parameters import ModelParameters, Parameter
from toolkit.units import LARGEST_COUNT

_LORA: dict[str, Callable[[str], Any]] = {
    "r": int,
    "alpha": float,
    "targets": str,
    "dropout": float,
    "fp32": str,
    "4bit": str,
}
"""LoRA's options. `alpha` is a factor, and memory does not depend on it; `fp32=no` is how `text` says `in_fp32`."""
_YES_OR_NO = {"yes": True, "no": False}
_IN_4_BITS = ",4bit=yes"
"""The end of the text of a QLoRA. Activations are recorded without it: those that are kept are the same."""


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """All parameters, those whose names match a pattern, or those of LoRA's adapters."""

    patterns: tuple[str, ...] = ()
    """Patterns of names for fnmatch; empty: all parameters train, or LoRA's adapters."""
    frozen: tuple[str, ...] = ()
    """Patterns of those that do not train, where all others do."""
    rank: int = 0
    """Rank of LoRA's adapters; 0 without LoRA."""
    targets: tuple[str, ...] = ()
    """Names of the modules that get adapters; `default`: what peft has as the family's."""
    dropout: float = 0.0
    in_fp32: bool = True
    """Whether adapters stay in fp32 where the weights are in 16 bits: peft's default. DeepSpeed casts all weights."""
    in_4bit: bool = False
    """QLoRA: whether the frozen linear layers of decoder layers are kept in 4 bits."""

    @classmethod
    def of(cls, section: ModelSection) -> Self:
        """Read which parameters a recipe trains: DeepSpeed's engines cast adapters as all weights."""
        lora = section.lora
        if lora is None:
            return cls(patterns=tuple(sorted(section.train_only)), frozen=tuple(sorted(section.freeze)))
        targets = tuple(sorted({*lora.targets})) or ("default",)
        return cls(rank=lora.r, targets=targets, dropout=lora.dropout, in_fp32=False, in_4bit=section.load_in_4bit)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `all`, `lora:r=16,targets=q_proj+v_proj`, patterns, or `freeze:` and patterns. Raises ConfigError."""
        kind, _, listed = text.partition(":")
        words = [word.strip() for word in (listed if kind in ("lora", "freeze") else text).split(",") if word.strip()]
        if kind == "freeze" and words:
            return cls(frozen=tuple(sorted({*words})))
        if text == "all" or (kind != "lora" and words):
            return cls(patterns=() if text == "all" else tuple(sorted({*words})))
        try:
            read = {name: _LORA[name](value) for name, _, value in (word.partition("=") for word in words)}
            rank = read.get("r", 8)
            dropout = read.get("dropout", 0.0)
            targets = read.get("targets", "all-linear").split("+")
            if kind != "lora" or not 1 <= rank <= LARGEST_COUNT or not 0 <= dropout < 1 or "" in targets:
                raise ValueError
            in_4bit = _YES_OR_NO[read.get("4bit", "no")]
            in_fp32 = _YES_OR_NO[read.get("fp32", "yes")]
        except (KeyError, ValueError):
            reason = (
                f"r is from 1 to {LARGEST_COUNT}, dropout from 0 to below 1, targets are names joined by +, "
                "and 4bit and fp32 are yes or no"
            )
            advice = "write all, lora:r=16,alpha=32,targets=q_proj+v_proj,dropout=0.05,4bit=yes or patterns of names"
            raise ConfigError.of("--trainable", text, reason, advice) from None
        return cls(rank=rank, targets=tuple(sorted({*targets})), dropout=dropout, in_fp32=in_fp32, in_4bit=in_4bit)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a recipe's model section that `of` reads."""
        if self.rank:
            targets = () if self.targets == ("default",) else self.targets
            four = {"load_in_4bit": True, "init": "pretrained"} if self.in_4bit else {}
            return {"lora": {"r": self.rank, "targets": targets, "dropout": self.dropout}, **four}
        return {"train_only": self.patterns, "freeze": self.frozen}

    @property
    def text(self) -> str:
        """The text that `parse` reads, of all that memory depends on; empty where all parameters train."""
        if self.frozen:
            return "freeze:" + ",".join(self.frozen)
        if not self.rank:
            return ",".join(self.patterns)
        options = {"r": self.rank, "targets": "+".join(self.targets)}
        options |= {"dropout": self.dropout} if self.dropout else {}
        options |= {} if self.in_fp32 else {"fp32": "no"}
        return "lora:" + ",".join(f"{name}={value}" for name, value in options.items()) + _IN_4_BITS * self.in_4bit


EVERYTHING = Trainable()


def without_4bit(text: str) -> str:
    """The part of a `Trainable`'s text that decides which parameters there are and what the backward pass needs."""
    return text.removesuffix(_IN_4_BITS)


@lru_cache(maxsize=64)
def vectors_alone(model: ModelParameters) -> ModelParameters:
    """The model with norms and biases alone as what trains, as the teacher of a distillation is built."""

    def marked(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        return tuple(replace(parameter, trainable=len(parameter.shape) == 1) for parameter in parameters)

    return replace(model, front=marked(model.front), kinds=tuple(map(marked, model.kinds)), back=marked(model.back))


@lru_cache(maxsize=64)
def in_4_bits(model: ModelParameters, weight_bytes: int) -> tuple[ModelParameters, int]:
    """The model with the frozen matrices of decoder layers as bitsandbytes keeps them, and elements of the largest.

    A matrix that is packed has as many elements of `weight_bytes` each as it takes memory.
    """
    frozen = [[p for p in kind if p.is_linear and not p.trainable] for kind in model.kinds]
    packed = {
        p: replace(p, shape=(-(-_nf4_bytes(p.numel) // weight_bytes),), dim=None) for kind in frozen for p in kind
    }
    kinds = tuple(tuple(packed.get(p, p) for p in kind) for kind in model.kinds)
    return replace(model, kinds=kinds), max((p.numel for p in packed), default=0)


def _nf4_bytes(numel: int) -> int:
    """Bytes of a matrix in NF4 with double quantization (arXiv:2305.14314, section 3), as bitsandbytes 0.50 keeps it.

    Two elements a byte, a byte for the scale of each block of 64, four for that of each 256 scales, and three tables.
    """
    blocks = -(-numel // 64)
    tables = 4 * (16 + 256 + 1)
    return -(-numel // 2) + blocks + 4 * -(-blocks // 256) + tables
