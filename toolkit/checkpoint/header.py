"""The header of a safetensors file: written here, and read here with suspicion.

A file is 8 bytes (the header's length n, little-endian), n bytes of JSON, then the tensors without gaps. The JSON maps
each name to its dtype, shape and [begin, end) in what follows it. Source: the format's description in the README of
github.com/huggingface/safetensors.

Who loads weights trusts these numbers, so a reader of ours checks every one of them before any library sees the file.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.names import is_safe_name, shown
from toolkit.checkpoint.plain_file import open_plain

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library has it."""
_METADATA = "__metadata__"


class HeaderError(ValueError):
    """A header that cannot be what a writer of tensors left."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What is known of a tensor before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorSpec":
        """The spec of a tensor that is there."""
        return cls(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def encode_header(specs: Sequence[TensorSpec]) -> bytes:
    """Length and JSON, for tensors that follow in this order."""
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.nbytes
        entries[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise HeaderError(f"a header of {len(text)} bytes, which the safetensors library would refuse")
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path, *, follow: bool = False) -> dict[str, TensorSpec]:
    """The tensors of a file, in its order. Raises HeaderError for what no writer leaves, OSError as files do."""
    with open_plain(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise HeaderError(f"{size} bytes are too few for a header")
        length = int.from_bytes(prefix, "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise HeaderError(f"the header claims {length} bytes of a file of {size}")
        text = file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_no_duplicates)
    except HeaderError:
        raise
    except (ValueError, RecursionError):
        raise HeaderError("the header is not JSON") from None
    if not isinstance(entries, dict):
        raise HeaderError("the header is not a JSON object")
    _check_metadata(entries.pop(_METADATA, {}))
    read = [_entry(name, entry) for name, entry in entries.items()]
    _check_offsets([(begin, end, spec.name) for spec, begin, end in read], size - 8 - length)
    return {spec.name: spec for spec, _, _ in read}


def _no_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise HeaderError(f"the header names {shown(key)} twice")
        found[key] = value
    return found


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("the header's metadata is not text")


def _entry(name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    if not is_safe_name(name):
        raise HeaderError(f"{shown(name)} is no name for a tensor")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{name} lacks a dtype, a shape or offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise HeaderError(f"{name} has the dtype {shown(entry['dtype'])}, which is not known")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise HeaderError(f"{name} has a shape or offsets that are not counts")
    spec = TensorSpec(name=name, shape=tuple(shape), dtype=dtype)
    if offsets[1] - offsets[0] != spec.nbytes:
        raise HeaderError(f"{name} needs {spec.nbytes} bytes, but its offsets are {offsets[0]} to {offsets[1]}")
    return spec, offsets[0], offsets[1]


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 64
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def _check_offsets(places: list[tuple[int, int, str]], data_bytes: int) -> None:
    expected = 0
    for begin, end, name in sorted(places):
        if begin != expected:
            raise HeaderError(f"{name} begins at {begin}, where {expected} is due: tensors overlap or leave a gap")
        expected = end
    if expected != data_bytes:
        raise HeaderError(f"the tensors need {expected} bytes, the file has {data_bytes}")
