"""DS5: what ZeRO's stages refuse, ignore or leave out."""

from collections.abc import Iterator

from toolkit.dsconfig.lint.finding import ERROR, WARNING, Edit, Found, Path, Rule, shown
from toolkit.dsconfig.lint.schema import optimizer, schema
from toolkit.dsconfig.lint.values import is_number
from toolkit.dsconfig.lint.view import View

_Z = "zero_optimization"
_ADAMW = {"type": "AdamW", "params": {"lr": 1e-4}}

_GATHERS = (
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)

RULES = (
    Rule(
        id="DS507",
        severity=WARNING,
        title="ZeRO-3 saves no whole model",
        effect="save_16bit_model writes nothing, and the Trainer only a sharded checkpoint, for zero_to_fp32.py to"
        " merge.",
        mend="Write stage3_gather_16bit_weights_on_model_save: true.",
        example={_Z: {"stage": 3}},
        sources=("https://github.com/huggingface/transformers/pull/25817",),
        fixable=True,
    ),
    Rule(
        id="DS508",
        severity=ERROR,
        title="compute_grad_norm=false where the norm is needed",
        effect="DeepSpeed raises ValueError: clipping, offload, ZenFlow, ZeRO-1's bf16 optimizer and every other stage"
        " need the norm.",
        mend="Remove compute_grad_norm, or use ZeRO-1 or 2 with gradient_clipping: 0.",
        example={"gradient_clipping": 1.0, _Z: {"stage": 2, "compute_grad_norm": False}},
        fixable=True,
    ),
    Rule(
        id="DS509",
        severity=WARNING,
        title="ZeRO++ without ZeRO-3",
        effect="DeepSpeed ignores hpZ, qwZ and qgZ outside of ZeRO-3.",
        mend="Set zero_optimization.stage to 3, or remove the key.",
        example={_Z: {"stage": 2, "zero_hpz_partition_size": 8}},
        fixable=True,
    ),
    Rule(
        id="DS510",
        severity=ERROR,
        title="An hpZ group that does not divide the GPUs",
        effect="DeepSpeed asserts that the ranks are a multiple of zero_hpz_partition_size.",
        mend="Set it to the GPUs of one machine.",
        example={_Z: {"stage": 3, "zero_hpz_partition_size": 8}},
        given={"gpus": 12},
    ),
    Rule(
        id="DS511",
        severity=ERROR,
        title="legacy_stage1",
        effect="DeepSpeed raises: the old ZeRO-1 was removed in 0.5.9.",
        mend="Remove it.",
        example={_Z: {"stage": 1, "legacy_stage1": True}},
        fixable=True,
    ),
    Rule(
        id="DS512",
        severity=WARNING,
        title="Elastic checkpoints with ZeRO-3",
        effect="DeepSpeed warns and ignores it.",
        mend="Remove elastic_checkpoint, and use universal checkpoints.",
        example={_Z: {"stage": 3, "elastic_checkpoint": True}},
        fixable=True,
    ),
    Rule(
        id="DS513",
        severity=ERROR,
        title="Scaling before the sum with reduce_scatter",
        effect="ZeRO-2 and 3 assert that gradients are divided after the sum while reduce_scatter is on (the default).",
        mend="Remove prescale_gradients and gradient_predivide_factor, or set reduce_scatter to false.",
        example={"prescale_gradients": True, _Z: {"stage": 2}},
        fixable=True,
    ),
    Rule(
        id="DS514",
        severity=ERROR,
        title="gradient_allreduce_op=sum where only the mean is built",
        effect="DeepSpeed raises ValueError under ZeRO-3, ZenFlow and DeepCompile.",
        mend='Write "mean", and scale the loss.',
        example={"gradient_allreduce_op": "sum", _Z: {"stage": 3}},
        fixable=True,
    ),
    Rule(
        id="DS515",
        severity=ERROR,
        title="An optimizer that ZeRO was not tested with",
        effect="DeepSpeed asserts that zero_allow_untested_optimizer is on.",
        mend='Write "zero_allow_untested_optimizer": true, or take Adam, AdamW, Adagrad, Lion or Muon.',
        example={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, _Z: {"stage": 1}},
        fixable=True,
    ),
    Rule(
        id="DS516",
        severity=ERROR,
        title="managed_gradient_accumulation=false with what needs it",
        effect="DeepSpeed asserts: not with overlap_comm outside of ZeRO-2 and 3, not with a pipeline or DeepCompile.",
        mend="Remove managed_gradient_accumulation.",
        example={"managed_gradient_accumulation": False, _Z: {"stage": 1, "overlap_comm": True}},
        fixable=True,
    ),
    Rule(
        id="DS517",
        severity=ERROR,
        title="ZenFlow without offload",
        effect="DeepSpeed raises: ZenFlow must be used with CPU offload.",
        mend='Add "offload_optimizer": {"device": "cpu"}, or remove zenflow.',
        example={_Z: {"stage": 2, "zenflow": {"topk_ratio": 0.1}}, "optimizer": _ADAMW},
    ),
    Rule(
        id="DS518",
        severity=ERROR,
        title="Quantized weights under autocast",
        effect="DeepSpeed asserts that torch_autocast and zero_quantized_weights are not both on.",
        mend="Switch one of them off.",
        example={"torch_autocast": {"enabled": True}, _Z: {"stage": 3, "zero_quantized_weights": True}},
    ),
)


def check(view: View) -> Iterator[Found]:
    """One group of questions after the other."""
    yield from _features(view)
    yield from _norm(view)
    yield from _reduction(view)
    yield from _optimizer(view)


def _features(view: View) -> Iterator[Found]:
    stage = view.stage
    if stage == 3 and not any(view.is_on(f"{_Z}.{key}") for key in _GATHERS):
        written = next((key for key in _GATHERS if view.has(f"{_Z}.{key}")), None)
        if written is None or view.get(f"{_Z}.{written}") != "auto" or view.facts.runner != "toolkit":
            path: Path = (_Z, written or _GATHERS[0])
            why = f"{_GATHERS[0]} is {'not on' if written else 'missing'}"
            yield Found("DS507", path if written else (_Z,), why, edits=(Edit("set", path, True),))
    for key, on in (
        ("zero_hpz_partition_size", (view.number(f"{_Z}.zero_hpz_partition_size", 1) or 1) > 1),
        *((key, view.is_on(f"{_Z}.{key}")) for key in ("zero_quantized_weights", "zero_quantized_gradients")),
        ("zero_quantized_nontrainable_weights", view.is_on(f"{_Z}.zero_quantized_nontrainable_weights")),
    ):
        if on and stage != 3:
            path = (_Z, key)
            message = f"{key} with zero_optimization.stage={stage}"
            yield Found("DS509", path, message, edits=(Edit("remove", path),))
    group = view.number(f"{_Z}.zero_hpz_partition_size", 1) or 1
    gpus = view.facts.gpus or 0
    if stage == 3 and 1 < group < gpus and gpus % group:
        path = (_Z, "zero_hpz_partition_size")
        yield Found("DS510", path, f"{gpus} GPUs are no multiple of zero_hpz_partition_size={group}")
    if view.is_on(f"{_Z}.legacy_stage1") and stage:
        path = (_Z, "legacy_stage1")
        yield Found("DS511", path, "legacy_stage1 is on", edits=(Edit("remove", path),))
    if view.is_on(f"{_Z}.elastic_checkpoint") and stage == 3:
        path = (_Z, "elastic_checkpoint")
        yield Found("DS512", path, "elastic_checkpoint with ZeRO-3", edits=(Edit("remove", path),))
    if isinstance(view.get(f"{_Z}.zenflow"), dict) and view.offload("optimizer") == "none" and stage:
        yield Found("DS517", (_Z, "zenflow"), "zenflow without offload_optimizer")
    if view.is_on("torch_autocast.enabled") and view.is_on(f"{_Z}.zero_quantized_weights"):
        yield Found("DS518", (_Z, "zero_quantized_weights"), "zero_quantized_weights with torch_autocast")


def _norm(view: View) -> Iterator[Found]:
    path = (_Z, "compute_grad_norm")
    if view.is_on(".".join(path), default=True):
        return
    stage = view.stage
    clips = (view.number("gradient_clipping", 1.0) or 0) > 0
    fp32_sums = view.get("data_types.grad_accum_dtype") in ("fp32", "float32", "float", "torch.float32")
    reasons = [
        (stage not in (1, 2), f"zero_optimization.stage={stage}"),
        (stage == 1 and view.precision == "bf16" and fp32_sums, "bf16 with gradients in fp32"),
        (clips and stage > 0, "gradient_clipping, which is 1.0 by default"),
        (view.offload("optimizer") != "none", "offload_optimizer"),
    ]
    reason = next((text for applies, text in reasons if applies), None)
    if reason:
        yield Found("DS508", path, f"compute_grad_norm=false with {reason}", edits=(Edit("remove", path),))


def _reduction(view: View) -> Iterator[Found]:
    stage = view.stage
    scatter = view.is_on(f"{_Z}.reduce_scatter", default=True)
    if stage in (2, 3) and scatter:
        if view.get("prescale_gradients"):
            path: Path = ("prescale_gradients",)
            message = f"prescale_gradients with ZeRO-{stage} and reduce_scatter"
            yield Found("DS513", path, message, edits=(Edit("remove", path),))
        factor = view.get("gradient_predivide_factor", 1.0)
        if factor != 1.0:
            path = ("gradient_predivide_factor",)
            message = f"gradient_predivide_factor={shown(factor)} with ZeRO-{stage} and reduce_scatter"
            yield Found("DS513", path, message, edits=(Edit("remove", path),))
    op = view.get("gradient_allreduce_op")
    if isinstance(op, str) and op.lower() == "sum":
        zenflow = isinstance(view.get(f"{_Z}.zenflow"), dict)
        deepcompile = view.is_on("compile.deepcompile")
        if stage == 3 or zenflow or deepcompile:
            why = "ZeRO-3" if stage == 3 else "zenflow" if zenflow else "compile.deepcompile"
            edits = (Edit("set", ("gradient_allreduce_op",), "mean"),)
            yield Found("DS514", ("gradient_allreduce_op",), f"gradient_allreduce_op=sum with {why}", edits=edits)
    managed = view.get("managed_gradient_accumulation", True)
    overlap = view.is_on(f"{_Z}.overlap_comm", default=stage == 3)
    if managed is not None and not managed:
        for applies, why in (
            (overlap and stage < 2, f"overlap_comm and zero_optimization.stage={stage}"),
            (view.has_pipeline, "a pipeline"),
            (view.is_on("compile.deepcompile"), "compile.deepcompile"),
        ):
            if applies:
                path = ("managed_gradient_accumulation",)
                message = f"managed_gradient_accumulation=false with {why}"
                yield Found("DS516", path, message, edits=(Edit("remove", path),))


def _optimizer(view: View) -> Iterator[Found]:
    name = view.get("optimizer.type")
    if not isinstance(name, str) or not view.stage or optimizer(name) is None:
        return
    own = name.lower() in ("adam", "adamw", "adagrad", "lion", "muon")
    if own or name in schema()["optimizers"]["tested"]:
        return
    allowed = view.get("zero_allow_untested_optimizer")
    if not allowed or (is_number(allowed) and allowed == 0):
        edits = (Edit("set", ("zero_allow_untested_optimizer",), True),)
        message = f"optimizer.type={name} with ZeRO-{view.stage}"
        yield Found("DS515", ("optimizer", "type"), message, edits=edits)
