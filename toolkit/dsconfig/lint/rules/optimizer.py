"""DS70-DS71: the optimizer section, and clipping."""

import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from toolkit.dsconfig.lint.finding import ERROR, INFO, WARNING, Edit, Found, Rule, dotted, shown
from toolkit.dsconfig.lint.schema import optimizer, optimizer_names
from toolkit.dsconfig.lint.values import as_number, is_number
from toolkit.dsconfig.lint.view import View
from toolkit.errors import nearest

RULES = (
    Rule(
        id="DS701",
        severity=ERROR,
        title="An optimizer that DeepSpeed does not know",
        effect="DeepSpeed asserts that it is one of its own (in any case) or of torch.optim (as it is spelled).",
        mend="Correct the name.",
        example={"optimizer": {"type": "sgd", "params": {"lr": 0.1}}},
        fixable=True,
    ),
    Rule(
        id="DS702",
        severity=ERROR,
        title="An optimizer that was removed",
        effect="DeepSpeed 0.19.8 no longer has the 1-bit optimizers, and stops.",
        mend="Take AdamW or Lamb.",
        example={"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}},
        sources=("https://github.com/deepspeedai/DeepSpeed/pull/8490",),
    ),
    Rule(
        id="DS703",
        severity=INFO,
        title="Adam that is AdamW",
        effect='DeepSpeed decouples the weight decay of "Adam" too, unless adam_w_mode is false.',
        mend='Write "AdamW" if that is meant, else "adam_w_mode": false.',
        example={"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": 0.1}}},
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/668",),
        fixable=True,
    ),
    Rule(
        id="DS704",
        severity=ERROR,
        title="max_grad_norm among the optimizer's parameters",
        effect="DeepSpeed raises ValueError.",
        mend="Write gradient_clipping at the top level.",
        example={"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}},
        sources=("https://github.com/deepspeedai/DeepSpeed/pull/656",),
        fixable=True,
    ),
    Rule(
        id="DS705",
        severity=ERROR,
        title="A parameter that the optimizer does not take",
        effect="The optimizer's constructor raises TypeError.",
        mend="Correct the name, or remove it.",
        example={"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "beta1": 0.9}}},
        fixable=True,
    ),
    Rule(
        id="DS706",
        severity=ERROR,
        title="A parameter with a value that no optimizer takes",
        effect="The optimizer raises when it is built, or takes the value and trains badly.",
        mend="Write a value of the range that is named.",
        example={"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 1.5]}}},
    ),
    Rule(
        id="DS707",
        severity=WARNING,
        title="An optimizer without a learning rate",
        effect="The optimizer takes its own default: 1e-3 for Adam, whatever the model.",
        mend="Write optimizer.params.lr.",
        example={"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}},
    ),
    Rule(
        id="DS708",
        severity=WARNING,
        title="An optimizer section without a type",
        effect="DeepSpeed takes no optimizer from it: it stops under ZeRO, unless the script passes one.",
        mend='Write "type", for instance "AdamW".',
        example={"optimizer": {"params": {"lr": 1e-4}}},
    ),
    Rule(
        id="DS709",
        severity=WARNING,
        title="gradient_clipping is not written",
        effect="DeepSpeed clips at 1.0 since 0.19.3, and did not clip before: the same file trains another way after an"
        " upgrade.",
        mend="Write gradient_clipping, also where it is 0.",
        example={"train_micro_batch_size_per_gpu": 4},
        sources=("https://github.com/deepspeedai/DeepSpeed/pull/8068",),
        fixable=True,
    ),
    Rule(
        id="DS710",
        severity=WARNING,
        title="PyTorch's Adam on the host",
        effect="The offloaded optimizer runs in PyTorch's CPU kernels, several times slower than DeepSpeedCPUAdam.",
        mend="Remove torch_adam.",
        example={
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        fixable=True,
    ),
    Rule(
        id="DS711",
        severity=ERROR,
        title="Lamb without dynamic loss scaling",
        effect="DeepSpeed asserts that fp16.loss_scale is 0 for Lamb.",
        mend="Set fp16.loss_scale to 0.",
        example={"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}, "fp16": {"enabled": True, "loss_scale": 128}},
        fixable=True,
    ),
    Rule(
        id="DS712",
        severity=WARNING,
        title="An optimizer of another package",
        effect="DeepSpeed imports it from `mup`; where that is missing it stops with UnboundLocalError.",
        mend="Install mup, or take AdamW.",
        example={"optimizer": {"type": "MuAdamW", "params": {"lr": 1e-3}}},
    ),
)

_REMOVED = ("onebitadam", "zerooneadam", "onebitlamb")
_RANGES = {"lr": "0 or more", "eps": "0 or more", "weight_decay": "0 or more", "momentum": "0 or more, below 1"}


def check(view: View) -> Iterator[Found]:
    """The type, the parameters, and what stands beside the section."""
    yield from _clipping(view)
    section = view.get("optimizer")
    if not isinstance(section, Mapping):
        return
    name = section.get("type")
    if name is None:
        yield Found("DS708", ("optimizer",), "the optimizer has no type")
    if not isinstance(name, str):
        return
    kind = optimizer(name)
    if kind is None:
        yield _unknown(name)
        return
    if "package" in kind:
        yield Found("DS712", ("optimizer", "type"), f"optimizer.type={name} comes from the package {kind['package']}")
    if name.lower() == "lamb" and (view.number("fp16.loss_scale", 0) or 0) > 0:
        edits = (Edit("set", ("fp16", "loss_scale"), 0),)
        path = ("fp16", "loss_scale")
        yield Found("DS711", path, f"fp16.loss_scale={view.get('fp16.loss_scale')} with Lamb", edits=edits)
    params = section.get("params")
    if params is not None and not isinstance(params, Mapping):
        yield Found("DS201", ("optimizer", "params"), f"optimizer.params: {shown(params)} is not an object")
        return
    yield from _parameters(view, name, kind, params or {})


def _unknown(name: str) -> Found:
    path = ("optimizer", "type")
    if name.lower().replace("_", "").replace("-", "") in _REMOVED:
        return Found("DS702", path, f"optimizer.type={name} was removed")
    right = next((known for known in optimizer_names() if known.lower() == name.lower()), None)
    edits = (Edit("set", path, right),) if right else ()
    hint = f" Did you mean {right}?" if right else nearest(name, optimizer_names())
    message = f"optimizer.type={shown(name)} is not an optimizer of DeepSpeed or torch.optim.{hint}"
    return Found("DS701", path, message.rstrip("."), edits=edits)


def _parameters(view: View, name: str, kind: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[Found]:
    path = ("optimizer", "params")
    if "max_grad_norm" in params:
        here = (*path, "max_grad_norm")
        move = () if view.has("gradient_clipping") else (Edit("set", ("gradient_clipping",), params["max_grad_norm"]),)
        yield Found("DS704", here, "max_grad_norm is no parameter of an optimizer", edits=(Edit("remove", here), *move))
    taken = _taken(view, name, kind, params)
    for key in params:
        if key != "max_grad_norm" and taken and key not in taken:
            close = get_close_matches(key, taken, n=1, cutoff=0.8)
            edits = (Edit("rename", (*path, key), close[0]),) if close and close[0] not in params else ()
            ignored = "read" in kind
            message = f"{name} takes no parameter {shown(key)}.{nearest(key, taken)}".rstrip(".")
            effect = "DeepSpeed ignores it and says nothing." if ignored else None
            yield Found("DS705", (*path, key), message, effect, severity=WARNING if ignored else None, edits=edits)
    yield from _values(view, params)
    if "lr" not in params and taken and "lr" in taken:
        yield Found(
            "DS707", path if view.has("optimizer.params") else ("optimizer",), f"{name} without a learning rate"
        )
    if name.lower() == "adam" and "adam_w_mode" not in params and params.get("weight_decay"):
        edits = (Edit("set", ("optimizer", "type"), "AdamW"),)
        yield Found("DS703", ("optimizer", "type"), "optimizer.type=Adam decays weights as AdamW does", edits=edits)
    if params.get("torch_adam") is True and view.offload("optimizer") != "none" and view.stage:
        here = (*path, "torch_adam")
        yield Found("DS710", here, "torch_adam with an offloaded optimizer", edits=(Edit("remove", here),))


def _taken(view: View, name: str, kind: Mapping[str, Any], params: Mapping[str, Any]) -> list[str]:
    """The parameters of the class that DeepSpeed would build."""
    if "read" in kind:
        return [*kind["read"], *kind["own"]]
    where = "cpu" if view.offload("optimizer") != "none" and "cpu" in kind else "gpu"
    if "torch" in kind and params.get("torch_adam"):
        where = "torch"
    if where not in kind:
        return []
    own = list(kind.get("own", ()))
    # Of an optimizer that is offloaded, or not, by who runs the file, either class may be meant.
    return [*kind[where], *own]


def _values(view: View, params: Mapping[str, Any]) -> Iterator[Found]:
    for key, allowed in _RANGES.items():
        if key not in params or params[key] == "auto":
            continue
        value, path = params[key], ("optimizer", "params", key)
        if isinstance(value, str) and (number := as_number(value)) is not None:
            message = f"{dotted(path)}: {shown(value)} is a text, not a number"
            yield Found("DS202", path, message, edits=(Edit("set", path, number),))
        elif not is_number(value):
            yield Found("DS201", path, f"{dotted(path)}: {shown(value)} is not a number")
        elif not value >= 0 or math.isinf(value) or (key == "momentum" and value >= 1 and view.stage < 4):
            fused = not params.get("torch_adam") and str(view.get("optimizer.type")).lower() in (
                "adam",
                "adamw",
                "lion",
            )
            severity = WARNING if fused or key == "momentum" or value == math.inf else ERROR
            message = f"{dotted(path)}={shown(value)}: {allowed} is needed"
            yield Found("DS706", path, message, severity=severity)
    betas = params.get("betas", "auto")
    path = ("optimizer", "params", "betas")
    if betas == "auto":
        return
    pair = isinstance(betas, list) and len(betas) == 2
    if pair and any(isinstance(beta, str) and as_number(beta) is not None for beta in betas):
        numbers = [as_number(beta) if isinstance(beta, str) else beta for beta in betas]
        yield Found("DS202", path, f"{dotted(path)}: texts instead of numbers", edits=(Edit("set", path, numbers),))
    elif not pair or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        yield Found("DS706", path, f"{dotted(path)}={shown(betas)}: two numbers from 0, below 1, are needed")


def _clipping(view: View) -> Iterator[Found]:
    facts = view.facts
    if (
        view.has("gradient_clipping")
        or facts.runner == "toolkit"
        or "max_grad_norm" in view.section("optimizer.params")
    ):
        return
    limit: float | str = 1.0 if facts.deepspeed >= (0, 19, 3) else 0.0
    edits = (Edit("set", ("gradient_clipping",), "auto" if facts.runner == "trainer" else limit),)
    asked = facts.trainer.get("max_grad_norm")
    if is_number(asked) and asked != limit:
        message = (
            f"gradient_clipping is not written: max_grad_norm={asked} does not reach DeepSpeed, which clips at {limit}"
        )
    else:
        message = f"gradient_clipping is not written: DeepSpeed {'clips at 1.0' if limit else 'does not clip'}"
    yield Found("DS709", (), message, edits=edits)
