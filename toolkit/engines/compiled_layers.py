"""train.compile: torch.compile for each decoder layer by itself. Layers that are equal share one compiled graph.

What is compiled is a layer's `forward`, so that what stays outside of it is not traced: ZeRO's and dropout's hooks on
the layer, FSDP's, pipeline stages, embeddings and head. Collectives of tensor parallelism, sequence parallelism and
Ulysses, and recomputation, are part of the graph. So are experts that ranks share out, as one operation: how many rows
a rank gets differs from step to step (toolkit/parallel/experts/compiled_experts.py). On a rank that has all experts,
the rows of all of them together are as many in each step. Experts that run one after the other in a loop are not
compiled.
"""

import re
from collections import Counter
from typing import Any

import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from toolkit.engines.random_order import RandomOrder
from toolkit.engines.router_records import router_classes
from toolkit.errors import ModelError
from toolkit.model_init.model_modules import decoder_layers
from toolkit.parallel.experts.compiled_experts import number_experts
from toolkit.parallel.experts.dispatch import ShardedExperts
from toolkit.parallel.experts.sharding import experts_in
from toolkit.units import some

_OPTIONS: dict[str, Any] = {
    "backend": "inductor",
    "options": {"fallback_random": True, "joint_custom_pre_pass": RandomOrder()},
}
"""Arguments of torch.compile. With these options dropout draws the same numbers as without compilation."""
_EAGER = "experts and their routers are not compiled"
_OF_ALL_EXPERTS = ("grouped_mm", "batched_mm")
"""Implementations of experts in transformers that multiply the rows of all experts at once; `eager` has a loop."""


class CompiledLayers:
    """Compiles the decoder layers of a model on this rank; knows afterwards what came out."""

    def __init__(
        self, model: PreTrainedModel, *, zero_stage: int = 0, is_stage: bool = False, splits_backward: bool = False
    ) -> None:
        """`is_stage`: whether `model` is a pipeline stage, which has a backward pass for each tensor that it sends.

        `splits_backward`: whether its schedule computes the gradients of weights later than the others.
        """
        torch.compiler.reset()  # of an earlier engine in this process, whose variants count towards torch's limit
        self._breaks_before = _graph_breaks()
        self._graphs_before = _graphs()
        # What a router keeps for the loss and the statistics is that of the forward pass, compiled or not.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        if is_stage:
            # Otherwise a backward pass overwrites what a layer has saved, which a second one reads.
            torch._functorch.config.donated_buffer = False
        experts = [module for _, module in experts_in(model)]
        for sharded in experts:
            if isinstance(sharded, ShardedExperts):
                number_experts(sharded)
        routers = () if experts and all(map(_has_static_shapes, experts)) else router_classes(model)
        # A pipeline stage has placeholders for other stages' layers.
        layers = [layer for layer in decoder_layers(model) if next(layer.parameters(), None) is not None]
        for layer in layers:
            for block in layer.modules():
                if any(isinstance(child, routers) for child in block.children()):
                    block.forward = torch.compiler.disable(block.forward, reason=_EAGER)  # type: ignore[no-untyped-call]
            layer.forward = torch.compile(layer.forward, **_options(is_stage=is_stage, splits_backward=splits_backward))
            if zero_stage == 3:
                _gather_at_once(layer)
        if zero_stage == 3 and not all(parameter.requires_grad for parameter in model.parameters()):
            model.enable_input_require_grads()  # otherwise the first layer has no input whose gradient is awaited
        self.layers = len(layers)

    def facts(self) -> dict[str, Any]:
        """Layers, compiled graphs (forward passes), and how often each reason broke a graph."""
        breaks = _graph_breaks() - self._breaks_before
        return {"layers": self.layers, "graphs": _graphs() - self._graphs_before, "graph_breaks": dict(breaks)}

    def __str__(self) -> str:
        facts = self.facts()
        breaks: dict[str, int] = facts["graph_breaks"]
        reasons = [reason if count == 1 else f"{reason} ({count}x)" for reason, count in breaks.items()]
        return (
            f"{facts['layers']} decoder layers, graphs: {facts['graphs']}, graph breaks: {sum(breaks.values())}"
            f"{': ' if reasons else ''}{some(reasons, 4)}"
        )


def _options(*, is_stage: bool, splits_backward: bool) -> dict[str, Any]:
    """Return the arguments of torch.compile for a layer.

    They are of this layer alone, whatever another engine of the process asks for: a layer is compiled when it first
    runs. Without `inplace_buffers` a graph writes nothing into the tensors of a pipeline stage that a second backward
    pass reads, and without `allow_buffer_reuse` nothing into those from which W computes weight gradients.
    """
    if _OPTIONS["backend"] != "inductor" or not is_stage:
        return _OPTIONS
    options = dict(_OPTIONS["options"])
    options["inplace_buffers"] = False
    if splits_backward:
        options["allow_buffer_reuse"] = False
    return _OPTIONS | {"options": options}


def _has_static_shapes(experts: Any) -> bool:
    """Whether no shape in a graph depends on routers: with sharded experts, or if all experts multiply at once."""
    return isinstance(experts, ShardedExperts) or experts.config._experts_implementation in _OF_ALL_EXPERTS


def _gather_at_once(layer: nn.Module) -> None:
    """Let ZeRO-3 gather the parameters of a layer where it begins, not in hooks of the modules inside.

    DeepSpeed reduces the gradients of such a layer when those of its positional inputs are there.
    """
    layer._z3_leaf = True  # type: ignore[assignment]

    def check(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if any(map(_has_gradient, keywords.values())) or not any(map(_has_gradient, arguments)):
            reason = f"{type(layer).__name__} takes hidden states as keywords, which ZeRO-3 does not wait for"
            raise ModelError.between((("train.compile", True), ("parallel.zero_stage", 3)), reason, "lower zero_stage")

    layer.register_forward_pre_hook(check, with_kwargs=True)


def _has_gradient(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _graph_breaks() -> Counter[str]:
    """Return how often each reason broke a graph, or left a function uncompiled, in this process."""
    breaks: Counter[str] = Counter()
    for kind in ("graph_break", "unimplemented"):
        for text, count in counters[kind].items():
            reason = re.search(r"\(reason: (?!None\))(.+?)\)", text)
            breaks[reason[1] if reason else text.partition("\n")[0].strip()] += count
    return breaks
