"""Selective recomputation: attention between its projections is computed again in the backward pass.

Scores, softmax, dropout and the weighted sum of values take little time and, without a fused kernel, most of a layer's
memory (Korthikanti et al. 2022, section 5). So only what they start from is kept: query, key and value.

transformers finds the attention function of a layer under the name of `attn_implementation` in ALL_ATTENTION_FUNCTIONS;
the eager one stands in the family's own file. Either is replaced, once a process, by a function that looks at the
module which calls it: only the layers of a model that asked for it are computed again.
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
from toolkit.families.own_attention import REMEDY, own_attention

_FUNCTIONS, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"
_MARK = "recomputes_attention"
"""The attribute of modules whose attention is computed again."""
_WRAPPED = "is_recomputed_where_marked"

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def recompute_attention(model: PreTrainedModel) -> None:
    """Let `model` compute its attention again in every backward pass. Raises ModelError where it cannot be reached."""
    family, chosen = model.config.model_type, _implementations(model)
    reason = next(filter(None, (own_attention(model.config.to_dict(), name) for name in chosen)), None)
    files = [vars(sys.modules[name]) for name in {type(module).__module__ for module in model.modules()}]
    interfaces = [names for names in files if _FUNCTIONS in names]
    if reason is None and not interfaces:
        reason = "its attention does not go through the attention interface of transformers"
    if reason is not None:
        raise ModelError(f"parallel.recompute=selective with a model of type {family}: {reason}. {REMEDY}.")
    for names in interfaces:
        for name in chosen & names[_FUNCTIONS].keys():
            _wrap(names[_FUNCTIONS], name)
        if _EAGER in names:
            _wrap(names, _EAGER)
    for module in model.modules():
        setattr(module, _MARK, True)


def _implementations(model: PreTrainedModel) -> set[str]:
    """Names of the attention functions that its modules ask for: models in models have configs of their own."""
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
        # The random generators go back to where they stand here, so the same scores are dropped again.
        result: tuple[torch.Tensor, torch.Tensor | None] = checkpoint(
            partial(plain, module, **options), *arguments, use_reentrant=False
        )
        return result

    setattr(attend, _WRAPPED, True)
    return attend
