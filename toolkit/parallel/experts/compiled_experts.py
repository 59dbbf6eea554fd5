"""The experts of a compiled layer: their exchange and their products are one operation of its graph.

How many rows a rank gets depends on routers, and the host reads it. For the layer that does not matter: what goes in
and what comes out have the shape of the tokens. So compilers get one operation, and do not look into it. It runs the
eager forward pass, and attaches the graph that autograd records to a token, a tensor that the layer saves for its
backward pass. The graph lives as long as the token: if the layer is recomputed, the first one is gone at once.

A block's shared expert, which runs during the exchange, is part of the operation.

Dims: t tokens of a rank, k experts of each, h hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from toolkit.parallel.experts.dispatch import ShardedExperts

_GRAPH = "recorded_graph"
"""Name of the attribute of a token's storage that has its RecordedGraph."""
_AUTOGRAD_KEYS = ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView")
_numbered: "WeakValueDictionary[int, ShardedExperts]" = WeakValueDictionary()
"""The experts that compiled layers of this process call, by their numbers."""


@dataclass(frozen=True)
class RecordedGraph:
    """The ends of a graph that autograd recorded: `outputs`, and the `inputs` and `parameters` with gradients.

    Edges keep no tensors, so the graph has those alone that its backward pass needs.
    """

    outputs: list[GradientEdge]
    inputs: list[GradientEdge]
    parameters: list[nn.Parameter]


def number_experts(experts: "ShardedExperts") -> None:
    """Give experts the number by which the operation looks them up.

    It is a tensor, which a graph takes as an input, so that equal layers share a graph.
    """
    number = max(_numbered, default=-1) + 1
    _numbered[number] = experts
    experts.number = torch.tensor([number])


def call_in_graph(
    experts: "ShardedExperts", hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Put the operation into the graph that is being traced; shapes are those of ShardedExperts.forward."""
    overlap = experts.overlap
    shared_input = None if overlap is None else overlap.take_input()
    device = hidden.device.type
    out: torch.Tensor
    out, shared_output, _ = _run_experts(
        hidden,
        index,
        weights,
        shared_input,
        experts.kept_pairs,
        _trainable(experts, with_shared=shared_input is not None),
        experts.number,
        experts.capacity,
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        torch.is_grad_enabled(),
    )
    if overlap is not None and shared_input is not None:
        overlap.shared.known = ((shared_input,), shared_output)
    return out


def _trainable(experts: "ShardedExperts", *, with_shared: bool) -> list[nn.Parameter]:
    """The parameters of the operation that gradients are computed of."""
    parameters = list(experts.parameters())
    if with_shared:
        assert experts.overlap is not None
        parameters += experts.overlap.shared.parameters()
    return [parameter for parameter in parameters if parameter.requires_grad]


@torch.library.custom_op("dstk::run_experts", mutates_args=())
def _run_experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    shared_input: torch.Tensor | None,
    kept_pairs: torch.Tensor | None,
    parameters: Sequence[torch.Tensor],
    number: torch.Tensor,
    capacity: int | None,
    autocast: torch.dtype | None,
    records: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs of the experts [t, h] and of the shared expert, if it has an input, and the token.

    `parameters` are those of the modules: as arguments they tell autograd which gradients follow. Inputs are copied,
    because the compiler overwrites its own tensors once the operation has run.
    """
    experts = _numbered[int(number)]
    overlap = experts.overlap
    inputs = [each.detach().clone() for each in (hidden, weights, shared_input) if each is not None]
    experts.kept_pairs = None if kept_pairs is None else kept_pairs.clone()
    experts.capacity = capacity
    casts = nullcontext() if autocast is None else torch.autocast(hidden.device.type, dtype=autocast)
    with _recording() if records else nullcontext(), casts:
        for each in inputs:
            each.requires_grad_(records)
        if overlap is not None:
            overlap.begin(None if shared_input is None else inputs[2])
        outputs = [experts.route(inputs[0], index.clone(), inputs[1])]
        if overlap is not None and shared_input is not None:
            outputs.append(overlap.take_output())
        token = torch.zeros(1, dtype=torch.int64)
        if records:
            graph = RecordedGraph(
                outputs=[get_gradient_edge(each) for each in outputs],
                inputs=[get_gradient_edge(each) for each in inputs],
                parameters=_trainable(experts, with_shared=shared_input is not None),
            )
            setattr(token.untyped_storage(), _GRAPH, graph)
    out, *shared_outputs = (each.detach().contiguous() for each in outputs)
    return out, shared_outputs[0] if shared_outputs else hidden.new_empty(0), token


@_run_experts.register_fake
def _(hidden: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shared_input: torch.Tensor | None = arguments[2]
    autocast: torch.dtype | None = arguments[7]
    shared_output = hidden.new_empty(0)
    if shared_input is not None:
        shared_output = shared_input.new_empty(shared_input.shape, dtype=autocast or shared_input.dtype)
    return hidden.new_empty(hidden.shape), shared_output, torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("dstk::gradients_of_experts", mutates_args=())
def _gradients_of_experts(
    gradients: Sequence[torch.Tensor], weights: torch.Tensor, parameters: Sequence[torch.Tensor], token: torch.Tensor
) -> list[torch.Tensor]:
    """Run the backward pass of a recorded graph; return the gradients of its inputs and parameters."""
    graph: RecordedGraph = getattr(token.untyped_storage(), _GRAPH)
    with _without_hooks(graph.parameters):
        ends: list[Any] = [*graph.inputs, *graph.parameters]
        # Retained, because the layer may have several backward passes; the graph goes with the token.
        results = torch.autograd.grad(graph.outputs, ends, gradients, retain_graph=True, allow_unused=True)
    likes = [gradients[0], weights, *gradients[1:], *parameters]
    # A parameter without gradient: one whose weight gradient a pipeline's schedule computes later.
    return [
        like.new_zeros(like.shape) if result is None else result.contiguous()
        for like, result in zip(likes, results, strict=True)
    ]


@_gradients_of_experts.register_fake
def _(
    gradients: Sequence[torch.Tensor], weights: torch.Tensor, parameters: Sequence[torch.Tensor], token: torch.Tensor
) -> list[torch.Tensor]:
    return [like.new_empty(like.shape) for like in (gradients[0], weights, *gradients[1:], *parameters)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    weights = inputs[2]
    ctx.has_shared = inputs[3] is not None
    ctx.save_for_backward(output[2], weights, *inputs[5])


def _backward(ctx: Any, gradient: torch.Tensor, of_shared: torch.Tensor, _: Any) -> tuple[Any, ...]:
    token, weights, *parameters = ctx.saved_tensors
    gradients = [gradient, of_shared] if ctx.has_shared else [gradient]
    of_hidden, of_weights, *others = _gradients_of_experts(gradients, weights, parameters, token)
    of_shared_input = others.pop(0) if ctx.has_shared else None
    return of_hidden, None, of_weights, of_shared_input, None, others, None, None, None, None


_run_experts.register_autograd(_backward, setup_context=_save)


@contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record what runs inside an operation: PyTorch runs operations below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD_KEYS:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded),
        torch.enable_grad(),
    ):
        yield


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Do not run the hooks of parameters, some of which sum gradients over ranks: they run when autograd adds them."""
    hooks = [parameter._backward_hooks for parameter in parameters]
    for parameter in parameters:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, before in zip(parameters, hooks, strict=True):
            parameter._backward_hooks = before
