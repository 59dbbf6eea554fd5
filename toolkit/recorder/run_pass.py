"""Run one forward and backward pass of a fake model, and trace it section by section."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from transformers import masking_utils
from transformers.integrations import moe

from toolkit.estimate.recorded.recording import RankPass
from toolkit.parallel.model_structure import hidden_argument, hidden_result
from toolkit.recorder.fake_model import FakeModel, Mode, autocast
from toolkit.recorder.gpu_kernels import GpuKernels
from toolkit.recorder.routing import balanced_routing
from toolkit.recorder.trace import Trace, TracedSection

_KINDS = (("norm", ("norm", "ln_", "ln")), ("attention", ("attn", "attention")), ("mlp", ("mlp", "ffn", "feed", "moe")))


def trace_pass(rank_pass: RankPass, fake: FakeModel, mode: Mode, b: int, s: int) -> list[TracedSection]:
    """Trace a pass over `b` samples of `s` positions."""
    held = [*fake.model.parameters(), *fake.model.buffers()]
    on_gpu = rank_pass.computation.device == "cuda"
    trace = Trace(on_gpu=on_gpu, parameters=held, answer=not rank_pass.computation.documents)
    handles = _mark_sections(fake, trace)
    gc.freeze()  # so that collecting takes no time
    gc.disable()
    try:
        with ExitStack() as stack:
            if on_gpu:
                stack.enter_context(GpuKernels())
            stack.enter_context(values_assumed())
            stack.enter_context(balanced_routing(rank_pass).assumed())
            stack.enter_context(mode)
            run_pass = _pass_of_model if fake.stage is None else _pass_of_stage
            weight_gradients = fake.weight_gradients
            if weight_gradients is None:
                run_pass(rank_pass, fake, trace, b, s)
            else:
                with weight_gradients.splitting(is_split=True), weight_gradients.collecting(0, 0):
                    run_pass(rank_pass, fake, trace, b, s)
                with trace:
                    trace.begin("weights")
                    weight_gradients.compute(0, 0)
    finally:
        gc.enable()
        gc.unfreeze()
        for handle in handles:
            handle.remove()
    return trace.sections


@contextmanager
def values_assumed() -> Iterator[None]:
    """transformers looks at masks and positions, and not if tensors are fake; here Trace answers for their values.

    Without values, torch's product of experts takes bf16 alone; transformers' own has the same inputs and results.
    """
    is_tracing = masking_utils.is_tracing
    can_use_grouped_mm = moe._can_use_grouped_mm
    masking_utils.is_tracing = lambda *tensors: False
    moe._can_use_grouped_mm = lambda inputs, weight, offsets: weight.dtype == torch.bfloat16
    try:
        yield
    finally:
        masking_utils.is_tracing = is_tracing
        moe._can_use_grouped_mm = can_use_grouped_mm


def _ids(b: int, s: int) -> torch.Tensor:
    return torch.zeros(b, s, dtype=torch.long)


def _pass_of_model(rank_pass: RankPass, fake: FakeModel, trace: Trace, b: int, s: int) -> None:
    with trace:
        trace.begin("embedding")
        ids = _ids(b, s)
        labels = _ids(b, s)
        positions = {"position_ids": _ids(b, s)} if rank_pass.computation.documents else {}
        with autocast(rank_pass):
            logits = fake.model(input_ids=ids, use_cache=False, **positions).logits
        trace.begin("loss")
        loss = [fake.loss_sum(logits, labels)]
        del logits
        trace.begin("head_backward")
        _backward(loss)


def _pass_of_stage(rank_pass: RankPass, fake: FakeModel, trace: Trace, b: int, s: int) -> None:
    """Trace the pass of one pipeline stage. What it received, sent and returned stays until its backward pass is over.

    DeepSpeed's engine hands the stage copies of what it received (pipe/engine.py, `_exec_forward_pass`).
    """
    assert fake.stage is not None
    with trace:
        trace.begin("embedding")
        if rank_pass.part == "first":
            first = _ids(b, s)
        else:
            shards = rank_pass.layout.tp if rank_pass.layout.sequence_parallel else 1
            dtype = torch.bfloat16 if rank_pass.precision == "bf16" else torch.float32
            first = torch.zeros(b, s // shards, fake.hidden, dtype=dtype).requires_grad_()
        rest = (_ids(b, s),) if rank_pass.computation.documents else ()
        labels = _ids(b, s) if rank_pass.part == "last" else None
        with autocast(rank_pass):
            output = fake.stage(tuple(tensor.clone() for tensor in (first, *rest)))
        trace.begin("loss")
        if labels is not None:
            backward = [fake.loss_sum(output, labels)]
            trace.begin("head_backward")
            _backward(backward)
        else:
            trace.begin("head_backward")
            _backward([output[0]], torch.zeros_like(output[0]))


def _backward(output: list[torch.Tensor], gradient: torch.Tensor | None = None) -> None:
    """Run the backward pass from the tensor in `output`, which is emptied."""
    tensor = output.pop()
    gradient = torch.ones_like(tensor) if gradient is None else gradient
    run_backward((tensor,), (gradient,))


def run_backward(
    roots: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor | None, ...],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> None:
    """Run a backward pass in which function modes, as GpuKernels, see what is recomputed.

    torch.autograd.backward does not let them.
    """
    _engine_run_backward(roots, gradients, retain_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True)


def _mark_sections(fake: FakeModel, trace: Trace) -> list[Any]:
    """Begin a section with every layer, forward and backward; name the part of a layer that runs."""
    handles: list[Any] = []
    layers = fake.layers
    reached: list[int] = []

    def enter(index: int) -> Callable[..., None]:
        def hook(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if index in reached:
                return  # recomputation
            reached.append(index)
            hidden = hidden_argument(arguments, keywords)
            before = fake.running[fake.running.index(index) - 1] if index != fake.running[0] else None
            name = "embedding_backward" if before is None else f"backward {before}"
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: trace.begin(name))
            trace.begin(f"forward {index}")

        return hook

    def leave(layer: nn.Module, arguments: Any, result: Any) -> None:
        if trace.sections[-1].name == f"forward {fake.running[-1]}":
            hidden = hidden_result(result)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: trace.begin(f"backward {fake.running[-1]}"))
            trace.begin("head")

    for index in fake.running:
        handles.append(layers[index].register_forward_pre_hook(enter(index), with_kwargs=True))
        for name, child in layers[index].named_children():
            handles.append(child.register_forward_pre_hook(_set_kind(trace, _kind_of(name))))
            handles.append(child.register_forward_hook(_set_kind(trace, "residual")))
    handles.append(layers[fake.running[-1]].register_forward_hook(leave))
    return handles


def _kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in _KINDS if any(word in lower for word in words)), "residual")


def _set_kind(trace: Trace, kind: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        trace.kind = kind

    return hook
