"""Recomputation in the backward pass: of all decoder layers, of every Nth one, or of their attention."""

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from toolkit.config.layout import RECOMPUTE_PERIODS, Recompute, recomputes
from toolkit.errors import ModelError
from toolkit.model_init.model_modules import decoder_layers
from toolkit.model_init.selective_recompute import recompute_attention
from toolkit.parallel.pipeline.stage import NonLocalLayer


def check_recompute(mode: Recompute, config: PretrainedConfig) -> None:
    """Raise ModelError for a family whose layers transformers cannot recompute; a model's own code is not known yet."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is not None:
        _check_kind(mode, model_class, config)


def _check_kind(mode: Recompute, model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    # peft's wrapper around a model does not say.
    if mode in RECOMPUTE_PERIODS and not getattr(model_class, "supports_gradient_checkpointing", True):
        settings = (("parallel.recompute", mode), ("model_type", config.model_type))
        reason = "transformers does not recompute layers of this family"
        raise ModelError.between(settings, reason, ("parallel.recompute", "none"))


def recompute(model: PreTrainedModel, mode: Recompute) -> None:
    """Recompute parts of `model` in every backward pass. Raises ModelError where that is not possible."""
    if mode == "selective":
        recompute_attention(model)
    if mode not in RECOMPUTE_PERIODS:
        return
    _check_kind(mode, type(model), model.config)
    # The reentrant variant fails where the first input requires no gradient, and drops keyword arguments.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = decoder_layers(model)
    if _is_later_stage(model):
        # transformers has the output of embeddings require a gradient. In a later stage of a pipeline that is a leaf,
        # to which GIT adds in place.
        model.disable_input_require_grads()
    # Not transformers' own `every_n_layers`, which would count from the first layer of a pipeline stage.
    for index, layer in enumerate(layers):
        if recomputes(mode, index) or isinstance(layer, NonLocalLayer):
            continue
        if not isinstance(layer, GradientCheckpointingLayer):
            settings = (("parallel.recompute", mode), ("model_type", model.config.model_type))
            reason = "transformers recomputes its layers all or none"
            raise ModelError.between(settings, reason, ("parallel.recompute", "full or none"))
        layer.gradient_checkpointing = False


def _is_later_stage(model: nn.Module) -> bool:
    """Whether another pipeline rank has the first decoder layer. A vision encoder has a list of layers of its own."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return any(isinstance(layers[0], NonLocalLayer) for layers in lists if len(layers))
