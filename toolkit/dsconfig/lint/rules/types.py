"""DS2: values of a wrong type, out of range, or spelled as a text."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.dsconfig.lint.finding import ERROR, WARNING, Edit, Found, Path, Rule, dotted, shown
from toolkit.dsconfig.lint.schema import Node, members, schema
from toolkit.dsconfig.lint.values import Problem, allowed, is_number, problem
from toolkit.dsconfig.lint.view import View

RULES = (
    Rule(
        id="DS201",
        severity=ERROR,
        title="A value of the wrong type",
        effect="DeepSpeed raises when it reads or first uses it.",
        mend="Write a value of the type that is named.",
        example={"zero_optimization": {"stage": 2, "overlap_comm": [True]}},
    ),
    Rule(
        id="DS202",
        severity=ERROR,
        title="A number as a text",
        effect="DeepSpeed raises TypeError when it compares or computes with it.",
        mend="Remove the quotes.",
        example={"train_batch_size": "32"},
        sources=("https://github.com/huggingface/accelerate/issues/1828",),
        fixable=True,
    ),
    Rule(
        id="DS203",
        severity=ERROR,
        title="A number out of range",
        effect="DeepSpeed raises.",
        mend="Write a number in the range that is named.",
        example={"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}},
    ),
    Rule(
        id="DS204",
        severity=WARNING,
        title="A fraction where a whole number is meant",
        effect="DeepSpeed takes a micro-batch of 2.5 and says nothing; each use rounds it in its own way.",
        mend="Write a whole number.",
        example={"train_micro_batch_size_per_gpu": 2.5},
    ),
    Rule(
        id="DS205",
        severity=ERROR,
        title="A word that DeepSpeed does not know here",
        effect="DeepSpeed raises.",
        mend="Write one of the words that are named.",
        example={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
    ),
    Rule(
        id="DS206",
        severity=WARNING,
        title="A text or a number where true or false is meant",
        effect="Where DeepSpeed does not check, every text counts as true, also the text false.",
        mend="Write true or false.",
        example={"prescale_gradients": "false"},
        fixable=True,
    ),
    Rule(
        id="DS207",
        severity=ERROR,
        title="null where a value is needed",
        effect="DeepSpeed raises when it reads or first uses it.",
        mend="Write a value, or remove the key.",
        example={"gradient_clipping": None},
        fixable=True,
    ),
    Rule(
        id="DS208",
        severity=ERROR,
        title="Not a section",
        effect="DeepSpeed raises when it looks for keys inside.",
        mend='Write an object, for instance {"enabled": true}, or remove the key.',
        example={"fp16": True},
        fixable=True,
    ),
    Rule(
        id="DS209",
        severity=WARNING,
        title="zero_optimization as true or false",
        effect="DeepSpeed reads true as ZeRO-1 with default settings, and warns.",
        mend='Write {"stage": 1}.',
        example={"zero_optimization": True},
        fixable=True,
    ),
    Rule(
        id="DS210",
        severity=WARNING,
        title="A limit of the gradient norm that switches clipping off",
        effect="DeepSpeed clips where the limit is more than 0; with a negative number or NaN it does not, and says so"
        " nowhere.",
        mend="Write the largest norm, or 0 for no clipping.",
        example={"gradient_clipping": -1},
        fixable=True,
    ),
)

_RULES = {"type": "DS201", "text": "DS202", "range": "DS203", "fraction": "DS204", "word": "DS205"}
_RULES |= {"truth": "DS206", "null": "DS207"}
_MUST_BE_RIGHT = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("steps_per_print", "wall_clock_breakdown", "communication_data_type", "seq_parallel_communication_data_type"),
    *("gradient_allreduce_op", "log_level", "vocabulary_size", "sequence_parallel_size", "data_types.grad_accum_dtype"),
    *("data_types.param_dtype", "optimizer.type", "scheduler.type", "checkpoint.tag_validation"),
    *("checkpoint.writer.type", "checkpoint.writer.data_parallel", "checkpoint.parallel_write.pipeline_stage"),
    *("torch_autocast.dtype", "torch_autocast.lower_precision_safe_modules", "flops_profiler.enabled"),
}
"""Values outside of the declared sections that DeepSpeed trips over; other ones it takes as they are."""
_TRUTH_IS_A_NUMBER = ("wall_clock_breakdown", "flops_profiler.enabled", "checkpoint.parallel_write.pipeline_stage")
_NULL_IS_A_SECTION = {"bf16", "bfloat16", "aio", "expert_parallel", "datastates_ckpt"}
_NOT_EMPTY = ("autotuning.results_dir", "autotuning.exps_dir")


def check(view: View) -> Iterator[Found]:
    """Every value against the schema, and the few that have rules of their own."""
    yield from _section((), view.config, {"section": "lenient", "keys": schema()["keys"]}, view)
    yield from _clipping(view)
    yield from _read_in_code(view)


def _section(path: Path, config: Mapping[str, Any], node: Node, view: View) -> Iterator[Found]:
    known = members(node)
    for key, value in config.items():
        child, here = known.get(key), (*path, key)
        if child is None or (here == ("bfloat16",) and view.get("bf16") is not None):
            continue
        if value == "auto" and (node["section"] == "strict" or "section" not in child):
            continue  # the rules of `auto`
        if "section" in child:
            if isinstance(value, Mapping):
                yield from _section(here, value, child, view)
            else:
                yield from _no_section(here, value, child)
        elif (wrong := problem(child, value)) is not None:
            yield _report(here, wrong, child, node["section"] == "strict", view)


def _no_section(path: Path, value: Any, node: Node) -> Iterator[Found]:
    name = ".".join(map(str, path))
    if value is None and (name in _NULL_IS_A_SECTION or "null" in node.get("types", [])):
        return
    if name == "datastates_ckpt" and value is False:
        return
    if name == "zero_optimization" and isinstance(value, bool):
        edit = Edit("set", path, {"stage": int(value)})
        yield Found("DS209", path, f"zero_optimization={shown(value)} is an old form", edits=(edit,))
        return
    edits: tuple[Edit, ...] = ()
    if isinstance(value, bool) and "enabled" in node["keys"]:
        edits = (Edit("set", path, {"enabled": value}),)
    elif value is None:
        edits = (Edit("remove", path),)
    yield Found("DS208", path, f"{dotted(path)}={shown(value)} is not a section", edits=edits)


def _report(path: Path, wrong: Problem, node: Node, strict: bool, view: View) -> Found:
    name = ".".join(map(str, path))
    refused = wrong.refused
    if not strict:
        refused = name in _MUST_BE_RIGHT and wrong.kind not in ("fraction",)
        if wrong.kind == "type" and not wrong.refused:  # true as a number
            refused = False
        if wrong.kind == "truth" and name in _TRUTH_IS_A_NUMBER and "text" not in wrong.message:
            refused = False
        if name == "data_types.buffer_dtype" and view.precision != "fp32":
            refused = True
        if name == "flops_profiler.profile_step" and view.is_on("flops_profiler.enabled"):
            refused = True
    edits: tuple[Edit, ...] = (Edit("set", path, wrong.mended),) if wrong.is_mendable else ()
    if wrong.kind == "null":
        edits = (Edit("remove", path),)
    taken = "DeepSpeed converts it, and says nothing." if strict else "DeepSpeed takes it as it is, and says nothing."
    if wrong.kind == "truth" and not strict and not refused and isinstance(view.get(name), str):
        taken = "DeepSpeed does not check it here: a text counts as true, whatever it says."
    rule = _RULES[wrong.kind]
    if rule == "DS204" and strict:
        return Found(rule, path, f"{dotted(path)}: {wrong.message}", "DeepSpeed raises ValidationError.", None, ERROR)
    effect = None if refused else taken
    mend = f"Write {allowed(node)}." if wrong.kind in ("type", "range", "word", "truth") and allowed(node) else None
    severity = ERROR if refused else WARNING
    return Found(rule, path, f"{dotted(path)}: {wrong.message}", effect, mend, severity, edits)


def _clipping(view: View) -> Iterator[Found]:
    value = view.number("gradient_clipping")
    if value is not None and (math.isnan(value) or value < 0):
        edits = (Edit("set", ("gradient_clipping",), 0.0),)
        message = f"gradient_clipping={shown(value)} switches clipping off"
        yield Found("DS210", ("gradient_clipping",), message, edits=edits)


def _read_in_code(view: View) -> Iterator[Found]:
    """Values that DeepSpeed checks by hand."""
    if view.get("steps_per_print") == 0 and view.get("steps_per_print") is not False:
        yield Found("DS203", ("steps_per_print",), "steps_per_print: 0 is not a whole number, at least 1")
    if view.has("sequence_parallel_size") and is_number(size := view.get("sequence_parallel_size")) and size == 0:
        yield Found("DS203", ("sequence_parallel_size",), "sequence_parallel_size: 0 is not a whole number, at least 1")
    for name in ("sequence_parallel_size", "vocabulary_size"):
        if name == "sequence_parallel_size" and view.has(name) and view.get(name) is None:
            yield Found(
                "DS207", (name,), f"{name}: null, but a whole number is needed", edits=(Edit("remove", (name,)),)
            )
    for name in _NOT_EMPTY:
        if view.has(name) and not view.get(name):
            path = tuple(name.split("."))
            yield Found("DS203", path, f"{name}: a name of a folder is needed")
    kept = view.get("data_types.keep_in_fp32_modules", "auto")
    if kept != "auto" and not (isinstance(kept, list) and all(isinstance(name, str) for name in kept)):
        path = ("data_types", "keep_in_fp32_modules")
        yield Found("DS201", path, f'{dotted(path)}: {shown(kept)} is not "auto" or a list of names')
    modules = view.get("torch_autocast.lower_precision_safe_modules")
    if isinstance(modules, list) and not all(isinstance(name, str) and "." in name for name in modules):
        path = ("torch_autocast", "lower_precision_safe_modules")
        yield Found("DS201", path, f"{dotted(path)}: each name must be that of a class with its package")
    if view.get("expert_parallel.load_balance_coeff") is not None:
        path = ("expert_parallel", "load_balance_coeff")
        yield Found("DS203", path, f"{dotted(path)}: only null is supported")
    if view.is_on("fp16.enabled") and not view.number("fp16.loss_scale", 0):
        for key in ("loss_scale_window", "min_loss_scale"):
            if (view.number(f"fp16.{key}", 1) or 0) <= 0:
                message = f"fp16.{key}: {shown(view.get(f'fp16.{key}'))} is not more than 0"
                yield Found("DS203", ("fp16", key), message)
