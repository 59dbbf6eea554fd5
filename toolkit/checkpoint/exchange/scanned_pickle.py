"""PyTorch's .pt files are pickles, and a pickle can run any program. This reads those that hold plain data only.

Before anything is unpickled, the names that the pickle asks for are listed. Only tensors, containers of Python and
four classes of DeepSpeed pass, and of those four it is not DeepSpeed's code that is run: they become empty shells that
keep their fields. Everything else is refused by name. PyTorch's restricted unpickler does the reading.
"""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.names import shown
from toolkit.checkpoint.plain_file import open_plain
from toolkit.errors import CheckpointError


class FragmentAddress:
    """Where a parameter's part lies in a rank's flat partition: `start` and `numel`."""

    start: int
    numel: int


class LossScaler:
    """The fp16 loss scaler's fields."""

    cur_scale: float


class DynamicLossScaler(LossScaler):
    """The same, where it changes."""


class ZeroStage(int):
    """The number that DeepSpeed's enumeration stands for."""


_SHELLS: list[Any] = [
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
_ALLOWED = {name for _, name in _SHELLS}


def read_scanned(path: Path) -> Any:
    """What a .pt file holds. Its tensors lie in the file until they are read. Raises CheckpointError."""
    given = shown(str(path))
    try:
        with open_plain(path) as file:
            is_archive = zipfile.is_zipfile(file)
    except OSError as error:
        raise CheckpointError(f"{given}: cannot be read ({shown(error.strerror or str(error))}).", path=given) from None
    if not is_archive:
        raise CheckpointError(
            f"{given}: not a file that torch.save has left since PyTorch 1.6, or cut short. Take a whole one.",
            path=given,
        )
    try:
        foreign = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - _ALLOWED)
        if foreign:
            raise CheckpointError(
                f"{given}: its pickle asks for {shown(foreign[0])}, which could run anything. It is not read; save the "
                "checkpoint again without it.",
                path=given,
            )
        with torch.serialization.safe_globals(_SHELLS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{given}: cannot be read ({shown(first)}). Is it whole, and a file of DeepSpeed's?", path=given
        ) from None
