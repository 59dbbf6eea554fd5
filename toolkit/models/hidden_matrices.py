"""Parameters that Muon updates: the weight matrices of the decoder layers, told by name and shape alone."""

import re
from collections.abc import Sequence

_INSIDE_A_LAYER = re.compile(r"\.\d+\.")


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter of the full model, by its Hugging Face name, is a weight matrix of a decoder layer.

    A stack of experts counts, as one matrix for each. Embeddings and the LM head do not, as they are in no layer; nor
    do norms, biases (of a stack of experts those have two dimensions), convolutions over single channels, and what
    has one row or one column.
    """
    return _INSIDE_A_LAYER.search(name) is not None and is_matrix(name, shape)


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter of a decoder layer is a weight matrix, or a stack of them, by its name and shape."""
    if min(shape[-2:], default=0) <= 1:
        return False
    return name.endswith("weight") if len(shape) == 2 else len(shape) == 3 and not name.endswith("bias")
