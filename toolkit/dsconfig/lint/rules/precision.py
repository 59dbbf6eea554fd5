"""DS4: bf16, fp16, autocast, and in which precision gradients are summed."""

from collections.abc import Iterator

from toolkit.dsconfig.lint.finding import ERROR, INFO, WARNING, Edit, Found, Rule, shown
from toolkit.dsconfig.lint.view import View

_BF16 = {"bf16": {"enabled": True}}
_HALVES = {"bf16": {"bf16", "bfloat16", "torch.bfloat16"}, "fp16": {"fp16", "float16", "half", "torch.float16"}}
_HALVES |= {"fp32": {"fp32", "float32", "float", "torch.float32"}}

RULES = (
    Rule(
        id="DS401",
        severity=ERROR,
        title="bf16 and fp16 are both on",
        effect="DeepSpeed asserts that at most one of them is enabled.",
        mend="Switch one off: bf16 needs an Ampere GPU or newer, and no loss scaling.",
        example={"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        fixable=True,
    ),
    Rule(
        id="DS402",
        severity=WARNING,
        title="torch_autocast beside bf16 or fp16",
        effect="The weights are cast to 16 bits, and autocast runs over them: its fp32 weights, which are its point,"
        " are"
        " gone.",
        mend="Switch one of them off.",
        example={**_BF16, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    ),
    Rule(
        id="DS403",
        severity=ERROR,
        title="Gradients summed in another precision without ZeRO",
        effect="DeepSpeed raises NotImplementedError: unsupported mix of model_dtype and grad_accum_dtype.",
        mend="Set zero_optimization.stage to 1, 2 or 3, or remove data_types.grad_accum_dtype, or use torch_autocast.",
        example={**_BF16, "data_types": {"grad_accum_dtype": "fp32"}},
        sources=("https://github.com/deepspeedai/DeepSpeed/pull/7803",),
    ),
    Rule(
        id="DS404",
        severity=INFO,
        title="Gradients summed in 16 bits",
        effect="DeepSpeed accumulates micro-batches in the model's own precision: small gradients are lost in a"
        " large sum.",
        mend='Write "data_types": {"grad_accum_dtype": "fp32"}.',
        example={**_BF16, "gradient_accumulation_steps": 16, "zero_optimization": {"stage": 2}},
    ),
    Rule(
        id="DS405",
        severity=INFO,
        title="No precision is chosen",
        effect="DeepSpeed trains in fp32: 16 bytes a parameter, and none of the 16-bit tensor cores.",
        mend='Write "bf16": {"enabled": true}, or "bf16": {"enabled": false} where fp32 is meant.',
        example={"train_micro_batch_size_per_gpu": 4},
    ),
    Rule(
        id="DS406",
        severity=ERROR,
        title="16-bit master weights without ZeRO",
        effect="DeepSpeed asserts that master weights in 16 bits need ZeRO 1, 2 or 3.",
        mend="Set zero_optimization.stage, or remove the key.",
        example={"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    ),
    Rule(
        id="DS407",
        severity=ERROR,
        title="16-bit master weights without DeepSpeedCPUAdam",
        effect="DeepSpeed asserts that the optimizer is offloaded to the host and is its own CPU Adam.",
        mend="Offload the optimizer to cpu, and leave torch_adam out.",
        example={"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": {"stage": 2}},
    ),
    Rule(
        id="DS408",
        severity=ERROR,
        title="bf16_optimizer_states without bf16_master_weights_and_grads",
        effect="DeepSpeed asserts that the second one is on.",
        mend="Switch both on or both off.",
        example={"bf16": {"enabled": True, "bf16_optimizer_states": True}, "zero_optimization": {"stage": 2}},
    ),
    Rule(
        id="DS409",
        severity=ERROR,
        title="data_types.param_dtype against the precision",
        effect="DeepSpeed asserts that it is the precision of the section that is on.",
        mend="Remove data_types.param_dtype.",
        example={**_BF16, "data_types": {"param_dtype": "fp16"}},
        fixable=True,
    ),
    Rule(
        id="DS410",
        severity=WARNING,
        title="Gradients are sent as fp16, and fp16 is not on",
        effect="Gradients beyond 65504 become infinite on the way, and no loss scaling holds them back.",
        mend='Write "fp32" or "bf16", or remove communication_data_type.',
        example={**_BF16, "communication_data_type": "fp16"},
        fixable=True,
    ),
    Rule(
        id="DS411",
        severity=INFO,
        title="A constant loss scale",
        effect="DeepSpeed does not adapt the scale: steps that overflow are skipped for as long as they do.",
        mend='Write "loss_scale": 0, which adapts it.',
        example={"fp16": {"enabled": True, "loss_scale": 128}},
    ),
    Rule(
        id="DS412",
        severity=INFO,
        title="bf16 without a check for NaN",
        effect="DeepSpeed applies gradients that are NaN or infinite: the weights are lost, and it says nothing.",
        mend="Leave check_grad_overflow out: it is on by default.",
        example={"bf16": {"enabled": True, "check_grad_overflow": False}},
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/5242",),
    ),
)


def check(view: View) -> Iterator[Found]:
    """One group of questions after the other."""
    yield from _which(view)
    yield from _sums(view)
    yield from _master_weights(view)
    yield from _overflow(view)


def _which(view: View) -> Iterator[Found]:
    bf16, fp16 = view.is_on(f"{view.bf16}.enabled"), view.is_on("fp16.enabled")
    if bf16 and fp16:
        edits = (Edit("set", ("fp16", "enabled"), False),)
        yield Found("DS401", ("fp16", "enabled"), "bf16 and fp16 are both enabled", edits=edits)
    elif (bf16 or fp16) and view.is_on("torch_autocast.enabled"):
        name = view.bf16 if bf16 else "fp16"
        yield Found("DS402", ("torch_autocast", "enabled"), f"torch_autocast and {name} are both enabled")
    precisions = (view.bf16, "fp16", "torch_autocast")
    if not any(view.has(name) for name in precisions) and view.facts.runner == "deepspeed":
        yield Found("DS405", (), "neither bf16 nor fp16 nor torch_autocast is written")
    wanted = view.get("data_types.param_dtype")
    if _is_another(wanted, view) and view.facts.runner == "deepspeed":
        path = ("data_types", "param_dtype")
        message = f"data_types.param_dtype={shown(wanted)}, but the model is in {view.precision}"
        yield Found("DS409", path, message, edits=(Edit("remove", path),))


def _is_another(wanted: object, view: View) -> bool:
    """Whether a word names another precision than the model's."""
    known = isinstance(wanted, str) and any(wanted in words for words in _HALVES.values())
    return known and wanted not in _HALVES[view.precision]


def _sums(view: View) -> Iterator[Found]:
    wanted = view.get("data_types.grad_accum_dtype")
    path = ("data_types", "grad_accum_dtype")
    if view.stage == 0 and _is_another(wanted, view):
        message = f"grad_accum_dtype={shown(wanted)} with a model in {view.precision} and zero_optimization.stage=0"
        yield Found("DS403", path, message)
    steps = view.number("gradient_accumulation_steps", 1) or 1
    if wanted is None and view.precision != "fp32" and view.stage > 0 and steps >= 8:
        message = f"{steps} micro-batches are summed in {view.precision}"
        yield Found("DS404", ("gradient_accumulation_steps",), message)


def _master_weights(view: View) -> Iterator[Found]:
    for section, key in ((view.bf16, "bf16_master_weights_and_grads"), ("fp16", "fp16_master_weights_and_grads")):
        if not view.is_on(f"{section}.{key}"):
            continue
        torch_adam = view.get("optimizer.params.torch_adam")
        if view.stage == 0:
            yield Found("DS406", (section, key), f"{section}.{key} with zero_optimization.stage=0")
        elif view.offload("optimizer") == "none" or (torch_adam and view.has("optimizer")):
            why = "torch_adam" if torch_adam else "the optimizer on the GPU"
            yield Found("DS407", (section, key), f"{section}.{key} with {why}")
    path = (view.bf16, "bf16_optimizer_states")
    if view.is_on(".".join(path)) and not view.is_on(f"{view.bf16}.bf16_master_weights_and_grads"):
        yield Found("DS408", path, f"{view.bf16}.bf16_optimizer_states is on, bf16_master_weights_and_grads is not")


def _overflow(view: View) -> Iterator[Found]:
    sent = view.get("communication_data_type")
    if isinstance(sent, str) and sent.lower() == "fp16" and view.precision != "fp16":
        edits = (Edit("set", ("communication_data_type",), "fp32"),)
        message = f"communication_data_type=fp16 with a model in {view.precision}"
        if not (view.facts.runner != "deepspeed" and view.get("fp16.enabled") == "auto"):
            yield Found("DS410", ("communication_data_type",), message, edits=edits)
    scale = view.number("fp16.loss_scale", 0) or 0
    if view.is_on("fp16.enabled") and scale > 0:
        yield Found("DS411", ("fp16", "loss_scale"), f"fp16.loss_scale={scale} stays as it is")
    path = (view.bf16, "check_grad_overflow")
    if view.precision == "bf16" and view.get(".".join(path)) is False:
        yield Found("DS412", path, f"{view.bf16}.check_grad_overflow=false")
