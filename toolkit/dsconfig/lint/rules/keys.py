"""DS1: keys that DeepSpeed does not read, or no longer, or reads under another name or in another section."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from toolkit.dsconfig.lint.finding import ERROR, INFO, WARNING, Edit, Found, Path, Rule, Severity, dotted
from toolkit.dsconfig.lint.schema import Node, homes, members, schema
from toolkit.dsconfig.lint.view import View

_REMOVED = "https://github.com/deepspeedai/DeepSpeed/issues/8489"
_NOT_VALIDATED = (
    "https://github.com/deepspeedai/DeepSpeed/issues/653",
    "https://github.com/deepspeedai/DeepSpeed/issues/1809",
)
_STAGE = {"zero_optimization": {"stage": 1}}

RULES = (
    Rule(
        id="DS101",
        severity=WARNING,
        title="An unknown key at the top level",
        effect="DeepSpeed ignores it and says nothing.",
        mend="Correct the name, or remove the key.",
        example={"gradient_cliping": 1.0},
        sources=_NOT_VALIDATED,
        fixable=True,
    ),
    Rule(
        id="DS102",
        severity=ERROR,
        title="An unknown key in a section that DeepSpeed checks",
        effect="DeepSpeed raises ValidationError: extra inputs are not permitted.",
        mend="Correct the name, or remove the key.",
        example={"zero_optimization": {"stage": 2, "overlap_com": True}},
        fixable=True,
    ),
    Rule(
        id="DS103",
        severity=WARNING,
        title="An unknown key in a section that DeepSpeed does not check",
        effect="DeepSpeed ignores it and says nothing.",
        mend="Correct the name, or remove the key.",
        example={"flops_profiler": {"enable": True}},
        sources=_NOT_VALIDATED,
        fixable=True,
    ),
    Rule(
        id="DS104",
        severity=ERROR,
        title="A key of a removed feature",
        effect="DeepSpeed 0.19.8 raises DeepSpeedConfigError, also where the feature is switched off.",
        mend="Remove the key.",
        example={"amp": {"enabled": False}},
        sources=(_REMOVED,),
        fixable=True,
    ),
    Rule(
        id="DS105",
        severity=WARNING,
        title="A deprecated key",
        effect="DeepSpeed still reads it, warns, and will drop it.",
        mend="Write the key that replaces it.",
        example={"zero_optimization": {"stage": 2, "cpu_offload": True}},
        fixable=True,
    ),
    Rule(
        id="DS106",
        severity=ERROR,
        title="A deprecated key beside the one that replaces it",
        effect="DeepSpeed asserts that only one of them is given.",
        mend="Remove the deprecated one.",
        example={"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
        fixable=True,
    ),
    Rule(
        id="DS107",
        severity=ERROR,
        title="One key under both of its names",
        effect="DeepSpeed raises ValidationError for the second name.",
        mend="Keep the one with stage3_ in front.",
        example={"zero_optimization": {"stage": 3, "max_live_parameters": 1e9, "stage3_max_live_parameters": 1e9}},
    ),
    Rule(
        id="DS108",
        severity=WARNING,
        title="A key of an old version",
        effect="DeepSpeed no longer documents it: it reads it as the new one where that is missing, or not at all.",
        mend="Write the new key.",
        example={"bfloat16": {"enabled": True}},
        fixable=True,
    ),
    Rule(
        id="DS109",
        severity=WARNING,
        title="A key of another program",
        effect="DeepSpeed ignores it and says nothing.",
        mend="Write DeepSpeed's own key.",
        example={"per_device_train_batch_size": 4},
        sources=_NOT_VALIDATED,
    ),
    Rule(
        id="DS110",
        severity=WARNING,
        title="A key in the wrong section",
        effect="DeepSpeed does not look for it there: it has no effect, or is refused.",
        mend="Move it.",
        example={"overlap_comm": True, **_STAGE},
        fixable=True,
    ),
    Rule(
        id="DS111",
        severity=INFO,
        title="Keys of a ZeRO stage that is not on",
        effect="DeepSpeed takes them and never looks at them.",
        mend="Remove them, or change the stage.",
        example={"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e8}},
        fixable=True,
    ),
    Rule(
        id="DS112",
        severity=INFO,
        title="A pipeline key that nothing reads",
        effect="DeepSpeed copies it into its configuration; PipelineModule takes it from its own arguments.",
        mend="Remove it, and pass it to PipelineModule.",
        example={"pipeline": {"stages": 2}},
        fixable=True,
    ),
    Rule(
        id="DS113",
        severity=INFO,
        title="A key that is meant as a comment",
        effect="DeepSpeed ignores it where it does not check keys, and refuses it elsewhere.",
        mend="Keep comments at the top level, or in a file beside it.",
        example={"_comment": "for 8 GPUs"},
    ),
)

_OLD = {"bfloat16": "bf16", "allgather_size": "zero_optimization.allgather_bucket_size"}
_OLD |= {"fp32_allreduce": 'communication_data_type: "fp32"'}
_BATCH = "train_micro_batch_size_per_gpu"
_FOREIGN = {
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size", "batch_size", "micro_batch_per_gpu"), _BATCH),
    **dict.fromkeys(("global_batch_size", "total_batch_size"), "train_batch_size"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad", "clip_grad_norm"), "gradient_clipping"),
    **dict.fromkeys(("learning_rate", "lr"), "optimizer.params.lr"),
    "weight_decay": "optimizer.params.weight_decay",
    "warmup_steps": "scheduler.params.warmup_num_steps",
    **dict.fromkeys(("zero_stage", "stage"), "zero_optimization.stage"),
    "mixed_precision": "bf16.enabled or fp16.enabled",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
}
_INSIDE_PARAMS = {
    "optimizer": ("lr", "betas", "eps", "weight_decay", "momentum", "torch_adam", "adam_w_mode"),
    "scheduler": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "warmup_type"),
}
_UNREAD_BY_THE_PIPELINE = ("stages", "partition", "partition_method", "seed_layers")
_ONLY_STAGE_3 = {
    *("sub_group_size", "memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings"),
    *("enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "pipeline_loading_checkpoint", "leaf_module"),
}
_ONLY_STAGES_1_AND_2 = {
    *("round_robin_gradients", "ignore_unused_parameters", "use_multi_rank_bucket_allreduce", "parameter_alignment"),
    *("allgather_bucket_size", "allgather_partitions"),
}
_FEATURES = ("stage", "offload_param", "offload_optimizer", "compute_grad_norm", "legacy_stage1")
"""Have rules of their own."""


def check(view: View) -> Iterator[Found]:
    """Every key against the schema."""
    yield from _section((), view.config, {"section": "lenient", "keys": schema()["keys"]}, view)
    yield from _without_effect(view)


def _section(path: Path, config: Mapping[str, Any], node: Node, view: View) -> Iterator[Found]:
    known, removed = members(node), schema()["removed"]
    for key, value in config.items():
        here = (*path, key)
        if ".".join(map(str, here)) in removed:
            off = not value or (isinstance(value, dict) and not value.get("enabled", True))
            message = f"{dotted(here)} belongs to a feature that was removed"
            yield Found("DS104", here, message, edits=(Edit("remove", here),) if off else ())
            continue
        if key in _OLD and not path:
            yield from _old(here, value, view)
            if key not in known or view.get(_OLD[key]) is not None:
                continue  # it is not read
        if key in known:
            yield from _known(here, key, config, known[key])
            child = known[key]
            if child.get("section") in ("strict", "lenient") and isinstance(value, Mapping):
                yield from _section(here, value, child, view)
        else:
            yield _unknown(here, value, node, view)


def _old(path: Path, value: Any, view: View) -> Iterator[Found]:
    new = _OLD[str(path[0])]
    can_rename = path[0] == "bfloat16" and not view.has("bf16")
    ignored = "; bf16 is given too, and wins" if path[0] == "bfloat16" and not can_rename else ""
    message = f"{path[0]} is the old name of {new}{ignored}"
    yield Found("DS108", path, message, edits=(Edit("rename", path, "bf16"),) if can_rename else ())


def _known(path: Path, key: str, config: Mapping[str, Any], node: Node) -> Iterator[Found]:
    name = node.get("name")
    if name and name != key and name in config:
        yield Found("DS107", (*path[:-1], name), f"{dotted(path)} is given as {name} too")
    old = node.get("deprecated")
    if not old:
        return
    by = old["by"]
    spellings = {by, f"stage3_{by}"}
    beside = next((other for other in config if other in spellings and old["moved"]), None)
    if beside is not None and config[key] != "auto":
        edits = (Edit("remove", path),)
        yield Found("DS106", path, f"{dotted(path)} is given beside {beside}", edits=edits)
        return
    message = f"{dotted(path)} is deprecated: {by.replace('gather_16bit', 'stage3_gather_16bit')} replaces it"
    yield Found("DS105", path, message, edits=_replacement(path, config[key], by))


def _replacement(path: Path, value: Any, by: str) -> tuple[Edit, ...]:
    """What --fix writes for a deprecated key."""
    if not isinstance(value, bool):
        return ()
    if not value:
        return (Edit("remove", path),)
    if by in ("offload_optimizer", "offload_param"):
        return (Edit("remove", path), Edit("set", (*path[:-1], by), {"device": "cpu"}))
    if by == "gather_16bit_weights_on_model_save":
        return (Edit("rename", path, f"stage3_{by}"),)
    return ()


def _unknown(path: Path, value: Any, node: Node, view: View) -> Found:
    key, strict = str(path[-1]), node["section"] == "strict"
    severity = ERROR if strict and value != "auto" else WARNING
    if key.startswith(("_", "//", "#")) or key.lower() in ("comment", "comments", "note", "notes", "description"):
        return _found("DS113", path, f"{dotted(path)} is read as a key", severity if strict else INFO)
    if not path[:-1] and key in _FOREIGN:
        return _found("DS109", path, f"{key} is no key of DeepSpeed: it says {_FOREIGN[key]}", severity)
    if path[0] == "pipeline" and key in _UNREAD_BY_THE_PIPELINE:
        return Found("DS112", path, f"{dotted(path)} has no effect", edits=(Edit("remove", path),))
    near = get_close_matches(key, members(node), n=1, cutoff=0.75)
    home = None if near and not path[:-1] else _home(path, view)
    if home is not None:
        target = (*home, key)
        fits = isinstance(view.get(".".join(home), {} if len(home) == 0 else None), Mapping) and not view.has(
            ".".join(target)
        )
        edits: tuple[Edit, ...] = (Edit("remove", path), Edit("set", target, value)) if fits else ()
        where = dotted(home) if home else "the top level"
        return _found("DS110", path, f"{dotted(path)} belongs into {where}", severity, edits)
    rule = "DS102" if strict else "DS103" if path[:-1] else "DS101"
    guess = near or get_close_matches(key, members(node), n=1, cutoff=0.6)
    hint = f". Did you mean {guess[0]}?" if guess else ""
    sure = get_close_matches(key, members(node), n=1, cutoff=0.85)
    can_rename = bool(sure) and not view.has(".".join(map(str, (*path[:-1], sure[0]))))
    edits = (Edit("rename", path, sure[0]),) if can_rename else ()
    return _found(rule, path, f"{dotted(path)} is not a key of DeepSpeed{hint}", severity, edits)


def _found(rule: str, path: Path, message: str, severity: Severity, edits: tuple[Edit, ...] = ()) -> Found:
    effect = None
    if severity is ERROR and rule not in ("DS102",):
        effect = "DeepSpeed raises ValidationError: this section takes no other keys."
    elif rule == "DS102" and severity is WARNING:
        effect = 'DeepSpeed drops it, because its value is "auto", and says nothing.'
    return Found(rule, path, message, effect=effect, severity=severity, edits=edits)


def _home(path: Path, view: View) -> tuple[str, ...] | None:
    """The section that a misplaced key surely belongs to."""
    key = str(path[-1])
    section = str(path[0]) if len(path) == 2 else ""
    if key in _INSIDE_PARAMS.get(section, ()):
        return (section, "params")
    found = [home for home in homes().get(key, []) if home != ".".join(map(str, path[:-1]))]
    return tuple(part for part in found[0].split(".") if part) if len(found) == 1 else None


def _without_effect(view: View) -> Iterator[Found]:
    """Keys of zero_optimization that the chosen stage does not look at, as one finding."""
    zero, stage = view.section("zero_optimization"), view.stage
    nodes = members(schema()["keys"]["zero_optimization"])
    idle = []
    for key, value in zero.items():
        node = nodes.get(key, {})
        stage_3 = key.startswith("stage3_") or "name" in node or key in _ONLY_STAGE_3
        unread = stage == 0 or (stage < 3 and stage_3) or (stage == 3 and key in _ONLY_STAGES_1_AND_2)
        if unread and node and key not in _FEATURES and value != node.get("default") and not key.startswith("zero_"):
            idle.append(key)
    if idle and isinstance(zero.get("stage", 0), int):
        rest = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        verb = "has" if len(idle) == 1 else "have"
        where = {0: "without ZeRO", 3: "under ZeRO-3"}.get(stage, f"under ZeRO-{stage}")
        edits = tuple(Edit("remove", ("zero_optimization", key)) for key in idle)
        path = ("zero_optimization", idle[0])
        yield Found("DS111", path, f"{dotted(path)}{rest} {verb} no effect {where}", edits=edits)
