"""Every key of a generated config: what it does, DeepSpeed's default, and why it has its value."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.dsconfig.build import Config
from toolkit.dsconfig.explain import basics, sections, zero
from toolkit.dsconfig.explain.key import Key
from toolkit.dsconfig.job import ConfigJob
from toolkit.dsconfig.trainer import AUTO, AUTO_SOURCES

__all__ = ["KEYS", "Explained", "Key", "explain", "leaves"]

_SECTIONS: Mapping[str, Mapping[str, Key]] = {
    "zero_optimization": zero.ZERO,
    "zero_optimization.offload_optimizer": zero.OFFLOAD_OPTIMIZER,
    "zero_optimization.offload_param": zero.OFFLOAD_PARAM,
    "aio": zero.AIO,
    "optimizer": sections.OPTIMIZER,
    "scheduler": sections.SCHEDULER,
    "activation_checkpointing": sections.ACTIVATION_CHECKPOINTING,
    **sections.MONITORS,
    "flops_profiler": sections.FLOPS_PROFILER,
}

KEYS: Mapping[str, Key] = {
    **basics.BATCH,
    **basics.PRECISION,
    **{f"{section}.{name}": key for section, keys in _SECTIONS.items() for name, key in keys.items()},
    **basics.REST,
    **basics.PIPELINE,
}
"""Every key that is ever generated, by its path."""


@dataclass(frozen=True, kw_only=True)
class Explained:
    """One key of one config."""

    path: str
    value: Any
    what: str
    default: Any
    why: str


def explain(config: Config, job: ConfigJob) -> list[Explained]:
    """Every key of a config that was made for `job`, in its order."""
    return [
        Explained(
            path=path,
            value=value,
            what=KEYS[path].what,
            default=KEYS[path].default_in(job),
            why=f"filled in from {AUTO_SOURCES[path]}" if value == AUTO else KEYS[path].why_in(job),
        )
        for path, value in leaves(config)
    ]


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that is no section, with its path."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
