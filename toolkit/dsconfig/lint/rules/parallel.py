"""DS6: pipelines, tensor parallelism and sequence parallelism."""

from collections.abc import Iterator

from toolkit.dsconfig.lint.finding import ERROR, INFO, WARNING, Edit, Found, Rule, shown
from toolkit.dsconfig.lint.values import is_number
from toolkit.dsconfig.lint.view import View
from toolkit.layout import Layout

_PIPELINE = {"layout": Layout(pp=2)}

RULES = (
    Rule(
        id="DS601",
        severity=ERROR,
        title="ZeRO-2 or ZeRO-3 with a pipeline",
        effect="DeepSpeed's pipeline engine asserts that ZeRO-2 and ZeRO-3 are off.",
        mend="Set zero_optimization.stage to 1.",
        example={"zero_optimization": {"stage": 2}},
        given=_PIPELINE,
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/4164",),
        fixable=True,
    ),
    Rule(
        id="DS602",
        severity=WARNING,
        title="A pipeline section beside ZeRO-2 or ZeRO-3",
        effect="A PipelineModule stops with an assertion; with any other model the section has no effect.",
        mend="Set zero_optimization.stage to 1, or remove the pipeline section.",
        example={"zero_optimization": {"stage": 3}, "pipeline": {"activation_checkpoint_interval": 1}},
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/4164",),
    ),
    Rule(
        id="DS603",
        severity=ERROR,
        title="Pipeline checkpointing that fails on the first stage",
        effect="The reentrant default needs inputs with a gradient: training stops with `element 0 of tensors does not"
        " require grad`, unless the module names its checkpointable_layers.",
        mend="Write use_reentrant: false.",
        example={"pipeline": {"activation_checkpoint_interval": 1}},
        given=_PIPELINE,
        fixable=True,
    ),
    Rule(
        id="DS604",
        severity=ERROR,
        title="pipe_partitioned or grad_partitioned is not true or false",
        effect="The pipeline engine asserts that it is a bool.",
        mend="Write true or false.",
        example={"pipeline": {"pipe_partitioned": "auto"}},
        given=_PIPELINE,
    ),
    Rule(
        id="DS605",
        severity=INFO,
        title="overlap_comm with a pipeline",
        effect="DeepSpeed warns and switches it off: a pipeline sends gradients after its last micro-batch.",
        mend="Set overlap_comm to false.",
        example={"zero_optimization": {"stage": 1, "overlap_comm": True}},
        given=_PIPELINE,
        fixable=True,
    ),
    Rule(
        id="DS606",
        severity=WARNING,
        title="Fewer micro-batches than pipeline stages",
        effect="Stages wait for each other: of m micro-batches and p stages, (p - 1) / (m + p - 1) of the time is"
        " idle.",
        mend="Raise gradient_accumulation_steps to four times the stages or more.",
        example={"gradient_accumulation_steps": 2},
        given={"layout": Layout(pp=4)},
    ),
    Rule(
        id="DS607",
        severity=WARNING,
        title="Clipping in a pipeline without ZeRO",
        effect="DeepSpeed takes the gradient norm of the first stage for that of the model: later stages are left"
        " out, and"
        " tied weights counted twice. Each step is clipped by a wrong factor.",
        mend="Set zero_optimization.stage to 1, or gradient_clipping to 0.",
        example={"gradient_clipping": 1.0, "zero_optimization": {"stage": 0}},
        given=_PIPELINE,
        sources=("https://github.com/deepspeedai/DeepSpeed/pull/1252",),
        fixable=True,
    ),
    Rule(
        id="DS608",
        severity=WARNING,
        title="AutoTP without an mpu",
        effect="DeepSpeed counts every rank as data-parallel: total batch and accumulation come out autotp_size"
        " times wrong,"
        " and it steps too often.",
        mend="Give all three batch sizes so that they hold with data-parallel ranks alone, and pass an mpu.",
        example={"tensor_parallel": {"autotp_size": 2}},
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/7298",),
    ),
    Rule(
        id="DS609",
        severity=WARNING,
        title="Ulysses without ZeRO-3",
        effect="Gradients come out as many times too large as there are ranks on a sequence. Adam hides it; clipping"
        " and SGD"
        " do not.",
        mend="Set zero_optimization.stage to 3.",
        example={"sequence_parallel_size": 2, "data_parallel_size": 2, "zero_optimization": {"stage": 2}},
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/5248",),
    ),
    Rule(
        id="DS610",
        severity=WARNING,
        title="bf16 without ZeRO under tensor parallelism",
        effect="The optimizer that DeepSpeed takes then loses which parameters are split: the norm counts copies of the"
        " others, and clips by a wrong factor.",
        mend="Set zero_optimization.stage to 1.",
        example={"bf16": {"enabled": True}, "gradient_clipping": 1.0},
        given={"layout": Layout(tp=2)},
        sources=("https://github.com/deepspeedai/DeepSpeed/pull/5411",),
        fixable=True,
    ),
)


def check(view: View) -> Iterator[Found]:
    """Pipelines, then what shares samples otherwise."""
    yield from _pipeline(view)
    yield from _shared_samples(view)


def _pipeline(view: View) -> Iterator[Found]:
    section, stage = view.section("pipeline"), view.stage
    to_stage_1 = _to_stage_1(view)
    stage_path = ("zero_optimization", "stage")
    if stage > 1 and view.has_pipeline:
        message = f"zero_optimization.stage={stage} with {view.facts.pp} pipeline stages"
        yield Found("DS601", stage_path, message, edits=to_stage_1)
    elif stage > 1 and section and view.facts.layout is None:
        yield Found("DS602", ("pipeline",), f"a pipeline section with zero_optimization.stage={stage}")
    if not view.has_pipeline:
        return
    interval = view.number("pipeline.activation_checkpoint_interval", 0) or 0
    if interval > 0 and section.get("use_reentrant") is not False:
        edits = (Edit("set", ("pipeline", "use_reentrant"), False),)
        path = ("pipeline", "activation_checkpoint_interval")
        yield Found("DS603", path, "activation checkpointing without use_reentrant: false", edits=edits)
    for key in ("pipe_partitioned", "grad_partitioned"):
        if not isinstance(section.get(key, True), bool):
            yield Found("DS604", ("pipeline", key), f"pipeline.{key}={shown(section[key])}")
    if view.is_on("zero_optimization.overlap_comm") and stage == 1 and view.facts.runner != "toolkit":
        path = ("zero_optimization", "overlap_comm")
        yield Found("DS605", path, "overlap_comm in a pipeline", edits=(Edit("set", path, False),))
    steps = view.number("gradient_accumulation_steps")
    if steps is not None and steps < view.facts.pp:
        message = f"{steps} micro-batches for {view.facts.pp} pipeline stages"
        yield Found("DS606", ("gradient_accumulation_steps",), message)
    clips = (view.number("gradient_clipping", 1.0) or 0) > 0
    if clips and stage == 0 and view.facts.runner != "toolkit":
        message = "clipping in a pipeline with zero_optimization.stage=0"
        yield Found("DS607", ("gradient_clipping",), message, edits=to_stage_1)


def _shared_samples(view: View) -> Iterator[Found]:
    size = view.get("tensor_parallel.autotp_size", 0)
    if is_number(size) and size > 1:
        path = ("tensor_parallel", "autotp_size")
        yield Found("DS608", path, f"tensor_parallel.autotp_size={size}")
    layout = view.facts.layout
    ulysses = max(view.number("sequence_parallel_size", 1) or 1, layout.ulysses if layout else 1)
    if ulysses > 1 and view.stage < 3 and view.facts.runner != "toolkit":
        message = f"{ulysses} ranks share a sequence, with zero_optimization.stage={view.stage}"
        where = ("sequence_parallel_size",) if view.has("sequence_parallel_size") else ("zero_optimization", "stage")
        yield Found("DS609", where, message)
    clips = (view.number("gradient_clipping", 1.0) or 0) > 0
    bf16_only = view.precision == "bf16" and view.stage == 0 and clips
    if bf16_only and layout and layout.tp > 1 and layout.pp == 1 and view.facts.runner != "toolkit":
        message = f"bf16 with tp={layout.tp} and zero_optimization.stage=0"
        yield Found("DS610", ("bf16", "enabled"), message, edits=_to_stage_1(view))


def _to_stage_1(view: View) -> tuple[Edit, ...]:
    if view.has("zero_optimization"):
        return (Edit("set", ("zero_optimization", "stage"), 1),)
    return (Edit("set", ("zero_optimization",), {"stage": 1}),)
