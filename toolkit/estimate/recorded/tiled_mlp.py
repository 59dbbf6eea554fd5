"""Tiled MLPs: the recording of the model with narrow MLPs, and what a tile takes at its worst moment."""

import json

from toolkit.models.families.spec import SPELLINGS
from toolkit.models.shape import ModelShape


def narrow(config: str, width: int) -> str:
    """The config, as recordings know it, with MLPs of this width: tiled ones keep next to nothing."""
    fields = json.loads(config)
    return json.dumps(fields | {name: width for name in SPELLINGS["ffn"] if name in fields}, sort_keys=True)


def tile_bytes(shape: ModelShape, tokens: int, itemsize: int, *, tp: int) -> int:
    """Bytes of a tile at its worst moment, in the backward pass.

    Of some h tokens (toolkit/model_init/tiled_mlp.py) a gated MLP has four tensors as wide as itself and the gradients
    of three of them, a plain one two and two. Beside them are gradients of the weights: of one tile, and their fp32
    sums. Known error: an activation function in Python, as gelu_new, makes more.
    """
    tiles = -(-tokens // shape.hidden)
    wide, matrices = (7, 3) if shape.gated else (4, 2)
    weights = matrices * shape.hidden * shape.ffn // tp
    return itemsize * wide * -(-tokens // tiles) * shape.ffn // tp + weights * (4 + itemsize)
