"""MachineFacts: what was read from a machine, before it is examined; what is known of all, from known.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KNOWN: dict[str, Any] = json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))
"""Packages with their oldest supported and newest tested version; what programs, ops, kinds of links and environment
variables are for."""
VARIABLES: dict[str, Any] = KNOWN["variables"]
MARK = "dstk-doctor:"
"""Prefix of a probe's result line: imports print too."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Output of a program; `error` if it is missing, failed or timed out."""

    text: str = ""
    error: str | None = None
    missing: bool = False


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Report of a Python process about a package; `error` if it is missing or broken."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One GPU, as reported by nvidia-smi."""

    index: int
    name: str
    memory_mib: int
    free_mib: int
    driver: str


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts of a machine."""

    host: str = "host"
    system: str = "Linux"
    python: str = "3.11.0"
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Distribution -> version; None if it is not installed."""
    torch: Probe = Probe()
    deepspeed: Probe = Probe()
    nvidia_smi: Answer = Answer(missing=True)
    gpus: Sequence[GpuFacts] = ()
    driver_cuda: str | None = None
    """The newest CUDA that the driver can run."""
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Pairs of GPUs -> NV12, PIX, PXB, PHB, NODE or SYS."""
    compilers: Mapping[str, Answer] = field(default_factory=dict)
    """gcc, g++, nvcc, ninja -> what `--version` says."""
    libaio: bool = False
    locks: Mapping[str, float] = field(default_factory=dict)
    """Lock of an op that is being compiled, or whose compilation was killed -> its age in seconds."""
    cpus: int = 1
    cpus_of_machine: int = 1
    memory_bytes: int = 0
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    disks: Mapping[str, int | None] = field(default_factory=dict)
    """Purpose -> free bytes of its disk; None if unknown."""
    folders: Mapping[str, str] = field(default_factory=dict)
    unwritable: Sequence[str] = ()
    """Purposes whose folder cannot be written."""
    limits: Mapping[str, int | None] = field(default_factory=dict)
    """memlock (bytes) and nofile; None means unlimited."""
    interfaces: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    missing_paths: Sequence[str] = ()
    """Variables whose value is a path that does not exist."""
    seconds: float = 0.0
