"""Checks before the ranks meet: the DeepSpeed config, the model's config, the tokenizer, the trackers."""

from typing import Any

import torch
from transformers import PretrainedConfig

from toolkit.config import parallelism_conflicts
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.tokens.corpora import Corpora
from toolkit.dsconfig import Device, build, merge_user_config, read_user_config
from toolkit.engines.factory import check_precision
from toolkit.engines.optimizer import learning_rate
from toolkit.engines.optimizer_states import state_kinds
from toolkit.engines.optimizers.adamw8bit import adamw8bit
from toolkit.engines.routing import check_routing
from toolkit.errors import ConfigError, DataError, ModelError, RecipeError, RunError
from toolkit.files import expanded, reason_of
from toolkit.launch.rank_environment import RankEnvironment
from toolkit.model_init.build_model import check_trained, load_config
from toolkit.model_init.document_masking import check_document_masking
from toolkit.model_init.float8 import check_float8
from toolkit.model_init.four_bit import check_four_bit
from toolkit.model_init.liger import check_liger
from toolkit.model_init.recompute import check_recompute
from toolkit.models.shape import ModelShape
from toolkit.models.weights import held_layer_parameters
from toolkit.parallel.tensor.parallelize import check_plan
from toolkit.training.trackers import Trackers


def check_model(recipe: Recipe, device: torch.device, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config.

    Raises a ToolkitError for a model, sequence length, packing, precision or tracker that cannot be.
    """
    config = load_config(recipe.model, trust_remote_code=trust_remote_code)
    conflicts = parallelism_conflicts(recipe, config.to_dict(), find_shape(config))
    if conflicts:
        raise RecipeError(conflicts)
    if recipe.parallel.tp > 1:
        check_plan(config, recipe.parallel.tp, sequence_parallel=recipe.parallel.sequence_parallel)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and recipe.data.seq_len > positions:
        remedy = (("data.seq_len", f"{positions} or less"),)
        reason = f"the model has {positions} positions"
        raise ModelError(recipe.conflict("data.seq_len", "model.name_or_path", reason=reason, remedy=remedy))
    if recipe.data.masks_documents:
        check_document_masking(recipe.model, config, masking=recipe.data.masking, trust_remote_code=trust_remote_code)
    if recipe.model.load_in_4bit:
        check_four_bit(device)
    if recipe.model.float8 is not None:
        check_float8(recipe.model.float8, device)
    if recipe.optimizer.name == "adamw8bit":
        adamw8bit()
    if recipe.model.kernels == "liger":
        check_liger(device)
    check_recompute(recipe.parallel.recompute, config)
    check_trained(recipe, config)
    check_routing(recipe, config)
    check_precision(recipe, device)
    try:
        learning_rate(recipe)
    except ValueError as error:
        raise RecipeError.of("schedule.name", recipe.schedule.name, reason_of(error)) from error
    Trackers.check(recipe)
    return config


def deepspeed_config(
    job: Job, config: PretrainedConfig, device: torch.device, user_config: str | None = None
) -> dict[str, Any] | None:
    """The config for DeepSpeed, with a user's JSON laid over it; None for other engines.

    Raises ConfigError with every conflict between the JSON and the recipe.
    """
    recipe = job.recipe
    if recipe.train.engine != "deepspeed":
        if user_config is not None:
            reason = f"it takes no DeepSpeed config, and {user_config} is given"
            remedy = ("train.engine", "deepspeed")
            raise ConfigError.of("train.engine", recipe.train.engine, reason, "leave the file out", remedy)
        return None
    kind: Device = "cuda" if device.type == "cuda" else "cpu"
    built = build(job, hidden_size=config.get_text_config().hidden_size, device=kind)
    for field in ("parallel.quantized_weights", "parallel.quantized_gradients"):
        if recipe.value_of(field) and kind == "cpu":
            reason = "ZeRO++ quantizes with kernels of a GPU"
            raise RunError.of(field, True, reason, (field, False))
    if "nvme" in (job.layout.offload_optimizer, job.layout.offload_params):
        from toolkit.engines.nvme import check_directory  # which imports DeepSpeed

        # The last rank of a node counts for all that are there.
        ranks = RankEnvironment.detect().local_rank + 1
        check_directory(expanded(str(recipe.parallel.nvme_path)), ranks * _nvme_bytes(job))
    if user_config is None:
        return built
    return merge_user_config(built, read_user_config(user_config), name=user_config, shares_experts=job.layout.ep > 1)


def _nvme_bytes(job: Job) -> int:
    """Return the least bytes that a rank writes to NVMe: matrices, masters, gradients and moments; 0 if not known."""
    recipe = job.recipe
    layout = job.layout
    shape = job.shape
    if shape is None:
        return 0
    numel = shape.layers * held_layer_parameters(shape) + (1 if shape.tied else 2) * shape.vocab * shape.embed_dim
    moments = len(state_kinds(recipe.optimizer.name, recipe.optimizer.momentum))
    trains_all = recipe.model.lora is None and not recipe.model.freeze
    each = 8 + 4 * moments if layout.offload_optimizer == "nvme" and trains_all else 0
    each += (4 if recipe.precision == "fp32" else 2) * (layout.offload_params == "nvme")
    return int(each * numel / layout.world_size)


def check_vocabulary(recipe: Recipe, config: PretrainedConfig, corpus: Corpora) -> None:
    """Raise DataError where the tokenizer has ids for which the model has no embedding."""
    vocabulary = config.get_text_config().vocab_size
    if corpus.tokenizer_vocab_size > vocabulary:
        size = corpus.tokenizer_vocab_size
        reason = f"its ids go up to {size - 1}, and the model has a vocabulary of {vocabulary}"
        remedy = "choose another tokenizer", ("model.overrides.vocab_size", size)
        raise DataError.of("data.tokenizer", recipe.data.tokenizer, reason, *remedy)


def find_shape(config: PretrainedConfig) -> ModelShape | None:
    """The shape of a model of a known family; None for others, of which no FLOPs are known."""
    try:
        return ModelShape.from_config(config.to_dict())
    except ModelError:
        return None
