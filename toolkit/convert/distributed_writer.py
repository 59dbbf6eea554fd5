"""Writing PyTorch's distributed checkpoint format: boxes of tensors, each computed when it is written.

PyTorch's own planner takes a state dict, that is a whole model in memory. Here the plan is made from shapes, and
`resolve_data` computes a box when its turn comes.
"""

import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
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
    """Write boxes and plain objects into a directory. Raises OSError."""
    with _silent():
        save(
            {},
            storage_writer=FileSystemWriter(directory, single_file_per_rank=True, thread_count=1),
            planner=_Planner(boxes, objects),
            no_dist=True,
        )


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
