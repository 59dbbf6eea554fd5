"""DS70-DS71 and DS75: the optimizer section, clipping, and the scheduler section."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from toolkit.config.source_text import Path
from toolkit.dsconfig.options import REMOVED_OPTIMIZERS
from toolkit.errors import nearest
from toolkit.lint.finding import ERROR, WARNING, Edit, Violation, dotted, rename, set_to, shown
from toolkit.lint.key_schema import FACTS, misspelled, optimizer, optimizer_names, scheduler, scheduler_names, schema
from toolkit.lint.values import as_number, is_number
from toolkit.lint.view import View

_RANGES = {"lr": "0 or more", "eps": "0 or more", "weight_decay": "0 or more", "momentum": "0 or more, below 1"}
_FUSED = ("adam", "adamw", "lion")
"""Types whose own kernels accept numbers out of range."""


def check(view: View) -> Iterator[Violation]:
    """Check clipping, known bugs, and of each section the type, the parameters and whether they agree."""
    yield from _clipping(view)
    yield from _known_bugs(view)
    for key, no_type, check_type in (("optimizer", "DS708", _optimizer), ("scheduler", "DS762", _scheduler)):
        section = view.get(key)
        if isinstance(section, Mapping):
            name = section.get("type")
            if name is None:
                yield Violation(no_type, (key,), f"the {key} has no type")
            elif isinstance(name, str):
                yield from check_type(view, name, section.get("params"))


def _unknown_type(rule: str, section: str, name: str, known: list[str], kind: str) -> Violation:
    right = next((type_name for type_name in known if type_name.lower() == name.lower()), None)
    meant = right or FACTS["deepspeed"]["optimizer_classes"].get(name.lower())
    hint = f" Did you mean {meant}?" if meant else nearest(name, known)
    violation = Violation(rule, (section, "type"), f"{section}.type={shown(name)} is not {kind}.{hint}".rstrip("."))
    return violation.setting(right) if right else violation


def _unknown_parameter(rule: str, path: Path, name: str, known: Iterable[str], params: Mapping[str, Any]) -> Violation:
    key = str(path[-1])
    close = misspelled(key, known, params)
    edits = rename(path, close) if close else ()
    message = f"{name} has no parameter {shown(key)}.{nearest(key, known)}".rstrip(".")
    return Violation(rule, path, message, edits=edits)


def _quoted(path: Path, value: Any) -> Iterator[Violation]:
    number = as_number(value)
    if number is not None:
        yield Violation("DS202", path, f"{dotted(path)}: {shown(value)} is a string, not a number").setting(number)


def _optimizer(view: View, name: str, params: Any) -> Iterator[Violation]:
    kind = optimizer(name)
    if kind is None:
        if name.lower().replace("_", "").replace("-", "") in REMOVED_OPTIMIZERS:
            yield Violation("DS702", ("optimizer", "type"), f"optimizer.type={name} was removed")
        else:
            kinds = "an optimizer of DeepSpeed or torch.optim"
            yield _unknown_type("DS701", "optimizer", name, optimizer_names(), kinds)
        return
    if "package" in kind:
        message = f"optimizer.type={name} comes from the package {kind['package']}"
        yield Violation("DS712", ("optimizer", "type"), message)
    if name.lower() == "lamb" and (view.number("fp16.loss_scale", 0) or 0) > 0:
        message = f"fp16.loss_scale={view.get('fp16.loss_scale')} with Lamb"
        yield Violation("DS711", ("fp16", "loss_scale"), message).setting(0)
    if params is not None and not isinstance(params, Mapping):
        yield Violation("DS201", ("optimizer", "params"), f"optimizer.params: {shown(params)} is not an object")
        return
    yield from _parameters(view, name, kind, params or {})


def _parameters(view: View, name: str, kind: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[Violation]:
    path = ("optimizer", "params")
    if "max_grad_norm" in params:
        here = (*path, "max_grad_norm")
        move = () if view.has("gradient_clipping") else set_to(("gradient_clipping",), params["max_grad_norm"])
        message = "max_grad_norm is not a parameter of an optimizer"
        yield Violation("DS704", here, message, edits=(Edit("remove", here), *move))
    accepted = _accepted(view, kind, params)
    for key in params:
        if key != "max_grad_norm" and accepted and key not in accepted:
            violation = _unknown_parameter("DS705", (*path, key), name, accepted, params)
            if "read" in kind:
                violation = violation._replace(effect="DeepSpeed ignores it silently.", severity=WARNING)
            yield violation
    yield from _values(view, params)
    if "lr" not in params and accepted and "lr" in accepted:
        where = path if view.has("optimizer.params") else path[:1]
        yield Violation("DS707", where, f"{name} without a learning rate")
    if name.lower() == "adam" and "adam_w_mode" not in params and params.get("weight_decay"):
        message = "optimizer.type=Adam decays weights as AdamW does"
        yield Violation("DS703", ("optimizer", "type"), message).setting("AdamW")


def _accepted(view: View, kind: Mapping[str, Any], params: Mapping[str, Any]) -> list[str]:
    """Return the parameters of the class that DeepSpeed would build."""
    if "read" in kind:
        return [*kind["read"], *kind["own"]]
    where = "cpu" if view.offload("optimizer") != "none" and "cpu" in kind else "gpu"
    if "torch" in kind and params.get("torch_adam"):
        where = "torch"
    return [*kind[where], *kind.get("own", ())] if where in kind else []


def _values(view: View, params: Mapping[str, Any]) -> Iterator[Violation]:
    for key, allowed in _RANGES.items():
        if params.get(key, "auto") != "auto":
            yield from _in_range(view, key, allowed, params)
    yield from _betas(params.get("betas", "auto"))
    for key in ("adam_w_mode", "torch_adam", "amsgrad", "bias_correction"):
        if isinstance(word := params.get(key), str) and word.lower() in ("true", "false"):
            message = f"{key}: {shown(word)} is a string, which counts as true"
            yield Violation("DS206", ("optimizer", "params", key), message).setting(word.lower() == "true")


def _in_range(view: View, key: str, allowed: str, params: Mapping[str, Any]) -> Iterator[Violation]:
    """Check a number of an optimizer; kernels of DeepSpeed's own accept any, PyTorch's classes do not."""
    value = params[key]
    path = ("optimizer", "params", key)
    if as_number(value) is not None:
        yield from _quoted(path, value)
    elif not is_number(value):
        yield Violation("DS201", path, f"{dotted(path)}: {shown(value)} is not a number")
    elif not value >= 0 or math.isinf(value) or (key == "momentum" and value >= 1):
        fused = not params.get("torch_adam") and str(view.get("optimizer.type")).lower() in _FUSED
        severity = WARNING if fused or key == "momentum" or value == math.inf else ERROR
        yield Violation("DS706", path, f"{dotted(path)}={shown(value)}: {allowed} is needed", severity=severity)


def _betas(betas: Any) -> Iterator[Violation]:
    """Check the decay rates of the moments."""
    if betas == "auto":
        return
    path = ("optimizer", "params", "betas")
    is_pair = isinstance(betas, list) and len(betas) == 2
    if is_pair and any(as_number(beta) is not None for beta in betas):
        numbers = [as_number(beta) if isinstance(beta, str) else beta for beta in betas]
        yield Violation("DS202", path, f"{dotted(path)}: strings instead of numbers").setting(numbers)
    elif not is_pair or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        yield Violation("DS706", path, f"{dotted(path)}={shown(betas)}: two numbers from 0, below 1, are needed")
    elif betas[0] > betas[1]:
        yield Violation("DS713", path, f"{dotted(path)}={shown(betas)}")


def _clipping(view: View) -> Iterator[Violation]:
    context = view.context
    is_written = view.has("gradient_clipping") or "max_grad_norm" in view.section("optimizer.params")
    if is_written or context.runner == "toolkit" or view.is_inference:
        return
    limit = 1.0 if context.deepspeed >= (0, 19, 3) else 0.0
    norm = context.trainer.get("max_grad_norm")
    edits = set_to(("gradient_clipping",), "auto" if view.has_auto_batch or norm is not None else limit)
    if is_number(norm) and norm != limit:
        what_happens = f"max_grad_norm={norm} does not reach DeepSpeed, which clips at {limit}"
    else:
        what_happens = f"DeepSpeed {'clips at 1.0' if limit else 'does not clip'}"
    yield Violation("DS709", (), f"gradient_clipping is not written: {what_happens}", edits=edits)


def _scheduler(view: View, name: str, params: Any) -> Iterator[Violation]:
    takes = scheduler(name)
    path = ("scheduler", "params")
    if takes is None:
        yield _unknown_type("DS751", "scheduler", name, scheduler_names(), "a scheduler")
        return
    if params is None:
        params = {}
        yield Violation("DS754", ("scheduler",), f"{name} has no params", edits=set_to(path, params))
    if not isinstance(params, Mapping):
        yield Violation("DS201", path, f"scheduler.params: {shown(params)} is not an object")
        return
    for key, default in takes.items():
        if default == "required" and key not in params:
            yield Violation("DS752", path, f"{name} needs {key}")
    for key, value in params.items():
        if key not in takes:
            yield _unknown_parameter("DS753", (*path, key), name, takes, params)
        yield from _quoted((*path, key), value)
    for low, high in (("warmup_min_lr", "warmup_max_lr"), ("cycle_min_lr", "cycle_max_lr")):
        least = params.get(low)
        most = params.get(high)
        if is_number(least) and is_number(most) and least > most:
            yield Violation("DS763", (*path, low), f"{low}={shown(least)}, but {high}={shown(most)}")
    if name in schema()["schedulers"]["names"]:
        yield from _warmup(view, name, takes, params)
    elif view.stage or view.precision != "fp32":
        why = f"ZeRO-{view.stage}" if view.stage else view.precision
        yield Violation("DS761", ("scheduler", "type"), f"scheduler.type={name} is PyTorch's, with {why}")


def _warmup(view: View, name: str, takes: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[Violation]:
    """Check the length of the warm-up, its curve, and the rates at its ends."""
    steps = params.get("warmup_num_steps", 1)
    if "warmup_num_steps" in takes and steps != "auto":
        yield from _warmup_steps(view, steps)
    yield from _warmup_type(name, takes, params)
    total = params.get("total_num_steps")
    least = steps if is_number(steps) else 0
    if is_number(total) and total <= least:
        path = ("scheduler", "params", "total_num_steps")
        yield Violation("DS758", path, f"total_num_steps={total} with {least} steps of warm-up")
    yield from _rates(view, name, takes, params)


def _warmup_steps(view: View, steps: Any) -> Iterator[Violation]:
    is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
    if is_count or as_number(steps) is not None:
        return
    severity = WARNING if steps is True or view.context.deepspeed < (0, 19, 6) else None
    path = ("scheduler", "params", "warmup_num_steps")
    violation = Violation("DS755", path, f"warmup_num_steps={shown(steps)}", severity=severity)
    is_whole = isinstance(steps, float) and steps.is_integer() and steps > 0
    yield violation.setting(int(steps)) if is_whole else violation


def _warmup_type(name: str, takes: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[Violation]:
    path = ("scheduler", "params")
    edits = set_to((*path, "warmup_type"), "log")  # the default, written out
    if "warmup_type" in params:
        kind = params["warmup_type"]
        if kind not in ("log", "linear"):
            yield Violation("DS757", (*path, "warmup_type"), f"warmup_type={shown(kind)} is read as log", edits=edits)
    elif "warmup_type" in takes and params.get("warmup_num_steps") != 1:
        yield Violation("DS756", path, f"{name} without warmup_type warms up with the logarithm", edits=edits)


def _rates(view: View, name: str, takes: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[Violation]:
    lr = view.get("optimizer.params.lr")
    top = params.get("warmup_max_lr")
    path = ("scheduler", "params", "warmup_max_lr")
    if "warmup_max_lr" not in takes or not is_number(lr):
        return
    if is_number(top) and top != lr:
        edits = set_to(("optimizer", "params", "lr"), top)  # the default, written out
        yield Violation("DS759", path, f"warmup_max_lr={shown(top)}, but optimizer.params.lr={shown(lr)}", edits=edits)
    elif "warmup_max_lr" not in params and name == "WarmupDecayLR" and lr != takes["warmup_max_lr"]:
        yield Violation("DS760", path[:-1], f"WarmupDecayLR takes 0.001 for the optimizer's lr={shown(lr)}")


def _known_bugs(view: View) -> Iterator[Violation]:
    path = ("scheduler", "params")
    has_top = view.has("scheduler.params.warmup_max_lr")
    if view.context.deepspeed < (0, 19, 4) and view.get("scheduler.type") == "WarmupLR" and not has_top:
        version = ".".join(map(str, view.context.deepspeed))
        yield Violation("DS906", path, f"WarmupLR without warmup_max_lr in DeepSpeed {version}")
    groups = {"muon_lr", "adam_lr"} & view.section("optimizer.params").keys()
    if str(view.get("optimizer.type")).lower() == "muon" and groups and has_top:
        yield Violation("DS908", (*path, "warmup_max_lr"), "warmup_max_lr with muon_lr and adam_lr")
    limit = view.get("gradient_clipping", 1.0 if view.context.deepspeed >= (0, 19, 3) else 0.0)
    if str(view.get("optimizer.type")).lower() == "muon" and view.stage and limit not in (0, 0.0):
        where = ("gradient_clipping",) if view.has("gradient_clipping") else ()
        message = f"gradient_clipping={shown(limit)} with Muon under ZeRO-{view.stage}"
        yield Violation("DS910", where, message, edits=set_to(("gradient_clipping",), 0.0))
