"""What is checked before the ranks meet: the DeepSpeed config, the model's config, the tokenizer, the trackers."""

from typing import Any

import torch
from transformers import PretrainedConfig

from toolkit.batch import Batch
from toolkit.dsconfig import Device, build, merge_user_config, read_user_config
from toolkit.errors import ConfigError, DataError, ModelError, RecipeError
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.recipe_file import cut_problems
from toolkit.shape import ModelShape
from toolkit.train.data.tokens import TokenCorpus
from toolkit.train.engines.factory import check_precision
from toolkit.train.isolation import check_isolation
from toolkit.train.model import load_config
from toolkit.train.optimizer import learning_rate
from toolkit.train.trackers import Trackers


def check_model(recipe: Recipe, device: torch.device, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config.

    Raises a ToolkitError for a model, sequence length, packing, precision or tracker that cannot be.
    """
    config = load_config(recipe.model, trust_remote_code=trust_remote_code)
    uncuttable = cut_problems(recipe, config.to_dict(), find_shape(config))
    if uncuttable:
        raise RecipeError(uncuttable)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and recipe.data.seq_len > positions:
        raise ModelError(
            f"data.seq_len={recipe.data.seq_len}: {recipe.model.name_or_path} has {positions} positions. "
            f"Set data.seq_len to {positions} or less."
        )
    if recipe.data.packing == "isolated":
        check_isolation(recipe.model, config, trust_remote_code=trust_remote_code)
    check_precision(recipe, device)
    try:
        learning_rate(recipe)
    except ValueError as error:
        raise RecipeError(f"schedule.name={recipe.schedule.name}: {str(error).splitlines()[0]}") from error
    Trackers.check(recipe)
    return config


def deepspeed_config(
    recipe: Recipe,
    layout: Layout,
    batch: Batch,
    config: PretrainedConfig,
    device: torch.device,
    user_config: str | None = None,
) -> dict[str, Any] | None:
    """The config for DeepSpeed, with a user's JSON laid over it; None for other engines.

    Raises ConfigError with every conflict between the JSON and the recipe.
    """
    if recipe.train.engine != "deepspeed":
        if user_config is not None:
            raise ConfigError(
                f"{user_config}: train.engine={recipe.train.engine} takes no DeepSpeed config. "
                "Leave it out, or set train.engine=deepspeed."
            )
        return None
    kind: Device = "cuda" if device.type == "cuda" else "cpu"
    built = build(recipe, layout, batch, hidden_size=config.get_text_config().hidden_size, device=kind)
    if user_config is None:
        return built
    return merge_user_config(built, read_user_config(user_config), name=user_config)


def check_vocabulary(recipe: Recipe, config: PretrainedConfig, corpus: TokenCorpus) -> None:
    """Raise DataError where the tokenizer has ids for which the model has no embedding."""
    vocabulary = config.get_text_config().vocab_size
    if corpus.tokenizer_vocab_size > vocabulary:
        raise DataError(
            f"data.tokenizer={recipe.data.tokenizer}: its ids go up to {corpus.tokenizer_vocab_size - 1}, but the "
            f"model has a vocabulary of {vocabulary}. "
            f"Choose another tokenizer, or set model.overrides.vocab_size={corpus.tokenizer_vocab_size}."
        )


def find_shape(config: PretrainedConfig) -> ModelShape | None:
    """The shape of a model of a known family; None for others, of which no FLOPs are known."""
    try:
        return ModelShape.from_config(config.to_dict())
    except ModelError:
        return None
