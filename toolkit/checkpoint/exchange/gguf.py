"""GGUF, the format of llama.cpp, for the families whose GGUF transformers reads. Quantized weights become fp32.

transformers dequantizes the whole model at once, so it has to fit into memory.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.exchange.new_directory import Weights
from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.names import shown
from toolkit.checkpoint.plain_file import open_plain
from toolkit.errors import CheckpointError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """The weights of a file in fp32, its config, and what writes its tokenizer into a folder."""

    weights: Weights
    config: dict[str, Any]
    write_tokenizer: Callable[[Path], None]


def open_gguf(path: Path) -> GgufModel:
    """Read a file. Raises CheckpointError where it is none, or transformers cannot read it."""
    given = shown(str(path))
    try:
        with open_plain(path, follow=True) as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{given}: cannot be read ({shown(error.strerror or str(error))}).") from None
    if magic != _MAGIC:
        raise CheckpointError(f"{given}: not a GGUF file, for it does not begin with GGUF. Name another file.")
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(f"{given}: reading GGUF needs the package gguf. Install it: pip install 'gguf>=0.19'.")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # whatever a file that lies makes of the readers
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{given}: transformers cannot read it ({shown(first)}).") from error
    # The weights are not quantized any more, and where they come from is nobody's business.
    hidden = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in hidden}
    config |= {"architectures": [type(model).__name__], "model_type": model.config.model_type}
    values = dict(model.named_parameters())

    def write_tokenizer(folder: Path) -> None:
        tokenizer.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)

    return GgufModel(
        weights=Weights(
            specs=[TensorSpec.of(name, value) for name, value in values.items()],
            read=lambda name: values[name].detach(),
        ),
        config=config,
        write_tokenizer=write_tokenizer,
    )
