"""The tokens of a new model: all of them train, as no token is padding."""

from contextlib import suppress

from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

_NO_TOKEN = -1
"""An id that no token has."""


def without_padding_token(config: PretrainedConfig) -> PretrainedConfig:
    """Set a config's padding token to none and return the config; ModernBERT's insists on one and keeps it."""
    with suppress(StrictDataclassFieldValidationError):
        config.pad_token_id = None
    return config


def train_every_token(model: PreTrainedModel) -> None:
    """Let a new model have no padding token: whichever token has its id would never learn, and be numbered wrongly.

    torch masks the gradient of its embedding. RoBERTa and its kin number a sample's positions from its id on, and XLM
    finds lengths by it: they are given an id that no token has, so that positions begin with 0.
    """
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and hasattr(module, "position_embeddings"):
            module.padding_idx = _NO_TOKEN
        elif isinstance(module, nn.Embedding):
            module.padding_idx = None
        if hasattr(module, "pad_index"):
            module.pad_index = _NO_TOKEN
