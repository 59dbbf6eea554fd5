"""DS5: what a ZeRO stage rejects or ignores, and offload of the optimizer and of parameters."""

from collections.abc import Iterator

from toolkit.config.source_text import Path
from toolkit.lint.finding import ERROR, INFO, Violation, remove, set_to, shown
from toolkit.lint.key_schema import optimizer, schema
from toolkit.lint.values import as_number, is_number
from toolkit.lint.view import View

_Z = "zero_optimization"
_GATHERS = (
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)


def check(view: View) -> Iterator[Violation]:
    """Check features, the gradient norm, the reduction, the optimizer, and offload."""
    yield from _gathered_weights(view)
    yield from _features(view)
    yield from _norm(view)
    yield from _reduction(view)
    yield from _optimizer(view)
    yield from _offload(view)


def _gathered_weights(view: View) -> Iterator[Violation]:
    """Report weights that are sharded where they are saved, and that nothing gathers."""
    is_saved_by_accelerate = view.is_tensor_parallel and view.context.runner in ("trainer", "accelerate")
    if view.stage != 3 and not is_saved_by_accelerate:
        return
    if view.is_inference or any(view.is_on(f"{_Z}.{key}") for key in _GATHERS):
        return
    written = next((key for key in _GATHERS if view.has(f"{_Z}.{key}")), None)
    if written is None:
        path: Path = (_Z,)
        message = f"{_GATHERS[0]} is missing"
    else:
        path = (_Z, written)
        message = f"{_GATHERS[0]} is not on"
        if view.get(f"{_Z}.{written}") == "auto":
            return  # the rules of `auto`
    edits = set_to((_Z, written or _GATHERS[0]), True)
    severity = INFO if view.context.runner == "deepspeed" else None
    yield Violation("DS507", path, message, severity=severity, edits=edits)


def _features(view: View) -> Iterator[Violation]:
    stage = view.stage
    group = view.number(f"{_Z}.zero_hpz_partition_size", 1) or 1
    gpus = view.context.gpus or 0
    if stage == 3 and 1 < group < gpus and gpus % group:
        path = (_Z, "zero_hpz_partition_size")
        yield Violation("DS510", path, f"{gpus} GPUs are not a multiple of zero_hpz_partition_size={group}")
    if isinstance(view.get(f"{_Z}.zenflow"), dict) and view.offload("optimizer") == "none" and stage:
        yield Violation("DS517", (_Z, "zenflow"), "zenflow without offload_optimizer")


def _norm(view: View) -> Iterator[Violation]:
    if view.is_on(f"{_Z}.compute_grad_norm", default=True):
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
        yield Violation("DS508", (_Z, "compute_grad_norm"), f"compute_grad_norm=false with {reason}").removing()


def _reduction(view: View) -> Iterator[Violation]:
    stage = view.stage
    scatter = view.is_on(f"{_Z}.reduce_scatter", default=True)
    if stage in (2, 3) and scatter:
        if view.get("prescale_gradients"):
            message = f"prescale_gradients with ZeRO-{stage} and reduce_scatter"
            yield Violation("DS513", ("prescale_gradients",), message).removing()
        factor = view.get("gradient_predivide_factor", 1.0)
        if factor != 1.0:
            message = f"gradient_predivide_factor={shown(factor)} with ZeRO-{stage} and reduce_scatter"
            yield Violation("DS513", ("gradient_predivide_factor",), message).removing()


def _optimizer(view: View) -> Iterator[Violation]:
    name = view.get("optimizer.type")
    if not isinstance(name, str) or not view.stage or optimizer(name) is None:
        return
    is_deepspeeds_own = name.lower() in ("adam", "adamw", "adagrad", "lion", "muon")
    if is_deepspeeds_own or name in schema()["optimizers"]["tested"]:
        return
    allowed = view.get("zero_allow_untested_optimizer")
    if not allowed or (is_number(allowed) and allowed == 0):
        edits = set_to(("zero_allow_untested_optimizer",), True)
        message = f"optimizer.type={name} with ZeRO-{view.stage}"
        yield Violation("DS515", ("optimizer", "type"), message, edits=edits)


def _offload(view: View) -> Iterator[Violation]:
    """Check for offload to host memory and NVMe that is ignored, rejected or incomplete."""
    yield from _ignored_offload(view)
    for states in ("optimizer", "param"):
        path = (_Z, f"offload_{states}")
        if view.offload(states) == "nvme" and view.stage == 3 and not view.get(".".join((*path, "nvme_path"))):
            yield Violation("DS503", path, f"{_Z}.offload_{states}.device=nvme without nvme_path")
    yield from _offload_ratio(view)
    yield from _offload_without_optimizer(view)


def _ignored_offload(view: View) -> Iterator[Violation]:
    stage = view.stage
    device = view.offload("param")
    if device != "none" and stage != 3:
        message = f"parameters are to be offloaded to {device}, with zero_optimization.stage={stage}"
        yield Violation("DS501", _offload_path(view, "param"), message).removing()
    device = view.offload("optimizer")
    if device != "none" and stage == 0:
        message = f"the optimizer is to be offloaded to {device}, with zero_optimization.stage=0"
        yield Violation("DS502", _offload_path(view, "optimizer"), message).removing()


def _offload_path(view: View, states: str) -> Path:
    """Return the section that offloads `optimizer` or `param`, or the old key."""
    old = {"optimizer": "cpu_offload", "param": "cpu_offload_param"}[states]
    return (_Z, f"offload_{states}") if view.has(f"{_Z}.offload_{states}") else (_Z, old)


def _offload_ratio(view: View) -> Iterator[Violation]:
    path = (_Z, "offload_optimizer", "ratio")
    written = view.get(".".join(path), 1)
    ratio = as_number(written) if isinstance(written, str) else written
    if not isinstance(ratio, (int, float)):
        ratio = 1  # another rule says so
    if ratio < 1 and view.stage != 3:
        message = f"offload_optimizer.ratio={ratio} with zero_optimization.stage={view.stage}"
        yield Violation("DS505", path, message).removing()
    elif ratio < 1 and view.offload("optimizer") != "none" and view.get("optimizer.params.torch_adam") is True:
        edits = remove(("optimizer", "params", "torch_adam"))
        yield Violation("DS519", path, f"offload_optimizer.ratio={ratio} with torch_adam", edits=edits)


def _offload_without_optimizer(view: View) -> Iterator[Violation]:
    device = view.offload("optimizer")
    if device == "none" or view.has("optimizer") or not view.get("zero_force_ds_cpu_optimizer", True):
        return
    is_unseen = view.context.runner in ("trainer", "accelerate") and view.is_on(f"{_Z}.cpu_offload")
    is_seen = view.stage and view.context.runner == "deepspeed"
    if not (is_unseen or is_seen):
        return
    message = f"the optimizer is offloaded to {device}, and there is no optimizer section"
    violation = Violation("DS520", _offload_path(view, "optimizer"), message)
    if is_unseen:
        effect = "Accelerator does not know the old key, passes PyTorch's AdamW, and stops with ZeRORuntimeException."
        violation = violation._replace(severity=ERROR, effect=effect)
    yield violation
