"""DS3: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp."""

from collections.abc import Iterator

from toolkit.dsconfig.lint.finding import ERROR, INFO, WARNING, Edit, Found, Rule
from toolkit.dsconfig.lint.values import is_number
from toolkit.dsconfig.lint.view import View
from toolkit.layout import Layout

_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_BOTH = {_TOTAL: 64, _MICRO: 4, _STEPS: 2}

RULES = (
    Rule(
        id="DS301",
        severity=ERROR,
        title="The three batch sizes contradict each other",
        effect="DeepSpeed asserts total = micro-batch x accumulation x data-parallel ranks, and stops.",
        mend="Leave one of the three out: DeepSpeed derives it.",
        example=_BOTH,
        given={"gpus": 16},
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/6914",),
        fixable=True,
    ),
    Rule(
        id="DS302",
        severity=ERROR,
        title="No batch size",
        effect="DeepSpeed asserts that train_batch_size or train_micro_batch_size_per_gpu is given.",
        mend='Write train_micro_batch_size_per_gpu, or "auto" for the Trainer and Accelerator.',
        example={_STEPS: 4, "gradient_clipping": 1.0},
    ),
    Rule(
        id="DS303",
        severity=ERROR,
        title="A batch size that is not positive",
        effect="DeepSpeed asserts that each is greater than 0.",
        mend="Write a whole number from 1.",
        example={_MICRO: 0},
    ),
    Rule(
        id="DS304",
        severity=ERROR,
        title="A total batch that does not divide",
        effect="DeepSpeed rounds the derived size down, and then asserts that the product is the total.",
        mend="Choose a total that is a multiple of micro-batch (or accumulation) x data-parallel ranks.",
        example={_TOTAL: 30, _MICRO: 4},
        given={"gpus": 4},
    ),
    Rule(
        id="DS305",
        severity=INFO,
        title="Only the total batch size is given",
        effect="DeepSpeed takes an accumulation of 1: the whole share of a GPU is one micro-batch.",
        mend="Write train_micro_batch_size_per_gpu too.",
        example={_TOTAL: 512},
    ),
    Rule(
        id="DS306",
        severity=INFO,
        title="The total batch follows the number of GPUs",
        effect="On another number of GPUs DeepSpeed trains with another total batch, and says nothing.",
        mend="Write train_batch_size, and leave the accumulation to DeepSpeed.",
        example={_MICRO: 4, _STEPS: 2},
    ),
    Rule(
        id="DS307",
        severity=ERROR,
        title="A total batch for all ranks, though they share samples",
        effect="Ranks of one tensor-parallel, pipeline or sequence group see the same samples: DeepSpeed counts the"
        " group"
        " once, and stops.",
        mend="Divide by tp x pp x ulysses: only data-parallel ranks count.",
        example={_TOTAL: 64, _MICRO: 4, _STEPS: 2},
        given={"gpus": 8, "layout": Layout(tp=2)},
        fixable=True,
    ),
    Rule(
        id="DS308",
        severity=ERROR,
        title="GPUs that the model's ranks do not divide",
        effect="DeepSpeed cannot build its groups, and stops.",
        mend="Take a multiple of tp x pp x ulysses GPUs.",
        example={_MICRO: 4},
        given={"gpus": 6, "layout": Layout(tp=4)},
    ),
    Rule(
        id="DS309",
        severity=WARNING,
        title="sequence_parallel_size without data_parallel_size",
        effect="Without data_parallel_size and without an mpu, DeepSpeed divides the batch by it, and splits no"
        " sequence.",
        mend="Write data_parallel_size too, or pass the mpu of UlyssesSPAttentionHF.",
        example={_MICRO: 4, "sequence_parallel_size": 2},
    ),
)


def check(view: View) -> Iterator[Found]:
    """The sizes themselves, then how they fit together."""
    sizes = {name: view.get(name) for name in (_TOTAL, _MICRO, _STEPS)}
    sizes = {name: int(size) if isinstance(size, bool) else size for name, size in sizes.items()}  # as DeepSpeed counts
    bad = [name for name, size in sizes.items() if is_number(size) and not size > 0]
    for name in bad:
        yield Found("DS303", (name,), f"{name}={sizes[name]} is not positive")
    if sizes[_TOTAL] is None and sizes[_MICRO] is None:
        yield Found("DS302", (), f"neither {_TOTAL} nor {_MICRO} is given")
    yield from _ranks(view)
    known = {name: size for name, size in sizes.items() if is_number(size)}
    given = [name for name, size in sizes.items() if size is not None]
    if bad or len(known) != len(given):
        return  # the rest follows from auto, or is no number
    if len(known) == 3:
        yield from _triangle(view, known)
    elif _TOTAL in known and len(known) == 2:
        yield from _derived(view, known)
    elif given == [_TOTAL]:
        dp = view.dp or 1
        yield from _derived(view, known)
        if known[_TOTAL] / dp > 16:
            yield Found("DS305", (_TOTAL,), f"only {_TOTAL}={known[_TOTAL]} is given")
    elif _MICRO in known and view.facts.runner == "deepspeed":
        yield Found("DS306", (_MICRO,), f"{_TOTAL} is not given")


def _ranks(view: View) -> Iterator[Found]:
    facts = view.facts
    if facts.layout is not None and facts.gpus is not None and facts.gpus % facts.layout.model_size:
        message = f"{facts.gpus} GPUs are no multiple of the {facts.layout.model_size} ranks that share one model"
        yield Found("DS308", (), message)
    size = view.number("sequence_parallel_size", 1) or 1
    if size > 1 and not view.has("data_parallel_size") and (facts.layout is None or facts.layout.ulysses == 1):
        message = f"sequence_parallel_size={size} is given without data_parallel_size"
        yield Found("DS309", ("sequence_parallel_size",), message)


def _triangle(view: View, known: dict[str, float]) -> Iterator[Found]:
    total, micro, steps = known[_TOTAL], known[_MICRO], known[_STEPS]
    dp = view.dp
    if dp is None:
        if total % (micro * steps):
            message = f"{_TOTAL}={total} is no multiple of {micro} x {steps} = {micro * steps}"
            yield Found("DS301", (_TOTAL,), message, edits=_leave_out(view))
        return
    right = micro * steps * dp
    if total == right:
        return
    gpus = view.facts.gpus or 0
    edits = (Edit("set", (_TOTAL,), int(right)),) if right == int(right) else ()
    if dp != gpus and total == micro * steps * gpus:
        shared = gpus // dp
        message = f"{_TOTAL}={total} counts {gpus} GPUs, but {shared} of them share each sample: it is {right}"
        yield Found("DS307", (_TOTAL,), message, mend=f"Write {right}.", edits=edits)
        return
    ranks = f"{dp} data-parallel rank{'s' * (dp > 1)}"
    message = f"{_TOTAL}={total}, but {micro} x {steps} x {ranks} = {right}"
    yield Found("DS301", (_TOTAL,), message, edits=_leave_out(view))


def _leave_out(view: View) -> tuple[Edit, ...]:
    """Keep the total, which is part of the training, and the micro-batch, which fits the memory."""
    total, micro = view.number(_TOTAL, 0) or 0, view.number(_MICRO, 1) or 1
    fits = total % (micro * (view.dp or 1)) == 0
    return (Edit("remove", (_STEPS,)),) if fits else ()


def _derived(view: View, known: dict[str, float]) -> Iterator[Found]:
    dp = view.dp or 1
    other = next((name for name in known if name != _TOTAL), None)
    per_step = dp * (known[other] if other else 1)
    if known[_TOTAL] % per_step == 0:
        return
    product = f"{known[other]} x {dp}" if other else f"{dp} ranks"
    message = f"{_TOTAL}={known[_TOTAL]} is no multiple of {product}" + (f" = {per_step}" if other else "")
    yield Found("DS304", (_TOTAL,), message)
