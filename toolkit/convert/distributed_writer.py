"""Writing PyTorch's distributed checkpoint format: boxes of tensors, each computed when it is written.

PyTorch's own planner takes a state dict, that is a whole model in memory. Here the plan is made from shapes, and
`resolve_data` computes a box when its turn comes. PyTorch's own writer keeps all tensors of a file until its end (2.13,
`_write_files_from_queue`), so a file is written here, with no more than one box in memory.
"""

import io
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override


@dataclass(frozen=True, kw_only=True)
class Box:
    """One box of a tensor of shape `shape`: that at `index` of its first dimensions. `value` computes it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Callable[[], torch.Tensor]
    index: tuple[int, ...] = ()

    @property
    def offsets(self) -> torch.Size:
        return torch.Size([*self.index, *(0 for _ in self.shape[len(self.index) :])])

    @property
    def sizes(self) -> torch.Size:
        return torch.Size([*(1 for _ in self.index), *self.shape[len(self.index) :]])


def write_distributed(directory: Path, boxes: Sequence[Box], objects: Mapping[str, Any]) -> None:
    """Write boxes and plain objects into a directory. Raises OSError, and what a box raises as it is computed."""
    try:
        with _silent():
            save(
                {},
                storage_writer=_Writer(directory),
                planner=_Planner(boxes, objects),
                no_dist=True,
            )
    except CheckpointException as error:  # which PyTorch makes of all that is raised, an interrupt too
        ((cause, _),) = error.failures.values()
        raise cause from None


class _Writer(FileSystemWriter):
    """Writes all items into one file, one after the other."""

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        with self.fs.create_stream(self.fs.concat_path(self.path, file), "wb") as stream:
            results = [_write_item(cast(IO[bytes], stream), file, item, planner) for item in plan.items]
            stream.flush()
            os.fsync(stream.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _write_item(stream: IO[bytes], file: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    begin = stream.tell()
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
    else:
        # All of a tensor's storage is saved: here it is that of its values alone.
        torch.save(data if data.untyped_storage().nbytes() == data.nbytes else data.clone(), stream)
    nbytes = stream.tell() - begin
    place = _StorageInfo(file, begin, nbytes)
    return WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=place)


class _Planner(DefaultSavePlanner):
    def __init__(self, boxes: Sequence[Box], objects: Mapping[str, Any]) -> None:
        super().__init__()
        self._boxes = {(box.key, box.offsets): box for box in boxes}
        self._objects = dict(objects)

    @override
    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._objects]
        for box in self._boxes.values():
            items.append(
                WriteItem(
                    index=MetadataIndex(box.key, box.offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=box.offsets, sizes=box.sizes),
                        properties=TensorProperties(dtype=box.dtype),
                        size=torch.Size(box.shape),
                    ),
                )
            )
        # Each key leads to itself: nothing was nested.
        self.plan = SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})
        return self.plan

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save(self._objects[index.fqn], content)
            return content
        assert index.offset is not None
        box = self._boxes[index.fqn, index.offset]
        return box.value().reshape(box.sizes).contiguous()


@contextmanager
def _silent() -> Any:
    """Suppress PyTorch's remark that there are no other processes."""
    logger = logging.getLogger("torch.distributed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
