"""DS65: AutoEP, DeepSpeed's expert parallelism by a section of the config. The rest of these rules are conditions."""

from collections.abc import Iterator

from toolkit.lint.finding import Violation, shown
from toolkit.lint.key_schema import FACTS
from toolkit.lint.values import is_number
from toolkit.lint.view import View

_FACTS = FACTS["deepspeed"]["auto_ep"]
_E = "expert_parallel"


def check(view: View) -> Iterator[Violation]:
    """Check AutoEP's values, those that exclude each other, and what it refuses beside tensor parallelism."""
    if not view.is_on(f"{_E}.enabled"):
        return
    wrong = list(_values(view))
    yield from wrong
    if wrong:
        return
    size = int(view.number(f"{_E}.autoep_size", 1) or 1)
    gpus = view.context.gpus
    tp = view.context.tp
    if gpus is not None and gpus % size:
        yield Violation("DS653", (_E, "autoep_size"), f"{gpus} GPUs are not a multiple of autoep_size={size}")
    reasons = []
    if view.is_tensor_parallel:
        reasons = _beside_autotp(view, size)
    elif tp > 1:
        reasons = [f"tp={tp} of an mpu"]
    for reason in reasons:
        yield Violation("DS654", (_E,), f"AutoEP with {reason}")
    for key, message in _excluded(view, size):
        yield Violation("DS655", (_E, key), message)


def _values(view: View) -> Iterator[Violation]:
    for key, value in view.section(_E).items():
        words = _FACTS["words"].get(key)
        least = _FACTS["least"].get(key)
        if words is not None and value not in words:
            allowed = ", ".join(shown(word) for word in words)
        elif least is not None and not (isinstance(value, int) and value >= least):
            if value is None and key.startswith("num_"):
                continue
            allowed = f"a whole number, at least {least}"
        elif key in _FACTS["switches"] and not isinstance(value, bool):
            allowed = "true, false"
        elif (
            key in _FACTS["names"] and value is not None and not (isinstance(value, str) and value and "." not in value)
        ):
            allowed = "a name, null"
        else:
            continue
        yield Violation("DS651", (_E, key), f"{_E}.{key}={shown(value)}", fix=f"Write one of: {allowed}.")


def _beside_autotp(view: View, size: int) -> list[str]:
    """Return the settings that AutoEP refuses where AutoTP splits the model too."""
    reasons = {
        "autoep_size=1": size == 1,
        "offload": view.offload("optimizer") != "none" or view.offload("param") != "none",
        "use_data_before_expert_parallelism": view.is_on("use_data_before_expert_parallelism"),
        "compile.deepcompile": view.is_on("compile.deepcompile"),
        "async_split_plan": view.is_on(f"{_E}.async_split_plan") and size > 1,
        "combine_impl=fused_weighted_sum": view.get(f"{_E}.combine_impl") == "fused_weighted_sum",
    }
    return [f"tensor_parallel.autotp_size and {name}" for name, holds in reasons.items() if holds]


def _excluded(view: View, size: int) -> Iterator[tuple[str, str]]:
    autotp_preset = view.get("tensor_parallel.preset_model")
    preset = view.get(f"{_E}.preset_model")
    if preset is not None and autotp_preset is not None and preset != autotp_preset:
        yield "preset_model", f"preset_model={shown(preset)}, and {shown(autotp_preset)} in tensor_parallel"
    deepep = view.get(f"{_E}.comm_backend") == "deepep"
    if view.get(f"{_E}.gate_up_impl") == "fused" and not view.is_on(f"{_E}.use_grouped_mm", default=True):
        yield "gate_up_impl", "gate_up_impl=fused without use_grouped_mm"
    if view.get(f"{_E}.row_weighting_impl") == "fused" and not (deepep and size > 1):
        yield "row_weighting_impl", "row_weighting_impl=fused without comm_backend=deepep and autoep_size above 1"
    if view.get(f"{_E}.combine_impl") == "fused_weighted_sum" and deepep and size > 1:
        yield "combine_impl", "combine_impl=fused_weighted_sum with comm_backend=deepep"
    if deepep and not view.number(f"{_E}.comm_max_tokens_per_rank"):
        yield "comm_backend", "comm_backend=deepep without comm_max_tokens_per_rank"
    groups = view.get(f"{_E}.num_expert_groups")
    limited = view.get(f"{_E}.num_limited_groups")
    if is_number(groups) and is_number(limited) and limited > groups:
        yield "num_limited_groups", f"num_limited_groups={limited} of num_expert_groups={groups}"
