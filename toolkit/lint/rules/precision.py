"""DS4: bf16, fp16, autocast, and the precision in which gradients are summed."""

from collections.abc import Iterator

from toolkit.lint.finding import Violation, shown
from toolkit.lint.view import View

_SPELLINGS = {
    "bf16": {"bf16", "bfloat16", "torch.bfloat16"},
    "fp16": {"fp16", "float16", "half", "torch.float16"},
    "fp32": {"fp32", "float32", "float", "torch.float32"},
}


def check(view: View) -> Iterator[Violation]:
    """Check the precision, gradient sums, master weights, and communication."""
    yield from _which(view)
    yield from _sums(view)
    yield from _master_weights(view)
    yield from _communication(view)


def _which(view: View) -> Iterator[Violation]:
    bf16 = view.is_on(f"{view.bf16}.enabled")
    fp16 = view.is_on("fp16.enabled")
    if bf16 and fp16:
        yield Violation("DS401", ("fp16", "enabled"), "bf16 and fp16 are both enabled").setting(False)
    precisions = (view.bf16, "fp16", "torch_autocast")
    if not any(view.has(name) for name in precisions) and view.context.runner == "deepspeed":
        yield Violation("DS405", (), "neither bf16 nor fp16 nor torch_autocast is written")
    wanted = view.get("data_types.param_dtype")
    known = (
        view.context.runner == "deepspeed" or view.precision != "fp32" or {"bf16", "fp16"} <= {*view.context.trainer}
    )
    if _is_another(wanted, view) and known:
        message = f"data_types.param_dtype={shown(wanted)}, but the model is in {view.precision}"
        yield Violation("DS409", ("data_types", "param_dtype"), message).removing()


def _is_another(wanted: object, view: View) -> bool:
    """Return whether a word names another precision than the model's."""
    known = isinstance(wanted, str) and any(wanted in words for words in _SPELLINGS.values())
    return known and wanted not in _SPELLINGS[view.precision]


def _sums(view: View) -> Iterator[Violation]:
    wanted = view.get("data_types.grad_accum_dtype")
    if view.stage == 0 and _is_another(wanted, view):
        message = f"grad_accum_dtype={shown(wanted)} with a model in {view.precision} and zero_optimization.stage=0"
        yield Violation("DS403", ("data_types", "grad_accum_dtype"), message)
    steps = view.number("gradient_accumulation_steps", 1) or 1
    if wanted is None and view.precision != "fp32" and view.stage > 0 and steps >= 8:
        message = f"{steps} micro-batches are summed in {view.precision}"
        yield Violation("DS404", ("gradient_accumulation_steps",), message)


def _master_weights(view: View) -> Iterator[Violation]:
    for section, key in ((view.bf16, "bf16_master_weights_and_grads"), ("fp16", "fp16_master_weights_and_grads")):
        if not view.is_on(f"{section}.{key}") or view.stage == 0:
            continue
        torch_adam = view.get("optimizer.params.torch_adam")
        on_host = view.offload("optimizer") != "none"
        if section == view.bf16 and view.is_on(f"{section}.bf16_optimizer_states") and not on_host:
            continue  # nothing is kept in fp32, so that it can stay on the GPU
        elif not on_host or (torch_adam and view.has("optimizer")):
            why = "torch_adam" if torch_adam else "the optimizer on the GPU"
            yield Violation("DS407", (section, key), f"{section}.{key} with {why}")


def _communication(view: View) -> Iterator[Violation]:
    sent = view.get("communication_data_type")
    if isinstance(sent, str) and sent.lower() == "fp16" and view.precision != "fp16":
        message = f"communication_data_type=fp16 with a model in {view.precision}"
        if view.context.runner == "deepspeed" or view.get("fp16.enabled") != "auto":
            yield Violation("DS410", ("communication_data_type",), message).setting("fp32")
