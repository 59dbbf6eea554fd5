"""Names on disk, and which names that came from a file may be trusted.

RUN/latest                      one line: the name of the directory that was committed last; a hint
RUN/step-00000120/              a checkpoint; it gets this name only when it is complete
RUN/.step-00000120.NONCE.tmp/   being written or deleted: garbage when its process is dead
RUN/.step-00000120.NONCE.old/   being replaced: garbage when step-00000120 exists, else a complete checkpoint

step-00000120/model.safetensors, or model-00001-of-00004.safetensors and model.safetensors.index.json
step-00000120/adapter_model.safetensors and adapter_config.json, where only LoRA's adapters train
step-00000120/optimizer/exp_avg-00001-of-00004.safetensors
step-00000120/trainer_state.json, manifest.json, and the files that transformers reads
"""

import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from toolkit.errors import CheckpointError
from toolkit.files import open_regular, printable, reason_of
from toolkit.remote_files import RemotePath, advice_of

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer_state.json"
LATEST = "latest"
MODEL = "model"
OPTIMIZER = "optimizer"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTERS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""LoRA's adapters as peft reads them, in place of the model: always one file."""

_STEP = re.compile(r"step-([0-9]{8,18})")
_TEMPORARY = re.compile(r"\.(step-[0-9]{8,18})\.[0-9a-f]+\.(tmp|old)")
_KIND = re.compile(r"[a-z][a-z0-9_]*")
_FILE = re.compile(r"(?:(model)|optimizer/([a-z][a-z0-9_]*))-([0-9]{5,})-of-([0-9]{5,})\.safetensors")
_MAX_NAME_LENGTH = 1024
_HASHED_BYTES = 16 * 2**20
"""Bytes that are asked for at once where all of a file behind a URL is read."""


def not_a_directory(path: Path) -> str:
    """Say why `path`, which is no directory, is none."""
    return "a file, and not a directory" if path.exists() else "no such directory"


def step_name(step: int) -> str:
    """`step-00000120`, so that names sort by step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's directory; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def temporary_name(name: str) -> str:
    """A name for a directory that is being written or deleted, which no directory of a dead process has."""
    return f".{name}.{secrets.token_hex(4)}.tmp"


def parse_temporary_name(name: str) -> tuple[str, str] | None:
    """(name of the checkpoint, `tmp` or `old`) of a temporary directory; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    return (match[1], match[2]) if match else None


def state_shape(kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a state of a parameter: Adafactor's means over rows and columns are smaller."""
    means = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, *shape[-1:])}
    return means.get(kind, tuple(shape))


def is_kind(kind: str) -> bool:
    """Whether a kind of tensors can be part of a file name."""
    return _KIND.fullmatch(kind) is not None


def tensor_file_names(kind: str, count: int) -> list[str]:
    """The paths, inside a checkpoint, of the `count` files that hold the tensors of one kind."""
    if kind == MODEL and count == 1:
        return [SINGLE]
    stem = MODEL if kind == MODEL else f"{OPTIMIZER}/{kind}"
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def kind_of(path: str) -> tuple[str, int, int] | None:
    """(kind, number, count) of a tensor file, the number from 1; None for any other path."""
    if path in (SINGLE, ADAPTERS):
        return MODEL, 1, 1
    match = _FILE.fullmatch(path)
    return (match[1] or match[2], int(match[3]), int(match[4])) if match else None


def is_safe_path(name: object) -> TypeGuard[str]:
    """Whether a path that a file names stays inside that file's directory, and can be printed."""
    return is_safe_name(name) and "\\" not in name and not {"", ".", ".."} & set(name.split("/"))


def is_safe_name(name: object) -> TypeGuard[str]:
    """Whether a tensor or file may have this name: printable, and of a sensible length."""
    return isinstance(name, str) and 0 < len(name) <= _MAX_NAME_LENGTH and name.isprintable()


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value that a file contains is a non-negative integer of at most 63 bits."""
    return type(value) is int and 0 <= value < 2**63


def checkpoint_error(path: Path, message: str) -> CheckpointError:
    """A CheckpointError about a path that may be untrusted."""
    return CheckpointError(f"{printable(path)}: {message}", path=printable(path))


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn what fails behind a URL into a CheckpointError that says what to do."""
    try:
        yield
    except OSError as error:
        if not isinstance(path, RemotePath):
            raise
        advice = advice_of(error)
        raise checkpoint_error(path, f"{reason_of(error)}. {advice[:1].upper()}{advice[1:]}.") from error


def hash_file(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open_binary(_HASHED_BYTES) if isinstance(path, RemotePath) else open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_synced(path: Path, content: bytes) -> None:
    """Write and fsync a new file. Raises OSError where the path exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, memoryview(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: memoryview) -> None:
    """Write every byte: one system call may take fewer."""
    while content:
        content = content[os.write(descriptor, content) :]
