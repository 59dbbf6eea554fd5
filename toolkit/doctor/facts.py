"""Facts: what was read from a machine, before anyone judges it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MARK = "dstk-doctor:"
"""Before the line of a probe that counts: imports print too."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program said; `error` where it is missing, failed or took too long."""

    text: str = ""
    error: str | None = None
    missing: bool = False


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a Python process found out about a package; `error` where the package is missing or broken."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One GPU, as nvidia-smi sees it."""

    index: int
    name: str
    memory_mib: int
    free_mib: int
    driver: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A machine."""

    host: str = "host"
    system: str = "Linux"
    python: str = "3.11.0"
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Distribution -> version; None where it is not installed."""
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
    cpus: int = 1
    cpus_of_machine: int = 1
    memory_bytes: int = 0
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    disks: Mapping[str, int | None] = field(default_factory=dict)
    """What for -> free bytes of the disk where it is kept; None where that cannot be told."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """What for -> the folder."""
    unwritable: Sequence[str] = ()
    """Of those, the ones that cannot be written."""
    limits: Mapping[str, int | None] = field(default_factory=dict)
    """memlock (bytes) and nofile; None means unlimited."""
    interfaces: Sequence[str] = ()
    """Of the network."""
    environment: Mapping[str, str] = field(default_factory=dict)
    missing_paths: Sequence[str] = ()
    """Variables whose value is a path that does not exist."""
    seconds: float = 0.0
