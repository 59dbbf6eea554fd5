"""A model directory in Hugging Face format, written parameter by parameter and visible only when it is whole.

Rank 0 writes; it holds at most one shard file's worth of tensors, never the whole model.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

MAX_SHARD_BYTES = 5_000_000_000


def write_model(
    directory: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    is_writer: bool,
    beside: Callable[[Path], None] = lambda folder: None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `tensors` as safetensors under `directory`, replacing what is there at the very end.

    Every rank iterates over `tensors` (gathering them may be collective); only the writer touches the disk. `beside`
    adds files (config, tokenizer) to the folder before it becomes visible.
    """
    if not is_writer:
        for _ in tensors:
            pass
        return
    with _replacing(directory) as folder:
        _write_shards(folder, tensors, max_shard_bytes)
        beside(folder)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    total_bytes = 0
    for shard in _shards(tensors, max_shard_bytes):
        part = folder / f"part-{len(shards)}"
        save_file(shard, part, metadata={"format": "pt"})
        part.chmod(_file_mode())  # safetensors makes files that only their owner may read
        shards.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        (folder / f"part-{i}").rename(folder / name)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {tensor: names[i] for i, shard in enumerate(shards) for tensor in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > max_bytes:
            yield shard
            shard, held = {}, 0
        # A copy: the caller may free or reuse the gathered parameter when we ask for the next one.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += tensor.nbytes
    if shard:
        yield shard


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """A folder that takes the place of `directory` when the block ends well, and leaves nothing when it does not."""
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed and had our number
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        _sync(temporary)
        if directory.exists():
            retired = directory.with_name(f".{directory.name}.{os.getpid()}.old")
            directory.rename(retired)
            temporary.rename(directory)
            shutil.rmtree(retired)
        else:
            temporary.rename(directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _file_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
