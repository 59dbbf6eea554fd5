"""The header of a safetensors file: encoding it, and reading it without trusting it.

A file is 8 bytes (the header's length n, little-endian), n bytes of JSON, then the tensors without gaps. The JSON maps
each name to its dtype, shape and [begin, end) in what follows it. Source: the format's description in the README of
github.com/huggingface/safetensors.

Libraries that load weights trust these numbers, so all of them are checked before any library opens the file.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.names import is_count, is_safe_name
from toolkit.files import decode_json_object, open_regular, printable, unique_keys

# fmt: off
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}
# fmt: on
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_METADATA = "__metadata__"


class HeaderError(ValueError):
    """A header that is not valid."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, shape and dtype of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorSpec":
        return cls(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def encode_header(specs: Sequence[TensorSpec]) -> bytes:
    """Encode length and JSON for tensors that follow in this order. Raises HeaderError where it would be too long."""
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for spec in specs:
        begin = end
        end += spec.nbytes
        entries[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise HeaderError(f"a header of {len(text)} bytes, which the safetensors library would reject")
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path, *, follow: bool = False) -> dict[str, TensorSpec]:
    """The tensors of a file, in its order. Raises HeaderError for an invalid header, OSError for an unreadable file."""
    return {name: spec for name, (spec, _) in read_offsets(path, follow=follow).items()}


def read_offsets(path: Path, *, follow: bool = False) -> dict[str, tuple[TensorSpec, int]]:
    """The tensors of a file, in its order, each with where its values begin. Raises as `read_header` does."""
    with open_regular(path, follow=follow) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        prefix = file.read(8)
        if len(prefix) < 8:
            raise HeaderError(f"{size} bytes are too few for a header")
        length = int.from_bytes(prefix, "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise HeaderError(f"the header claims {length} bytes of a file of {size}")
        text = file.read(length)
    try:
        entries = decode_json_object(text, object_pairs_hook=unique_keys)
    except ValueError as error:
        raise HeaderError(f"the header is not a table of tensors: {error}") from None
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("the header's metadata is not text")
    read = [_entry(name, entry) for name, entry in entries.items()]
    expected = 0
    data_bytes = size - 8 - length
    for begin, end, name in sorted((begin, end, spec.name) for spec, begin, end in read):
        if begin != expected:
            raise HeaderError(f"{name} begins at {begin}, where {expected} is expected: tensors overlap or leave a gap")
        expected = end
    if expected != data_bytes:
        raise HeaderError(f"the tensors need {expected} bytes, the file has {data_bytes}")
    return {spec.name: (spec, 8 + length + begin) for spec, begin, _ in read}


def _entry(name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    if not is_safe_name(name):
        raise HeaderError(f"{printable(name)} is not a valid tensor name")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{name} lacks a dtype, a shape or offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise HeaderError(f"{name} has the dtype {printable(entry['dtype'])}, which is unknown")
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise HeaderError(f"{name} has a shape or offsets that are not non-negative integers")
    spec = TensorSpec(name=name, shape=tuple(shape), dtype=dtype)
    if offsets[1] - offsets[0] != spec.nbytes:
        raise HeaderError(f"{name} needs {spec.nbytes} bytes, but its offsets are {offsets[0]} to {offsets[1]}")
    return spec, offsets[0], offsets[1]


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and len(values) <= 64 and all(map(is_count, values))
