"""Recomputation in the backward pass: of all decoder layers, of every Nth one, or of their attention."""

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.config.layout import RECOMPUTE_PERIODS, Recompute, recomputes
from toolkit.errors import ModelError
from toolkit.model_init.model_modules import decoder_layers
from toolkit.model_init.selective_recompute import recompute_attention
from toolkit.parallel.pipeline.stage import NonLocalLayer


def recompute(model: PreTrainedModel, what: Recompute) -> None:
    """Recompute parts of `model` in every backward pass. Raises ModelError where that is not possible."""
    if what == "selective":
        recompute_attention(model)
    if what not in RECOMPUTE_PERIODS:
        return
    # The reentrant variant fails where the first input requires no gradient, and drops keyword arguments.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Not transformers' own `every_n_layers`, which would count from the first layer of a pipeline stage.
    for index, layer in enumerate(decoder_layers(model)):
        if recomputes(what, index) or isinstance(layer, NonLocalLayer):
            continue
        if not isinstance(layer, GradientCheckpointingLayer):
            given = (("parallel.recompute", what), ("model_type", model.config.model_type))
            reason = "transformers recomputes its layers all or none"
            raise ModelError.between(given, reason, ("parallel.recompute", "full or none"))
        layer.gradient_checkpointing = False
