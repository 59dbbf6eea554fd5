"""Outputs of a model's routers in a forward pass: the logits of every token, and the experts it was sent to.

Every router of a family on transformers' experts interface returns (logits [t, e], weights [t, k], experts [t, k], …),
and the family names the class of its routers where it records their logits for `output_router_logits`. Dims: t tokens
of a micro-batch on this rank, e experts, k experts for each token.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from toolkit.config.router_rules import EXPERT_COUNTS
from toolkit.model_init.model_modules import decoder_layers

_CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names that families give the bias that only chooses experts and has no gradient."""


_KEPT = "kept_output"
"""Name of the attribute in which a router keeps its output."""
_MAY_SKIP = ("zaya",)
"""Families whose routers have one choice more than experts, the last, which passes a token on."""


@dataclass(frozen=True)
class RouterOutput:
    """Output of one layer's router: `logits` [t, e] with their gradient, and the `experts` [t, k] of each token.

    Where a router can choose to skip the experts, that is the last of e choices.
    """

    logits: torch.Tensor
    experts: torch.Tensor


class RouterRecords:
    """Keeps the outputs of a model's routers between `begin` and `take`; recomputation runs routers again, outside.

    Each router keeps its own output, so that compiled layers that are equal share one graph.
    """

    def __init__(self, routers: dict[int, nn.Module], experts: int) -> None:
        """`experts`: how many a router chooses from, without the choice to skip them."""
        self._routers = routers
        self._experts = experts
        self._is_open = False
        for router in routers.values():
            router.register_forward_hook(self._keep)
        self._forget()

    def begin(self) -> None:
        """Record the forward pass that follows."""
        self._forget()
        self._is_open = True

    def take(self) -> dict[int, RouterOutput]:
        """Stop, and return what was recorded, by decoder layer."""
        outputs = {layer: vars(router)[_KEPT] for layer, router in self._routers.items()}
        self._forget()
        self._is_open = False
        return {layer: RouterOutput(*output) for layer, output in outputs.items() if output is not None}

    def _forget(self) -> None:
        for router in self._routers.values():
            vars(router)[_KEPT] = None

    def _keep(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if not self._is_open:
            return
        logits, weights, experts = result[:3]
        if logits.shape[-1] > self._experts:
            # A token that skips the experts is handed to the first one, with weight 0.
            experts = experts.masked_fill(weights == 0, self._experts)
        if torch.compiler.is_compiling():
            # A view belongs to the recomputed part of a graph, from which Dynamo hands it on. What an autograd.Function
            # of that part returns, as ZeRO-3's linear layers do, it forgets (PyTorch 2.13).
            logits = logits.view_as(logits)
        setattr(module, _KEPT, (logits, experts))


def find_routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the router of every decoder layer that has one, by the layer's number; empty for other models."""
    kinds = router_classes(model)
    routers = {}
    for index, layer in enumerate(decoder_layers(model)):
        for module in layer.modules():
            if isinstance(module, kinds):
                routers[index] = module
    return routers


def router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """Return the class of a model's routers; empty where it has none, or none that record their logits."""
    for part in model.modules():
        recorders = getattr(part, "_can_record_outputs", None) or {}
        if "router_logits" in recorders:
            recorder = recorders["router_logits"]
            if not isinstance(recorder, list) and recorder.index == 0:
                return (recorder.target_class,)
    return ()


def expert_count(config: PretrainedConfig) -> int:
    """Return how many experts a router chooses from, 0 for a dense model.

    LongCat-Flash's zero experts, which hand a token on as it is, are counted too.
    """
    text = config.get_text_config(decoder=True)
    counts = (getattr(text, name, None) for name in EXPERT_COUNTS)
    count: int = next(filter(None, counts), 0)
    zero_experts: int = getattr(text, "zero_expert_num", None) or 0
    return count + zero_experts


def router_choices(config: PretrainedConfig) -> int:
    """Return how many logits a router has for each token: of the experts, and ZAYA's of none; 0 if it is dense."""
    count = expert_count(config)
    return count + 1 if count and config.get_text_config(decoder=True).model_type in _MAY_SKIP else count


def scores_by_sigmoid(router: nn.Module) -> bool | None:
    """Return whether a router turns logits into scores by a sigmoid (DeepSeek-V3) or a softmax; None if it has both.

    Configs do not say, so this reads the router's source.
    """
    source = "".join(
        inspect.getsource(kind) for kind in type(router).__mro__ if kind.__module__ == type(router).__module__
    )
    sigmoid = "sigmoid" in source
    return None if sigmoid and "softmax" in source else sigmoid


def correction_biases(model: PreTrainedModel) -> dict[int, torch.Tensor]:
    """Return the bias that corrects the choice of experts, a buffer or a frozen parameter, by decoder layer."""
    biases = {}
    for index, layer in enumerate(decoder_layers(model)):
        for name, value in (*layer.named_buffers(), *layer.named_parameters()):
            if name.rpartition(".")[2] in _CORRECTION_BIASES:
                biases[index] = value
    return biases
