"""Run one forward and backward pass of a fake model, and trace it section by section."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.utils.hooks import RemovableHandle
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
    masking_utils.is_tracing = _is_not_tracing
    moe._can_use_grouped_mm = _is_in_bf16
    try:
        yield
    finally:
        masking_utils.is_tracing = is_tracing
        moe._can_use_grouped_mm = can_use_grouped_mm


def _is_not_tracing(*tensors: torch.Tensor) -> bool:
    """Stand in for `masking_utils.is_tracing`, which takes fake tensors for tracing."""
    return False


def _is_in_bf16(inputs: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> bool:
    """Stand in for `moe._can_use_grouped_mm`: whether torch's product of experts takes the weights."""
    return weight.dtype == torch.bfloat16


def _ids(b: int, s: int) -> torch.Tensor:
    """Return ids, labels or positions of a micro-batch, int64 [b, s]."""
    return torch.zeros(b, s, dtype=torch.long)


def _pass_of_model(rank_pass: RankPass, fake: FakeModel, trace: Trace, b: int, s: int) -> None:
    """Trace the pass of a whole model over [b, s] tokens."""
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
        received = [_ids(b, s) if rank_pass.part == "first" else _received_hidden(rank_pass, fake.hidden, b, s)]
        if rank_pass.computation.documents:
            received.append(_ids(b, s))
        labels = _ids(b, s) if rank_pass.part == "last" else None
        with autocast(rank_pass):
            output = fake.stage(tuple(tensor.clone() for tensor in received))
        trace.begin("loss")
        if labels is not None:
            loss = [fake.loss_sum(output, labels)]
            trace.begin("head_backward")
            _backward(loss)
        else:
            trace.begin("head_backward")
            _backward([output[0]], torch.zeros_like(output[0]))


def _received_hidden(rank_pass: RankPass, hidden: int, b: int, s: int) -> torch.Tensor:
    """Return the hidden state [b, s / shards, h] that a stage receives; sequence parallelism has t shards."""
    shards = rank_pass.layout.tp if rank_pass.layout.sequence_parallel else 1
    dtype = torch.bfloat16 if rank_pass.precision == "bf16" else torch.float32
    return torch.zeros(b, s // shards, hidden, dtype=dtype).requires_grad_()


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


def _mark_sections(fake: FakeModel, trace: Trace) -> list[RemovableHandle]:
    """Begin a section with every layer, forward and backward; name the part of a layer that runs."""
    handles = []
    marks = _SectionMarks(fake.running, trace)
    for index in fake.running:
        layer = fake.layers[index]
        handles.append(layer.register_forward_pre_hook(partial(marks.enter, index), with_kwargs=True))
        for name, child in layer.named_children():
            handles.append(child.register_forward_pre_hook(_set_kind(trace, _kind_of(name))))
            handles.append(child.register_forward_hook(_set_kind(trace, "residual")))
    handles.append(fake.layers[fake.running[-1]].register_forward_hook(marks.leave_last))
    return handles


class _SectionMarks:
    """Hooks of the layers that run, which begin the sections of a trace.

    A layer's backward pass ends when its input has its gradient: there the section of the layer before it begins.
    """

    def __init__(self, running: Sequence[int], trace: Trace) -> None:
        self._running = running
        self._trace = trace
        self._reached: set[int] = set()
        """Layers whose forward pass has begun: one that begins again is recomputed."""

    def enter(self, index: int, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Begin the forward section of a layer, and the section behind its backward pass when that is over."""
        if index in self._reached:
            return
        self._reached.add(index)
        self._begin_at_gradient(hidden_argument(arguments, keywords), self._section_behind(index))
        self._trace.begin(f"forward {index}")

    def leave_last(self, layer: nn.Module, arguments: Any, result: Any) -> None:
        """Begin the head's section behind the forward pass of the last layer, and that layer's backward section."""
        last = self._running[-1]
        if self._trace.sections[-1].name == f"forward {last}":
            self._begin_at_gradient(hidden_result(result), f"backward {last}")
            self._trace.begin("head")

    def _section_behind(self, index: int) -> str:
        """Return the section that follows the backward pass of a layer."""
        place = self._running.index(index)
        return "embedding_backward" if place == 0 else f"backward {self._running[place - 1]}"

    def _begin_at_gradient(self, hidden: torch.Tensor, section: str) -> None:
        """Begin a section when a hidden state has its gradient."""
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._trace.begin(section))


def _kind_of(name: str) -> str:
    """Return the kind of a layer's part, by the name of its module."""
    lower = name.lower()
    for kind, words in _KINDS:
        if any(word in lower for word in words):
            return kind
    return "residual"


def _set_kind(trace: Trace, kind: str) -> Callable[..., None]:
    """Return a hook that says which part of a layer allocates from now on."""

    def hook(*_: Any) -> None:
        trace.kind = kind

    return hook
