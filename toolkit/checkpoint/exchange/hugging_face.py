"""A Hugging Face directory of somebody else: its safetensors, looked at before they are trusted."""

from pathlib import Path

import torch

from toolkit.checkpoint.exchange.new_directory import Weights
from toolkit.checkpoint.names import INDEX, MODEL, SINGLE, shown
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.errors import CheckpointError

_PICKLED = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")


def open_hugging_face(folder: Path) -> Weights:
    """The weights of a directory, as they are stored. Raises CheckpointError where they are not safetensors."""
    given = shown(str(folder))
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        pickled = next((path.name for pattern in _PICKLED for path in sorted(folder.glob(pattern))), None)
        if pickled is not None:
            raise CheckpointError(
                f"{given}: its weights are pickled ({shown(pickled)}), and a pickle can run anything. Where you trust "
                "it, load it with transformers and call save_pretrained; then import what that wrote."
            )
        raise CheckpointError(
            f"{given}: neither safetensors nor a checkpoint of DeepSpeed lie there. Name a directory in Hugging Face "
            "format, a checkpoint of DeepSpeed, or a .gguf file."
        )
    saved = CheckpointReader(folder)

    def read(name: str) -> torch.Tensor:
        return saved.tensor(MODEL, name).clone()

    return Weights(specs=list(saved.specs[MODEL].values()), read=read)
