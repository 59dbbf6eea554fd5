"""DS75: the scheduler section."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from toolkit.dsconfig.lint.finding import ERROR, INFO, WARNING, Edit, Found, Rule, dotted, shown
from toolkit.dsconfig.lint.schema import scheduler, scheduler_names, schema
from toolkit.dsconfig.lint.values import as_number, is_number
from toolkit.dsconfig.lint.view import View
from toolkit.errors import nearest

_WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_type": "linear"}}
_ADAMW = {"type": "AdamW", "params": {"lr": 1e-4}}

RULES = (
    Rule(
        id="DS751",
        severity=ERROR,
        title="A scheduler that DeepSpeed does not know",
        effect="DeepSpeed asserts that it is one of its own or of torch.optim.lr_scheduler, as it is spelled.",
        mend="Correct the name.",
        example={"scheduler": {"type": "warmuplr", "params": {}}, "optimizer": _ADAMW},
        fixable=True,
    ),
    Rule(
        id="DS752",
        severity=ERROR,
        title="A scheduler without a parameter that it needs",
        effect="Its constructor raises TypeError.",
        mend="Write the parameter that is named.",
        example={"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}, "optimizer": _ADAMW},
    ),
    Rule(
        id="DS753",
        severity=ERROR,
        title="A parameter that the scheduler does not take",
        effect="Its constructor raises TypeError.",
        mend="Correct the name, or remove it.",
        example={"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}, "optimizer": _ADAMW},
        fixable=True,
    ),
    Rule(
        id="DS754",
        severity=ERROR,
        title="A scheduler without params",
        effect="DeepSpeed raises TypeError: it passes null on as the parameters.",
        mend='Write "params": {}.',
        example={"scheduler": {"type": "WarmupLR"}, "optimizer": _ADAMW},
        fixable=True,
    ),
    Rule(
        id="DS755",
        severity=ERROR,
        title="warmup_num_steps that is not a whole number from 1",
        effect="DeepSpeed raises ValueError since 0.19.6; before, it took 0 and 1 as 2.",
        mend="Write 1 or more; without a warm-up, leave the scheduler out.",
        example={"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10.0}}, "optimizer": _ADAMW},
        sources=("https://github.com/huggingface/transformers/pull/48640",),
        fixable=True,
    ),
    Rule(
        id="DS756",
        severity=WARNING,
        title="A warm-up that is logarithmic by default",
        effect="Without warmup_type the rate rises with the logarithm: half of the steps are near the top. The"
        " Trainer's"
        " schedules are linear.",
        mend='Write "warmup_type": "linear", or "log" where that is meant.',
        example={"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}, "optimizer": _ADAMW},
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/1298",),
        fixable=True,
    ),
    Rule(
        id="DS757",
        severity=WARNING,
        title="A warmup_type that does not exist",
        effect="DeepSpeed warns, and takes log.",
        mend='Write "linear" or "log"; for a cosine decay take WarmupCosineLR.',
        example={"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}, "optimizer": _ADAMW},
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/4024",),
        fixable=True,
    ),
    Rule(
        id="DS758",
        severity=WARNING,
        title="A schedule that ends before its warm-up",
        effect="DeepSpeed warns; the rate never reaches its top, or falls at once.",
        mend="Raise total_num_steps, or lower warmup_num_steps.",
        example={
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": 100, "warmup_num_steps": 500, "warmup_type": "linear"},
            },
            "optimizer": _ADAMW,
        },
    ),
    Rule(
        id="DS759",
        severity=WARNING,
        title="Two highest learning rates",
        effect="The scheduler wins: the optimizer's lr is overwritten before the first step.",
        mend="Make warmup_max_lr the optimizer's lr.",
        example={
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_type": "linear"}},
            "optimizer": _ADAMW,
        },
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/7303",),
        fixable=True,
    ),
    Rule(
        id="DS760",
        severity=WARNING,
        title="WarmupDecayLR without warmup_max_lr",
        effect="Its default is 0.001, whatever the optimizer's lr is.",
        mend="Write warmup_max_lr.",
        example={
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000, "warmup_type": "linear"}},
            "optimizer": _ADAMW,
        },
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/7303",),
    ),
    Rule(
        id="DS761",
        severity=ERROR,
        title="A scheduler of PyTorch over DeepSpeed's optimizer",
        effect="It raises TypeError: under ZeRO, bf16 or fp16 the optimizer that it gets is no torch.optim.Optimizer.",
        mend="Take one of DeepSpeed's, or pass the scheduler to deepspeed.initialize as a function of the optimizer.",
        example={
            "scheduler": {"type": "StepLR", "params": {"step_size": 100}},
            "optimizer": _ADAMW,
            "zero_optimization": {"stage": 1},
        },
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/3492",),
    ),
    Rule(
        id="DS762",
        severity=INFO,
        title="A scheduler section without a type",
        effect="DeepSpeed builds no scheduler: the rate stays constant.",
        mend='Write "type", for instance "WarmupCosineLR".',
        example={"scheduler": {"params": {"warmup_num_steps": 10}}},
    ),
)


def check(view: View) -> Iterator[Found]:
    """The type, its parameters, and how they agree with the optimizer."""
    section = view.get("scheduler")
    if not isinstance(section, Mapping):
        return
    name = section.get("type")
    if name is None:
        yield Found("DS762", ("scheduler",), "the scheduler has no type")
    if not isinstance(name, str):
        return
    takes = scheduler(name)
    if takes is None:
        right = next((known for known in scheduler_names() if known.lower() == name.lower()), None)
        path = ("scheduler", "type")
        hint = f" Did you mean {right}?" if right else nearest(name, scheduler_names())
        edits = (Edit("set", path, right),) if right else ()
        yield Found("DS751", path, f"scheduler.type={shown(name)} is not a scheduler.{hint}".rstrip("."), edits=edits)
        return
    params = section.get("params")
    if params is None:
        edits = (Edit("set", ("scheduler", "params"), {}),)
        yield Found("DS754", ("scheduler",), f"{name} has no params", edits=edits)
        params = {}
    if not isinstance(params, Mapping):
        yield Found("DS201", ("scheduler", "params"), f"scheduler.params: {shown(params)} is not an object")
        return
    yield from _names(name, takes, params)
    yield from _numbers(params)
    if name in schema()["schedulers"]["names"]:
        yield from _warmup(view, name, takes, params)
    elif view.has("optimizer") and (view.stage or view.precision != "fp32"):
        why = f"ZeRO-{view.stage}" if view.stage else view.precision
        yield Found("DS761", ("scheduler", "type"), f"scheduler.type={name} is PyTorch's, with {why}")


def _names(name: str, takes: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[Found]:
    for key, default in takes.items():
        if default == "required" and key not in params:
            yield Found("DS752", ("scheduler", "params"), f"{name} needs {key}")
    for key in params:
        if key not in takes:
            path = ("scheduler", "params", key)
            close = get_close_matches(key, takes, n=1, cutoff=0.8)
            edits = (Edit("rename", path, close[0]),) if close and close[0] not in params else ()
            message = f"{name} takes no parameter {shown(key)}.{nearest(key, takes)}".rstrip(".")
            yield Found("DS753", path, message, edits=edits)


def _numbers(params: Mapping[str, Any]) -> Iterator[Found]:
    for key, value in params.items():
        number = as_number(value)
        if number is not None:
            path = ("scheduler", "params", key)
            message = f"{dotted(path)}: {shown(value)} is a text, not a number"
            yield Found("DS202", path, message, edits=(Edit("set", path, number),))


def _warmup(view: View, name: str, takes: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[Found]:
    path = ("scheduler", "params")
    steps = params.get("warmup_num_steps", 1)
    counted = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
    if "warmup_num_steps" in takes and not counted and steps != "auto" and as_number(steps) is None:
        here = (*path, "warmup_num_steps")
        whole = isinstance(steps, float) and steps.is_integer() and steps > 0
        edits = (Edit("set", here, int(steps)),) if whole else ()
        severity = WARNING if steps is True or view.facts.deepspeed < (0, 19, 6) else None
        yield Found("DS755", here, f"warmup_num_steps={shown(steps)}", severity=severity, edits=edits)
    kind = params.get("warmup_type")
    if "warmup_type" in takes and "warmup_type" not in params and params.get("warmup_num_steps") != 1:
        edits = (Edit("set", (*path, "warmup_type"), "log"),)  # what happens anyway, said
        yield Found("DS756", path, f"{name} without warmup_type warms up with the logarithm", edits=edits)
    elif "warmup_type" in params and kind not in ("log", "linear"):
        edits = (Edit("set", (*path, "warmup_type"), "log"),)
        yield Found("DS757", (*path, "warmup_type"), f"warmup_type={shown(kind)} is taken as log", edits=edits)
    total = params.get("total_num_steps")
    if is_number(total) and is_number(steps) and total <= steps:
        yield Found("DS758", (*path, "total_num_steps"), f"total_num_steps={total} with warmup_num_steps={steps}")
    yield from _rates(view, name, takes, params)


def _rates(view: View, name: str, takes: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[Found]:
    lr, top = view.get("optimizer.params.lr"), params.get("warmup_max_lr")
    path = ("scheduler", "params", "warmup_max_lr")
    if "warmup_max_lr" not in takes or not is_number(lr):
        return
    if is_number(top) and top != lr:
        edits = (Edit("set", ("optimizer", "params", "lr"), top),)  # what happens anyway, said
        yield Found("DS759", path, f"warmup_max_lr={shown(top)}, but optimizer.params.lr={shown(lr)}", edits=edits)
    elif "warmup_max_lr" not in params and name == "WarmupDecayLR" and lr != takes["warmup_max_lr"]:
        message = f"WarmupDecayLR takes 0.001 for the optimizer's lr={shown(lr)}"
        yield Found("DS760", path[:-1], message)
