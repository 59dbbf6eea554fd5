"""DS8: configs that run, but could run faster or in less memory."""

from collections.abc import Iterator

from toolkit.dsconfig.buckets import largest_parameter
from toolkit.lint.finding import Violation, set_to
from toolkit.lint.view import GPU_BYTES, View
from toolkit.units import format_bytes, format_count

_Z = "zero_optimization"
_STATES_FRACTION = 0.5
"""Fraction of a GPU's memory that model states may take: the rest is for activations."""


def check(view: View) -> Iterator[Violation]:
    """Check what follows from the file alone, then what needs the model."""
    yield from _collectives(view)
    yield from _checkpointing(view)
    yield from _sizes(view)
    yield from _memory(view)


def _collectives(view: View) -> Iterator[Violation]:
    stage = view.stage
    overlap = view.get(f"{_Z}.overlap_comm")
    pipeline = view.has_pipeline or view.section("pipeline")
    if stage in (1, 2) and overlap is None and (view.context.gpus or 1) > 1 and view.dp != 1 and not pipeline:
        message = f"overlap_comm is not written, and off by default under ZeRO-{stage}"
        yield Violation("DS802", (_Z,), message)
    for key in ("reduce_scatter", "contiguous_gradients"):
        needed = view.get("prescale_gradients") or view.get("gradient_predivide_factor", 1.0) != 1.0
        if stage and view.get(f"{_Z}.{key}") is False and not (key == "reduce_scatter" and needed):
            yield Violation("DS810", (_Z, key), f"{key} is off")
    offloads = view.offload("optimizer") != "none" or view.offload("param") != "none"
    if view.context.gpus == 1 and stage and not offloads:
        yield Violation("DS807", (_Z, "stage"), f"ZeRO-{stage} on one GPU")
    steps = view.number("gradient_accumulation_steps", 1) or 1
    if stage == 2 and steps >= 16 and not offloads:
        yield Violation("DS808", (_Z, "stage"), f"ZeRO-2 with {steps} micro-batches a step")


def _checkpointing(view: View) -> Iterator[Violation]:
    section = view.section("activation_checkpointing")
    if any(value not in (False, None) for value in section.values()):
        yield Violation("DS809", ("activation_checkpointing",), "activation_checkpointing is set")
    kwargs = view.context.trainer.get("gradient_checkpointing_kwargs")
    if isinstance(kwargs, dict) and kwargs.get("use_reentrant") is True:
        yield Violation("DS811", (), "the Trainer recomputes with use_reentrant=True")


def _sizes(view: View) -> Iterator[Violation]:
    shape = view.context.shape
    parameters = view.context.parameters
    group = view.number(f"{_Z}.sub_group_size")
    if view.stage == 3 and group is not None and group < 1e7:
        yield Violation("DS813", (_Z, "sub_group_size"), f"sub_group_size={format_count(group)} elements")
    threshold = view.number(f"{_Z}.stage3_param_persistence_threshold", 0) or 0
    if view.stage == 3 and threshold >= (3 * shape.hidden**2 if shape else 1e9):
        path = (_Z, "stage3_param_persistence_threshold")
        violation = Violation(
            "DS812", path, f"{path[1]}={format_count(threshold)}: every matrix of a decoder layer is smaller"
        )
        yield violation.setting(10 * shape.hidden) if shape else violation
    if shape is None or parameters is None or not view.stage:
        return
    buffer = view.number(f"{_Z}.offload_param.buffer_size", 1e8) or 0
    shard = largest_parameter(shape) // (view.dp or 1)
    if view.stage == 3 and view.offload("param") == "nvme" and buffer < shard:
        place = (_Z, "offload_param", "buffer_size")
        message = f"buffer_size={format_count(buffer)}, but a shard of the largest parameter has {format_count(shard)}"
        yield Violation("DS523", place if view.has(".".join(place)) else place[:-1], message)
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if key == "allgather_bucket_size" and view.stage == 3:
            continue
        elements = view.number(f"{_Z}.{key}") or 5e8
        if view.get(f"{_Z}.{key}") == "auto" or elements <= parameters or elements <= 2e7:
            continue
        path = (_Z, key)
        written = view.has(f"{_Z}.{key}")
        layer = max(12 * shape.hidden**2, 1 << 20)
        has = f"{format_count(elements)} elements{'' if written else ' by default'}"
        message = f"{key} is {has}, the model has {format_count(parameters)} parameters"
        yield Violation("DS801", path if written else (_Z,), message, edits=set_to(path, layer))


def _memory(view: View) -> Iterator[Violation]:
    """Compare the states under ZeRO-1 with the memory of a GPU; the fp32 gradient sums are not sharded."""
    parameters = view.context.parameters
    dp = view.dp
    if parameters is None or dp is None or dp < 2:
        return
    layout = view.context.layout
    mine = parameters / (layout.tp * layout.pp if layout else 1)
    stage = view.stage
    weight = 2 if view.precision != "fp32" else 4
    states = 12 if weight == 2 else 8
    if view.offload("optimizer") != "none" and stage:
        states = 0
    weights = 0 if view.offload("param") != "none" and stage == 3 else weight
    shares = [dp if stage >= least else 1 for least in (1, 2, 3)]
    least = int(mine * (states / shares[0] + (weight if states else 0) / shares[1] + weights / shares[2]))
    if least > view.context.gpu_bytes and view.context.gpu_bytes != GPU_BYTES:
        message = f"at least {format_bytes(least)} of model states for {format_bytes(view.context.gpu_bytes)} a GPU"
        if layout is None:
            message += ", where no layout splits the model"
        yield Violation("DS818", (_Z, "stage"), message)
    needed = int(mine * (2 + 4) + mine * 12 / dp)
    if needed > _STATES_FRACTION * view.context.gpu_bytes:
        return
    room = f"ZeRO-1 takes {format_bytes(needed)} of {format_bytes(view.context.gpu_bytes)} a GPU"
    offloads = [states_name for states_name in ("optimizer", "param") if view.offload(states_name) != "none"]
    if offloads and view.stage:
        yield Violation("DS803", (_Z, f"offload_{offloads[0]}"), f"offload of a model for which {room}")
    elif view.stage == 3:
        yield Violation("DS804", (_Z, "stage"), f"ZeRO-3 for a model for which {room}")
