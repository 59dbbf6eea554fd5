"""Reading PyTorch's distributed checkpoint format (DCP), a tensor or a part of one at a time, without its loader.

A directory has one index, `.metadata`, and `.distcp` files. The index is a pickle: for each key the shape of the full
tensor and the boxes (offsets, sizes) that it was cut into, and for each box the file, offset and length of its bytes,
which are an archive of `torch.save`. Source: torch/distributed/checkpoint/{metadata,filesystem}.py of PyTorch 2.13.

The index is decoded with stand-ins for the few classes that it may name, and each archive with `weights_only`, so that
nothing in either can run. A tensor is filled box by box: in memory are the result and one box, never a whole file.
"""

import io
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from toolkit.checkpoint.names import checkpoint_error, is_safe_name, is_safe_path
from toolkit.convert.archive_checks import DamagedArchiveError, check_records
from toolkit.errors import CheckpointError
from toolkit.files import open_regular, printable, read_regular, reason_of

INDEX = ".metadata"
_MOST_INDEX_BYTES = 2**31
_METADATA = "torch.distributed.checkpoint.metadata"
_MOST_DIMS = 16


class _Record:
    """A stand-in for a class of the index: its fields, and nothing that runs."""

    def __init__(self, *positional: Any) -> None:
        self.positional = positional

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            self.__dict__.update(state)
        else:
            self.positional = tuple(state) if isinstance(state, tuple | list) else (state,)


class _Metadata(_Record):
    pass


class _Tensor(_Record):
    pass


class _Object(_Record):
    pass


class _Box(_Record):
    pass


class _Place(_Record):
    """The key of a box or of an object, and the offset of the box."""

    def __hash__(self) -> int:
        return id(self)


class _Bytes(_Record):
    """File, offset and length of what stands at a place."""


def _size(values: Sequence[int] = ()) -> tuple[int, ...]:
    return tuple(values)


_CLASSES: dict[str, Any] = {
    f"{_METADATA}.Metadata": _Metadata,
    f"{_METADATA}.TensorStorageMetadata": _Tensor,
    f"{_METADATA}.BytesStorageMetadata": _Object,
    f"{_METADATA}.ChunkStorageMetadata": _Box,
    f"{_METADATA}.MetadataIndex": _Place,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _Bytes,
    "torch.Size": _size,
    "torch.serialization._get_layout": _Record,
    "collections.OrderedDict": dict,
    "pathlib.PosixPath": _Record,
    "pathlib._local.PosixPath": _Record,
}
"""The classes of an index that are read, and others that it may name."""
_SKIPPED = ("torch.distributed.", "megatron.")
"""Packages whose other classes are read as records that nobody looks at: plans, for instance."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        qualified = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if qualified in _CLASSES:
            return _CLASSES[qualified]
        if qualified.startswith(_SKIPPED):
            return _Record
        raise pickle.UnpicklingError(f"it asks for {qualified}, which could run anything")


@dataclass(frozen=True, kw_only=True)
class _StoredBox:
    """A part of a tensor, and where its archive is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class DistributedTensor:
    """A full tensor of the checkpoint: its shape, its dtype and its boxes, which cover it without overlapping."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[_StoredBox, ...]


class DistributedCheckpoint:
    """An index that was read and checked against its files. `tensors` and `objects`: by key.

    `observe` is called with the bytes of each archive that is read, which is what a read adds to the memory of its
    result. Raises CheckpointError where the index or a file is damaged, incomplete, or of another format.
    """

    def __init__(self, directory: Path, *, observe: Callable[[int], None] = lambda nbytes: None) -> None:
        self.directory = directory
        self._observe = observe
        try:
            content = read_regular(directory / INDEX, max_bytes=_MOST_INDEX_BYTES)
        except OSError as error:
            raise checkpoint_error(directory / INDEX, f"cannot be read ({reason_of(error)}).") from None
        try:
            index = _IndexUnpickler(io.BytesIO(content)).load()
            self.tensors, self._places = _decode(index)
        except _IndexError as error:
            raise checkpoint_error(directory / INDEX, f"{error}. Choose a complete checkpoint.") from None
        except pickle.UnpicklingError as error:
            message = f"not an index of torch.distributed.checkpoint ({printable(str(error))}). It is not read."
            raise checkpoint_error(directory / INDEX, message) from None
        except Exception as error:  # a damaged pickle can make the unpickler raise anything
            message = f"not an index of torch.distributed.checkpoint, or damaged ({type(error).__name__})."
            raise checkpoint_error(directory / INDEX, f"{message} Choose a complete checkpoint.") from None
        self.objects = tuple(self._places)
        self._check_files()

    def _check_files(self) -> None:
        """Raise CheckpointError where a file is missing, or ends before its last archive."""
        ends: dict[str, int] = {}
        for box in self._all():
            ends[box.file] = max(ends.get(box.file, 0), box.begin + box.nbytes)
        for file, end in ends.items():
            try:
                size = os.stat(self.directory / file, follow_symlinks=False).st_size
            except OSError:
                raise checkpoint_error(
                    self.directory, f"{printable(file)}, which {INDEX} names, is missing. Copy all files of the step."
                ) from None
            if size < end:
                problem = f"{printable(file)} has {size} bytes, and {INDEX} names {end}"
                raise checkpoint_error(self.directory, f"{problem}: it is truncated. Copy it again.")

    def _all(self) -> Iterator[_StoredBox]:
        yield from self._places.values()
        for tensor in self.tensors.values():
            yield from tensor.boxes

    def read(self, key: str, index: tuple[int, ...] = ()) -> torch.Tensor:
        """A full tensor, or the part of it at `index` of its first dimensions. Raises CheckpointError."""
        if key not in self.tensors:
            raise checkpoint_error(self.directory, f"it has no {printable(key)}. Choose a complete checkpoint.")
        tensor = self.tensors[key]
        lead = len(index)
        if lead > len(tensor.shape) or any(i >= size for i, size in zip(index, tensor.shape, strict=False)):
            raise checkpoint_error(self.directory, f"{key} {list(tensor.shape)} has no part {list(index)}.")
        out = torch.empty(tensor.shape[lead:], dtype=tensor.dtype)
        for box in tensor.boxes:
            leading = zip(index, box.offsets, box.sizes, strict=False)
            if not all(begin <= i < begin + size for i, begin, size in leading):
                continue
            values = self._box(key, box, tensor.dtype)
            inside = values[tuple(i - begin for i, begin in zip(index, box.offsets, strict=False))]
            target = out
            for dim, (begin, size) in enumerate(zip(box.offsets[lead:], box.sizes[lead:], strict=True)):
                target = target.narrow(dim, begin, size)
            target.copy_(inside)
        return out

    def drop_prefix(self, prefix: re.Pattern[str]) -> None:
        """Read all keys without what matches at their beginning. Raises CheckpointError where two become the same."""
        tensors: dict[str, DistributedTensor] = {}
        for key, tensor in self.tensors.items():
            name = prefix.sub("", key, count=1) if prefix.match(key) else key
            if name in tensors:
                raise checkpoint_error(self.directory, f"it has {printable(name)} twice. Choose a complete checkpoint.")
            tensors[name] = tensor
        self.tensors = tensors

    def object(self, key: str) -> Any:
        """A value that is no tensor, decoded without running anything. Raises CheckpointError."""
        return self._load(key, self._places[key])

    def _box(self, key: str, box: _StoredBox, dtype: torch.dtype) -> torch.Tensor:
        values = self._load(key, box)
        if not isinstance(values, torch.Tensor) or values.layout != torch.strided or values.dtype != dtype:
            raise checkpoint_error(self.directory / box.file, f"{key} is not the tensor that {INDEX} says. {_DAMAGED}")
        if tuple(values.shape) != box.sizes:
            shapes = f"{list(values.shape)}, where {INDEX} says {list(box.sizes)}"
            raise checkpoint_error(self.directory / box.file, f"a part of {key} is {shapes}. {_DAMAGED}")
        return values.detach()

    def _load(self, key: str, box: _StoredBox) -> Any:
        path = self.directory / box.file
        self._observe(box.nbytes)
        try:
            with open_regular(path) as file:
                archive = _Part(file, box.begin, box.nbytes)
                if archive.read(len(_ARCHIVE)) != _ARCHIVE:
                    raise ValueError("not an archive of torch.save")
                check_records(cast(IO[bytes], archive))
                archive.seek(0)
                return torch.load(cast(IO[bytes], archive), map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except DamagedArchiveError as error:
            problem = f"{printable(key)} is damaged there: {error}"
            raise checkpoint_error(path, f"{problem}. Copy it again.") from None
        except pickle.UnpicklingError as error:
            problem = f"{printable(key)} contains more than tensors and numbers ({_first_line(error)})"
            raise checkpoint_error(path, f"{problem}. It is not read.") from None
        except Exception as error:  # a damaged archive can make the reader raise anything
            message = f"{printable(key)} cannot be read ({_first_line(error)}). {_DAMAGED}"
            raise checkpoint_error(path, message) from None


_ARCHIVE = b"PK\x03\x04"
"""How an archive of torch.save begins."""
_DAMAGED = "It is damaged: copy it again."


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return printable(lines[0][:200])


class _Part(io.RawIOBase):
    """The bytes [begin, begin + nbytes) of a file, as a file of its own: torch.load reads tensors straight from it."""

    def __init__(self, file: Any, begin: int, nbytes: int) -> None:
        super().__init__()
        self._file = file
        self._begin = begin
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._nbytes - self._at))
        self._file.seek(self._begin + self._at)
        read = int(self._file.readinto(view[:count]) or 0)
        self._at += read
        return read


class _IndexError(ValueError):
    """An index whose content is inconsistent."""


def _decode(index: Any) -> tuple[dict[str, DistributedTensor], dict[str, _StoredBox]]:
    if not isinstance(index, _Metadata):
        raise _IndexError("it is not an index of torch.distributed.checkpoint")
    state = _mapping(getattr(index, "state_dict_metadata", None))
    storage = _mapping(getattr(index, "storage_data", None))
    places: dict[tuple[str, tuple[int, ...] | None], _Bytes] = {}
    for place, stored in storage.items():
        fqn = getattr(place, "fqn", None)
        if not isinstance(place, _Place) or not isinstance(stored, _Bytes) or not is_safe_name(fqn):
            raise _IndexError("its storage_data is not as PyTorch writes it")
        if getattr(stored, "transform_descriptors", None):
            raise _IndexError(f"{fqn} is compressed, which is not supported")
        places[str(fqn), getattr(place, "offset", None)] = stored
    tensors: dict[str, DistributedTensor] = {}
    objects: dict[str, _StoredBox] = {}
    for key, entry in state.items():
        if not is_safe_name(key):
            raise _IndexError("a key cannot be printed")
        if isinstance(entry, _Tensor):
            tensors[key] = _tensor(key, entry, places)
        elif isinstance(entry, _Object):
            objects[key] = _stored(key, places.get((key, None)), (), ())
        else:
            raise _IndexError(f"{key} is neither a tensor nor an object")
    return tensors, objects


def _tensor(key: str, entry: _Tensor, places: Mapping[tuple[str, tuple[int, ...] | None], _Bytes]) -> DistributedTensor:
    shape = _counts(key, getattr(entry, "size", None))
    dtype = next(iter(getattr(getattr(entry, "properties", None), "positional", ())), None)
    if not isinstance(dtype, torch.dtype):
        raise _IndexError(f"{key} has no dtype")
    boxes: list[_StoredBox] = []
    chunks = getattr(entry, "chunks", None)
    if not isinstance(chunks, list):
        raise _IndexError(f"{key} has no parts")
    for chunk in chunks:
        offsets = _counts(key, getattr(chunk, "offsets", None))
        sizes = _counts(key, getattr(chunk, "sizes", None))
        is_inside = len(offsets) == len(sizes) == len(shape) and all(
            begin + size <= full for begin, size, full in zip(offsets, sizes, shape, strict=True)
        )
        if not is_inside:
            raise _IndexError(f"a part of {key} is outside of {list(shape)}")
        if math.prod(sizes):
            boxes.append(_stored(key, places.get((key, offsets)), offsets, sizes))
    covered = sum(math.prod(box.sizes) for box in boxes)
    if covered != math.prod(shape) or _overlap(boxes):
        raise _IndexError(f"the parts of {key} have {covered} values, and {list(shape)} has {math.prod(shape)}")
    return DistributedTensor(shape=shape, dtype=dtype, boxes=tuple(boxes))


def _overlap(boxes: Sequence[_StoredBox]) -> bool:
    """Whether two boxes share a value. Boxes are cut along one or two dimensions, so most differ in the first."""
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            pairs = zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            if all(a < b + length_b and b < a + length_a for a, length_a, b, length_b in pairs):
                return True
    return False


def _stored(key: str, stored: _Bytes | None, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> _StoredBox:
    file = getattr(stored, "relative_path", None)
    begin = getattr(stored, "offset", None)
    nbytes = getattr(stored, "length", None)
    if not isinstance(file, str) or not is_safe_path(file):
        raise _IndexError(
            f"no file is named for a part of {key}" if stored is None else f"{key} is in a file elsewhere"
        )
    if type(begin) is not int or type(nbytes) is not int or min(begin, nbytes) < 0:
        raise _IndexError(f"it does not say where {key} is")
    return _StoredBox(offsets=offsets, sizes=sizes, file=file, begin=begin, nbytes=nbytes)


def _counts(key: str, values: Any) -> tuple[int, ...]:
    is_valid = isinstance(values, tuple) and len(values) <= _MOST_DIMS
    if not is_valid or not all(type(value) is int and 0 <= value < 2**48 for value in values):
        raise _IndexError(f"{key} has no shape")
    return tuple(values)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _IndexError("it lists no tensors")
    return value
