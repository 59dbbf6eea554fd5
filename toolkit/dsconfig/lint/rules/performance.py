"""DS8: what runs, and could run faster or in less memory."""

from collections.abc import Iterator

from toolkit.dsconfig.lint.finding import INFO, WARNING, Edit, Found, Rule
from toolkit.dsconfig.lint.view import View
from toolkit.shape import ModelShape
from toolkit.units import format_bytes, format_count

_Z = "zero_optimization"
_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
_GPT2 = ModelShape.from_config({"model_type": "gpt2"})
_STATE_BYTES = 16
"""A parameter, its gradient, its fp32 copy and Adam's two moments; ZeRO's 16 bytes (Rajbhandari et al. 2020)."""
_HALF = 0.5
"""Share of a GPU's memory that states may take: the rest is for activations."""

RULES = (
    Rule(
        id="DS801",
        severity=WARNING,
        title="Buckets that are large for the model",
        effect="DeepSpeed allocates two buckets of this many elements while gradients are reduced: memory that a"
        " small model"
        " never fills.",
        mend="Take the parameters of one decoder layer, about 12 x hidden^2.",
        example={_Z: {"stage": 2, "reduce_bucket_size": 5e8}},
        given={"shape": _GPT2},
        fixable=True,
    ),
    Rule(
        id="DS802",
        severity=INFO,
        title="Communication does not overlap with the backward pass",
        effect="Each bucket is reduced while the GPU waits. Under ZeRO-1 and ZeRO-2 overlap_comm is off by default.",
        mend="Write overlap_comm: true; it takes a second bucket.",
        example={_Z: {"stage": 2, "overlap_comm": False}},
    ),
    Rule(
        id="DS803",
        severity=WARNING,
        title="Offload though there is room",
        effect="Each step moves gradients to the host and parameters back, and waits for the host's Adam.",
        mend="Remove the offload; take ZeRO-3 on more GPUs before it.",
        example={_Z: {"stage": 2, **_OFFLOAD}},
        given={"shape": _GPT2, "gpus": 8},
    ),
    Rule(
        id="DS804",
        severity=WARNING,
        title="ZeRO-3 where ZeRO-1 fits",
        effect="ZeRO-3 gathers every parameter twice in each micro-batch: 1.5 times the traffic of ZeRO-1, and more"
        " often.",
        mend="Set zero_optimization.stage to 1.",
        example={_Z: {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
        given={"shape": _GPT2, "gpus": 8},
    ),
    Rule(
        id="DS805",
        severity=INFO,
        title="A profiler or a breakdown is on",
        effect="It synchronizes the GPU or logs in each step.",
        mend="Switch it off for the real run.",
        example={"wall_clock_breakdown": True},
    ),
    Rule(
        id="DS806",
        severity=INFO,
        title="Offload without pinned memory",
        effect="Copies between host and GPU go through pageable memory: slower, and not beside the computation.",
        mend="Remove pin_memory: it is true by default.",
        example={_Z: {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
        sources=("https://github.com/deepspeedai/DeepSpeed/pull/8207",),
    ),
    Rule(
        id="DS807",
        severity=INFO,
        title="ZeRO on one GPU without offload",
        effect="There is nobody to share with: partitions, buckets and collectives only cost.",
        mend="Set zero_optimization.stage to 0, or offload.",
        example={_Z: {"stage": 3}},
        given={"gpus": 1},
    ),
    Rule(
        id="DS808",
        severity=INFO,
        title="ZeRO-2 with much accumulation",
        effect="ZeRO-2 reduces gradients in each micro-batch, ZeRO-1 once a step.",
        mend="Set zero_optimization.stage to 1 if its gradients fit.",
        example={"gradient_accumulation_steps": 32, _Z: {"stage": 2}},
    ),
    Rule(
        id="DS809",
        severity=INFO,
        title="activation_checkpointing for code that does not read it",
        effect="Only deepspeed.checkpointing.configure reads it. Hugging Face models recompute with PyTorch's"
        " function, and"
        " are switched on elsewhere.",
        mend="Use gradient_checkpointing of the model or the Trainer, and remove the section.",
        example={"activation_checkpointing": {"partition_activations": True}},
        sources=(
            "https://github.com/huggingface/accelerate/issues/2160",
            "https://github.com/deepspeedai/DeepSpeed/issues/5550",
        ),
    ),
    Rule(
        id="DS810",
        severity=INFO,
        title="A slower form of a collective",
        effect="Without reduce_scatter every rank gets all gradients; without allgather_partitions parameters are"
        " broadcast"
        " one rank after the other; without contiguous_gradients memory is fragmented.",
        mend="Remove the key: it is true by default.",
        example={_Z: {"stage": 2, "reduce_scatter": False}},
    ),
    Rule(
        id="DS811",
        severity=INFO,
        title="Reentrant activation checkpointing",
        effect="PyTorch advises against it: it recomputes more, needs inputs with a gradient, and ignores what else the"
        " backward pass holds.",
        mend='Pass gradient_checkpointing_kwargs={"use_reentrant": false}.',
        example={"train_micro_batch_size_per_gpu": 4},
        given={"trainer": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}},
    ),
    Rule(
        id="DS812",
        severity=WARNING,
        title="A persistence threshold that keeps every parameter whole",
        effect="Parameters below it are not sharded: ZeRO-3 then saves no parameter memory.",
        mend="Take ten times the hidden size: norms and biases stay whole, matrices do not.",
        example={_Z: {"stage": 3, "stage3_param_persistence_threshold": 1e8}},
        given={"shape": _GPT2},
        fixable=True,
    ),
    Rule(
        id="DS813",
        severity=INFO,
        title="A flat buffer per parameter for ZeRO-3",
        effect="sub_group_size bounds what the optimizer updates at once: with a small one, a step is many small"
        " kernels.",
        mend="Take 1e9, or 1e8 where the optimizer is offloaded and memory is short.",
        example={_Z: {"stage": 3, "sub_group_size": 1e5}},
    ),
)

_SWITCHES = ("wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler.enabled", "comms_logger.enabled")


def check(view: View) -> Iterator[Found]:
    """What follows from the file alone, then what needs the model."""
    yield from _switches(view)
    yield from _collectives(view)
    yield from _checkpointing(view)
    yield from _sizes(view)
    yield from _memory(view)


def _switches(view: View) -> Iterator[Found]:
    for name in _SWITCHES:
        if view.get(name) is True:
            path = tuple(name.split("."))
            yield Found("DS805", path, f"{name} is on")
    if view.get(f"{_Z}.enable_sanity_checks") is True and view.stage == 3:
        path = (_Z, "enable_sanity_checks")
        yield Found("DS805", path, f"{_Z}.enable_sanity_checks is on")
    for what in ("optimizer", "param"):
        path = (_Z, f"offload_{what}", "pin_memory")
        if view.offload(what) != "none" and view.get(".".join(path)) is False:
            yield Found("DS806", path, f"offload_{what}.pin_memory=false")


def _collectives(view: View) -> Iterator[Found]:
    stage = view.stage
    overlap = view.get(f"{_Z}.overlap_comm")
    alone = view.dp == 1
    if stage and not alone and not view.has_pipeline and not view.section("pipeline"):
        off = overlap is False or (overlap is None and stage < 3)
        if off:
            path = (_Z, "overlap_comm")
            how = "is off" if overlap is False else f"is not written, and off by default under ZeRO-{stage}"
            where = path if overlap is False else (_Z,)
            yield Found("DS802", where, f"overlap_comm {how}")
    for key in ("reduce_scatter", "allgather_partitions", "contiguous_gradients"):
        needed = view.get("prescale_gradients") or view.get("gradient_predivide_factor", 1.0) != 1.0
        if stage and view.get(f"{_Z}.{key}") is False and not (key == "reduce_scatter" and needed):
            yield Found("DS810", (_Z, key), f"{key} is off")
    offloads = view.offload("optimizer") != "none" or view.offload("param") != "none"
    if view.facts.gpus == 1 and stage and not offloads:
        yield Found("DS807", (_Z, "stage"), f"ZeRO-{stage} on one GPU")
    steps = view.number("gradient_accumulation_steps", 1) or 1
    if stage == 2 and steps >= 16 and not offloads:
        yield Found("DS808", (_Z, "stage"), f"ZeRO-2 with {steps} micro-batches a step")


def _checkpointing(view: View) -> Iterator[Found]:
    section = view.section("activation_checkpointing")
    if any(value not in (False, None) for value in section.values()):
        yield Found("DS809", ("activation_checkpointing",), "activation_checkpointing is set")
    kwargs = view.facts.trainer.get("gradient_checkpointing_kwargs")
    if isinstance(kwargs, dict) and kwargs.get("use_reentrant") is True:
        yield Found("DS811", (), "the Trainer recomputes with use_reentrant=True")


def _sizes(view: View) -> Iterator[Found]:
    shape, parameters = view.facts.shape, view.facts.parameters
    group = view.number(f"{_Z}.sub_group_size")
    if view.stage == 3 and group is not None and group < 1e7:
        path = (_Z, "sub_group_size")
        message = f"sub_group_size={format_count(group)} elements"
        yield Found("DS813", path, message)
    if shape is None or parameters is None or not view.stage:
        return
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if key == "allgather_bucket_size" and view.stage == 3:
            continue
        default = 5e8
        elements = view.number(f"{_Z}.{key}", default) or default
        if view.get(f"{_Z}.{key}") == "auto" or elements <= parameters or elements <= 2e7:
            continue
        path = (_Z, key)
        written = view.has(f"{_Z}.{key}")
        layer = max(12 * shape.hidden**2, 1 << 20)
        has = f"{format_count(elements)} elements{'' if written else ' by default'}"
        message = f"{key} is {has}, the model has {format_count(parameters)} parameters"
        yield Found("DS801", path if written else (_Z,), message, edits=(Edit("set", path, layer),))
    threshold = view.number(f"{_Z}.stage3_param_persistence_threshold", 0) or 0
    if view.stage == 3 and threshold >= 3 * shape.hidden**2:
        path = (_Z, "stage3_param_persistence_threshold")
        message = f"{path[1]}={format_count(threshold)}: every matrix of a decoder layer is smaller"
        yield Found("DS812", path, message, edits=(Edit("set", path, 10 * shape.hidden),))


def _memory(view: View) -> Iterator[Found]:
    """States under ZeRO-1, against the memory of a GPU; the fp32 sums of gradients are not sharded."""
    parameters, dp = view.facts.parameters, view.dp
    if parameters is None or dp is None or dp < 2:
        return
    layout = view.facts.layout
    mine = parameters / (layout.tp * layout.pp if layout else 1)
    needed = int(mine * (2 + 4) + mine * 12 / dp)
    if needed > _HALF * view.facts.gpu_bytes:
        return
    room = f"ZeRO-1 takes {format_bytes(needed)} of {format_bytes(view.facts.gpu_bytes)} a GPU"
    offloads = [what for what in ("optimizer", "param") if view.offload(what) != "none"]
    if offloads and view.stage:
        yield Found("DS803", (_Z, f"offload_{offloads[0]}"), f"offload of a model for which {room}")
    elif view.stage == 3:
        yield Found("DS804", (_Z, "stage"), f"ZeRO-3 for a model for which {room}")
