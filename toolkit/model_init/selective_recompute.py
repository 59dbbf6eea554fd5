"""Selective recomputation: attention between its projections is recomputed in the backward pass.

Scores, softmax, dropout and the weighted sum of values take little time and, without a fused kernel, most of a layer's
memory (Korthikanti et al. 2022, section 5). So only their inputs are saved: query, key and value.

transformers looks a layer's attention function up in ALL_ATTENTION_FUNCTIONS under `attn_implementation`; the eager one
is in the family's own file. Either is replaced, once per process, by a function that inspects the calling module: only
layers of a model that requested recomputation are recomputed.
"""

import sys
from collections.abc import Callable, MutableMapping
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from toolkit.errors import ModelError
from toolkit.models.families.registry import RECOMPUTE_REMEDY, own_attention

_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
_EAGER = "eager_attention_forward"
_MARK = "recomputes_attention"
"""The attribute that marks modules whose attention is recomputed."""
_WRAPPED = "is_recomputed_where_marked"

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def recompute_attention(model: PreTrainedModel) -> None:
    """Recompute the attention of `model` in every backward pass. Raises ModelError where that is not possible."""
    family = model.config.model_type
    chosen = _implementations(model)
    reason = next(filter(None, (own_attention(model.config.to_dict(), name) for name in chosen)), None)
    files = [vars(sys.modules[name]) for name in {type(module).__module__ for module in model.modules()}]
    interfaces = [names for names in files if _FUNCTIONS in names]
    if reason is None and not interfaces:
        reason = "its attention does not go through the attention interface of transformers"
    if reason is not None:
        settings = (("parallel.recompute", "selective"), ("model_type", family))
        raise ModelError.between(settings, reason, RECOMPUTE_REMEDY)
    for names in interfaces:
        for name in chosen & names[_FUNCTIONS].keys():
            _wrap(names[_FUNCTIONS], name)
        if _EAGER in names:
            _wrap(names, _EAGER)
    for module in model.modules():
        setattr(module, _MARK, True)


def _implementations(model: PreTrainedModel) -> set[str]:
    """Return the names of the attention functions that its modules use: nested models have their own configs."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return {str(getattr(config, "_attn_implementation", None)) for config in configs}


def _wrap(functions: MutableMapping[str, Any], name: str) -> None:
    if not hasattr(functions[name], _WRAPPED):
        functions[name] = _recomputed_where_marked(functions[name])


def _recomputed_where_marked(plain: Attention) -> Attention:
    @wraps(plain)
    def attend(module: nn.Module, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not (getattr(module, _MARK, False) and module.training and torch.is_grad_enabled()):
            return plain(module, *arguments, **options)
        # `checkpoint` restores the random generators' state, so the same scores are dropped again.
        result: tuple[torch.Tensor, torch.Tensor | None] = checkpoint(
            partial(plain, module, **options), *arguments, use_reentrant=False
        )
        return result

    setattr(attend, _WRAPPED, True)
    return attend
