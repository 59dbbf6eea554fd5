"""DS3: train_batch_size = micro-batch x accumulation x dp; DS6: pipelines, tensor and sequence parallelism."""

import math
from collections.abc import Iterator

from toolkit.lint.finding import INFO, Edit, Violation, remove, set_to, shown
from toolkit.lint.values import is_number
from toolkit.lint.view import BATCH_SIZES, View
from toolkit.units import plural

_TOTAL, _MICRO, _STEPS = BATCH_SIZES


def check(view: View) -> Iterator[Violation]:
    """Check batch sizes, pipelines, then tensor and sequence parallelism."""
    yield from _batch_sizes(view)
    yield from _pipeline(view)
    yield from _tensor_and_sequence(view)


def _batch_sizes(view: View) -> Iterator[Violation]:
    """Check each size, then whether they agree."""
    sizes = {name: view.get(name) for name in (_TOTAL, _MICRO, _STEPS)}
    sizes = {name: int(size) if isinstance(size, bool) else size for name, size in sizes.items()}  # as DeepSpeed counts
    bad = [name for name, size in sizes.items() if is_number(size) and not size > 0]
    for name in bad:
        yield Violation("DS303", (name,), f"{name}={sizes[name]} is not positive")
    if sizes[_TOTAL] is None and sizes[_MICRO] is None:
        yield Violation("DS302", (), f"neither {_TOTAL} nor {_MICRO} is given")
    yield from _ranks(view)
    known = {name: size for name, size in sizes.items() if is_number(size)}
    written = [name for name, size in sizes.items() if size is not None]
    if bad or len(known) != len(written):
        return  # the rest is auto, or not a number
    if len(known) == 3:
        yield from _product(view, known)
    elif _TOTAL in known and len(known) == 2:
        yield from _derived(view, known)
    elif written == [_TOTAL]:
        dp = view.dp or 1
        yield from _derived(view, known)
        if known[_TOTAL] / dp > 16:
            yield Violation("DS305", (_TOTAL,), f"only {_TOTAL}={known[_TOTAL]} is given")
    elif _MICRO in known and view.context.runner == "deepspeed":
        yield Violation("DS306", (_MICRO,), f"{_TOTAL} is not given")


def _ranks(view: View) -> Iterator[Violation]:
    context = view.context
    if context.layout is not None and context.gpus is not None and context.gpus % context.layout.model_size:
        share = f"the {context.layout.model_size} ranks that share one model"
        message = f"{context.gpus} GPUs are not a multiple of {share}"
        yield Violation("DS308", (), message)
    size = view.number("sequence_parallel_size", 1) or 1
    tp = view.number("tensor_parallel.autotp_size", 1) or 1
    dp = view.number("data_parallel_size")
    if context.gpus and size > 1 and dp and size * dp != context.gpus:
        message = f"data_parallel_size x sequence_parallel_size = {dp} x {size}, on {context.gpus} GPUs"
        yield Violation("DS611", ("sequence_parallel_size",), message)
    if context.gpus and tp > 0 and context.gpus % tp:
        message = f"{context.gpus} GPUs are not a multiple of tensor_parallel.autotp_size={tp}"
        yield Violation("DS611", ("tensor_parallel", "autotp_size"), message)
    splits = view.has("data_parallel_size") or view.has_autosp or (context.layout and context.layout.ulysses > 1)
    if size > 1 and not splits:
        message = f"sequence_parallel_size={size} is given without data_parallel_size"
        yield Violation("DS309", ("sequence_parallel_size",), message)


def _product(view: View, known: dict[str, float]) -> Iterator[Violation]:
    total = known[_TOTAL]
    micro = known[_MICRO]
    steps = known[_STEPS]
    dp = view.dp
    if dp is None:
        if total % (micro * steps):
            message = f"{_TOTAL}={total} is not a multiple of {micro} x {steps} = {micro * steps}"
            yield Violation("DS301", (_TOTAL,), message, edits=_derive_accumulation(view))
        return
    right = micro * steps * dp
    if total == right:
        return
    gpus = view.context.gpus or 0
    if dp != gpus and total == micro * steps * gpus:
        shared = gpus // dp
        message = f"{_TOTAL}={total} counts {gpus} GPUs, but {shared} of them share each sample: it is {right}"
        fix = f"Write {right}, or keep the total and raise {_STEPS}."
        yield Violation("DS307", (_TOTAL,), message, fix=fix)
        return
    message = f"{_TOTAL}={total}, but {micro} x {steps} x {plural(dp, 'data-parallel rank')} = {right}"
    if view.context.layout is None and total % (micro * steps) == 0:
        yield _other_ranks(view, message, int(total // (micro * steps)))
        return
    yield Violation("DS301", (_TOTAL,), message, edits=_derive_accumulation(view))


def _other_ranks(view: View, message: str, needed: int) -> Violation:
    """Say for how many data-parallel ranks the sizes are right: without a layout, that may be what these GPUs are."""
    gpus = view.context.gpus or 0
    message += f"; the file is right for {plural(needed, 'data-parallel rank')}"
    if gpus % needed:
        fix = f"Give the GPUs and the layout that it is for (--gpus {needed}), or leave one of the three out."
        return Violation("DS310", (_TOTAL,), message, fix=fix)
    shared = gpus // needed
    message += f": {gpus} GPUs with tp x pp x ulysses = {shared}"
    fix = f"Give the --layout (tp x pp x ulysses = {shared}) or --gpus {needed}, or leave one of the three out."
    # A section of a pipeline says that GPUs do share samples.
    severity = INFO if view.section("pipeline") else None
    return Violation("DS310", (_TOTAL,), message, fix=fix, severity=severity)


def _derive_accumulation(view: View) -> tuple[Edit, ...]:
    """Remove the accumulation: the total defines the training, and the micro-batch fits the memory."""
    total = view.number(_TOTAL, 0) or 0
    micro = view.number(_MICRO, 1) or 1
    fits = total % (micro * (view.dp or 1)) == 0
    return remove((_STEPS,)) if fits else ()


def _derived(view: View, known: dict[str, float]) -> Iterator[Violation]:
    dp = view.dp or 1
    factor = next((name for name in known if name != _TOTAL), None)
    per_step = dp * (known[factor] if factor else 1)
    if known[_TOTAL] % per_step == 0:
        return
    product = f"{known[factor]} x {dp}" if factor else f"{dp} ranks"
    message = f"{_TOTAL}={known[_TOTAL]} is not a multiple of {product}" + (f" = {per_step}" if factor else "")
    each = per_step // dp
    if view.context.layout is None and known[_TOTAL] % each == 0:  # then the ranks are too many
        shared = dp // math.gcd(dp, int(known[_TOTAL] // each))
        message += f"; it is where {shared} GPUs share each sample (--layout)"
    yield Violation("DS304", (_TOTAL,), message)


def _pipeline(view: View) -> Iterator[Violation]:
    section = view.section("pipeline")
    stage = view.stage
    to_stage_1 = _to_stage_1(view)
    if stage > 1 and view.has_pipeline:
        message = f"zero_optimization.stage={stage} with {view.context.pp} pipeline stages"
        yield Violation("DS601", ("zero_optimization", "stage"), message, edits=to_stage_1)
    elif stage > 1 and section and view.context.layout is None:
        yield Violation("DS602", ("pipeline",), f"a pipeline section with zero_optimization.stage={stage}")
    if not view.has_pipeline:
        return
    interval = view.number("pipeline.activation_checkpoint_interval", 0) or 0
    if interval > 0 and section.get("use_reentrant") is not False:
        edits = set_to(("pipeline", "use_reentrant"), False)
        path = ("pipeline", "activation_checkpoint_interval")
        yield Violation("DS603", path, "activation checkpointing without use_reentrant: false", edits=edits)
    for key in ("pipe_partitioned", "grad_partitioned"):
        if not isinstance(section.get(key, True), bool):
            yield Violation("DS604", ("pipeline", key), f"pipeline.{key}={shown(section[key])}")
    steps = view.number("gradient_accumulation_steps")
    if steps is not None and steps < view.context.pp:
        message = f"{steps} micro-batches for {view.context.pp} pipeline stages"
        yield Violation("DS606", ("gradient_accumulation_steps",), message)
    clips = (view.number("gradient_clipping", 1.0) or 0) > 0
    if clips and stage == 0 and view.context.runner != "toolkit":
        message = "clipping in a pipeline with zero_optimization.stage=0"
        yield Violation("DS607", ("gradient_clipping",), message, edits=to_stage_1)


def _tensor_and_sequence(view: View) -> Iterator[Violation]:
    layout = view.context.layout
    ulysses = max(view.number("sequence_parallel_size", 1) or 1, layout.ulysses if layout else 1)
    if ulysses > 1 and view.stage < 3 and view.context.runner != "toolkit" and not view.has_autosp:
        message = f"{ulysses} ranks share a sequence, with zero_optimization.stage={view.stage}"
        where = ("sequence_parallel_size",) if view.has("sequence_parallel_size") else ("zero_optimization", "stage")
        yield Violation("DS609", where, message)
    clips = (view.number("gradient_clipping", 1.0) or 0) > 0
    bf16_only = view.precision == "bf16" and view.stage == 0 and clips
    if bf16_only and layout and layout.tp > 1 and layout.pp == 1 and view.context.runner != "toolkit":
        message = f"bf16 with tp={layout.tp} and zero_optimization.stage=0"
        yield Violation("DS610", ("bf16", "enabled"), message, edits=_to_stage_1(view))


def _to_stage_1(view: View) -> tuple[Edit, ...]:
    if view.has("zero_optimization"):
        return set_to(("zero_optimization", "stage"), 1)
    return set_to(("zero_optimization",), {"stage": 1})
