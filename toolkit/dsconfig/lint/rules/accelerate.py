"""AC: the config file of accelerate, around the DeepSpeed config and instead of one."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from toolkit.dsconfig.lint.document import Document
from toolkit.dsconfig.lint.finding import ERROR, INFO, WARNING, Edit, Found, Path, Rule, shown
from toolkit.errors import nearest

_D = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n"
_COLLIDE = (
    "https://github.com/huggingface/accelerate/pull/941",
    "https://github.com/huggingface/accelerate/issues/936",
)

RULES = (
    Rule(
        id="AC101",
        severity=ERROR,
        title="A key that accelerate does not know",
        effect="accelerate launch stops: the config file had unknown keys.",
        mend="Correct the name, or remove the key.",
        example=_D + "  zero_stage: 2\nnum_procs: 8\n",
        fixable=True,
    ),
    Rule(
        id="AC102",
        severity=WARNING,
        title="A key of deepspeed_config that accelerate does not read",
        effect="accelerate ignores it and says nothing. Its names are its own: DeepSpeed's belong into a JSON file.",
        mend="Correct the name, or move the setting into a file named by deepspeed_config_file.",
        example=_D + "  zero_stage: 3\n  zero3_save_16bit: true\n",
        sources=("https://github.com/hiyouga/LlamaFactory/issues/253",),
        fixable=True,
    ),
    Rule(
        id="AC103",
        severity=ERROR,
        title="A setting beside deepspeed_config_file that belongs into that file",
        effect="accelerate raises ValueError: these variables would be ignored.",
        mend="Remove it here, and write it in the JSON file.",
        example=_D + "  deepspeed_config_file: ds.json\n  zero_stage: 3\n",
        sources=_COLLIDE,
        fixable=True,
    ),
    Rule(
        id="AC104",
        severity=ERROR,
        title="deepspeed_config_file does not exist",
        effect="accelerate takes the path for a base64 text, and raises ValueError.",
        mend="Correct the path. It is relative to the folder in which accelerate is started.",
        example=_D + "  deepspeed_config_file: missing.json\n",
    ),
    Rule(
        id="AC105",
        severity=WARNING,
        title="deepspeed_config without distributed_type: DEEPSPEED",
        effect="accelerate ignores the section, and trains with what distributed_type says.",
        mend="Write distributed_type: DEEPSPEED.",
        example="distributed_type: MULTI_GPU\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 2\n",
        fixable=True,
    ),
    Rule(
        id="AC106",
        severity=ERROR,
        title="mixed_precision against the DeepSpeed config",
        effect="accelerate raises ValueError, or takes the DeepSpeed config's.",
        mend="Say it once: leave mixed_precision out where there is a deepspeed_config_file.",
        example={"bf16": {"enabled": True}},
        given={"runner": "accelerate", "mixed_precision": "fp16"},
    ),
    Rule(
        id="AC107",
        severity=INFO,
        title="zero3_init_flag without ZeRO-3",
        effect="accelerate warns and sets it to false.",
        mend="Remove it, or set zero_stage to 3.",
        example=_D + "  zero_stage: 2\n  zero3_init_flag: true\n",
        fixable=True,
    ),
    Rule(
        id="AC108",
        severity=ERROR,
        title="An unquoted no, off or on",
        effect="YAML reads it as true or false, and accelerate fails on a word that is none.",
        mend="Put it into quotes: 'no'.",
        example=_D + "  zero_stage: 2\nmixed_precision: no\n",
        fixable=True,
    ),
    Rule(
        id="AC109",
        severity=ERROR,
        title="A DeepSpeed config without zero_optimization",
        effect="Accelerator and the Trainer raise ValueError: please specify the ZeRO optimization config.",
        mend='Write "zero_optimization": {"stage": 0} where no ZeRO is meant.',
        example={"train_micro_batch_size_per_gpu": "auto"},
        given={"runner": "accelerate"},
        fixable=True,
    ),
    Rule(
        id="AC110",
        severity=WARNING,
        title="num_processes is not the number of GPUs",
        effect="accelerate starts num_processes ranks, and no others.",
        mend="Write the number of GPUs of all machines together.",
        example=_D + "  zero_stage: 2\n",
        given={"gpus": 16},
        fixable=True,
    ),
    Rule(
        id="AC111",
        severity=ERROR,
        title="No distributed_type",
        effect="accelerate launch stops: a distributed_type must be specified in the config file.",
        mend="Write distributed_type: DEEPSPEED.",
        example="num_processes: 8\ndeepspeed_config:\n  zero_stage: 2\n",
        fixable=True,
    ),
)

_KEYS = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
    *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config"),
    *("fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm"),
    *(
        "tpu_env",
        "dynamo_config",
        "fp16",
        "dynamo_backend",
    ),
)
"""The fields of accelerate 1.15's ClusterConfig, and the two old ones that it converts."""
_INSIDE = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Keys of deepspeed_config that become keys of DeepSpeed."""
_BESIDE = (
    *("deepspeed_config_file", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
    *(
        "deepspeed_multinode_launcher",
        "deepspeed_moe_layer_cls_names",
        "zero3_init_flag",
    ),
)
_COLLIDES = {*_INSIDE} - {"offload_optimizer_nvme_path", "gradient_accumulation_steps"} | {
    "gradient_accumulation_steps"
}
_YAML_11 = re.compile(r"(?i:no|off|on|yes|y|n)")
_WORDS: dict[str, type | tuple[type, ...]] = {
    "distributed_type": str,
    "mixed_precision": str,
    "downcast_bf16": (str, bool),
    "rdzv_backend": str,
}


class Derived(NamedTuple):
    """The DeepSpeed config that accelerate would build, and which key each of its values comes from."""

    config: dict[str, Any]
    origin: dict[Path, Path]


def config_file(value: Mapping[str, Any]) -> str | None:
    """The DeepSpeed config that the file names."""
    section = value.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    return named if isinstance(named, str) else None


def find(named: str, beside: str) -> FilePath | None:
    """A named config: relative to the working directory, as for accelerate, else beside the file that names it."""
    for place in (FilePath(named).expanduser(), FilePath(beside).parent / named):
        if place.is_file():
            return place
    return None


def derive(value: Mapping[str, Any]) -> Derived:
    """What accelerate makes of the keys of deepspeed_config."""
    section = value.get("deepspeed_config")
    section = section if isinstance(section, Mapping) else {}
    config: dict[str, Any] = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    config |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
    origin: dict[Path, Path] = {(): ("deepspeed_config",), ("zero_optimization",): ("deepspeed_config",)}
    for key, target in _INSIDE.items():
        if key not in section or section[key] is None:
            continue
        path = tuple(target.split("."))
        inner = config
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = _as_environment(section[key])
        origin[path] = ("deepspeed_config", key)
        if key.endswith("_device"):
            origin[path[:-1]] = origin[path]
    for what in ("optimizer", "param"):
        offload = config["zero_optimization"].get(f"offload_{what}", {})
        if offload.get("device") != "nvme":
            offload.pop("nvme_path", None)
            if not offload:
                config["zero_optimization"].pop(f"offload_{what}", None)
    precision = value.get("mixed_precision")
    for name in ("bf16", "fp16"):
        config[name] = {"enabled": precision == name}
        origin[(name,)] = ("mixed_precision",)
    return Derived(config, origin)


def _as_environment(value: Any) -> Any:
    """accelerate passes values on as texts, and reads numbers from them."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            try:
                return float(value)
            except ValueError:
                return value
    return value


def check(document: Document, gpus: int | None) -> Iterator[Found]:
    """The file of accelerate itself."""
    value = document.value
    for key in value:
        if key not in _KEYS:
            close = nearest(key, _KEYS)
            edits = (Edit("rename", (key,), close.split()[-1].rstrip("?")),) if close else ()
            yield Found("AC101", (key,), f"{shown(key)} is not a key of accelerate.{close}".rstrip("."), edits=edits)
    yield from _unquoted(document)
    kind, section = value.get("distributed_type"), value.get("deepspeed_config")
    if not isinstance(section, Mapping):
        return
    if kind is None:
        edit = Edit("set", ("distributed_type",), "DEEPSPEED")
        yield Found("AC111", (), "distributed_type is missing", edits=(edit,))
    elif kind != "DEEPSPEED" and section:
        edit = Edit("set", ("distributed_type",), "DEEPSPEED")
        message = f"deepspeed_config with distributed_type: {shown(kind).strip(chr(34))}"
        yield Found("AC105", ("distributed_type",), message, edits=(edit,))
    ranks = value.get("num_processes")
    if gpus is not None and isinstance(ranks, int) and ranks not in (gpus, -1):
        edits = (Edit("set", ("num_processes",), gpus),)
        yield Found("AC110", ("num_processes",), f"num_processes: {ranks}, on {gpus} GPUs", edits=edits)
    yield from _section(document, section)


def _section(document: Document, section: Mapping[str, Any]) -> Iterator[Found]:
    base = "deepspeed_config"
    known = [*_INSIDE, *_BESIDE]
    for key in section:
        if key not in known:
            close = nearest(key, known)
            edits = (Edit("rename", (base, key), close.split()[-1].rstrip("?")),) if close else ()
            message = f"{shown(key)} is not a key of accelerate's deepspeed_config.{close}".rstrip(".")
            yield Found("AC102", (base, key), message, edits=edits)
    named = section.get("deepspeed_config_file")
    if isinstance(named, str) and named not in ("none", ""):
        for key in section:
            if key in _COLLIDES:
                path = (base, key)
                yield Found("AC103", path, f"{key} beside deepspeed_config_file", edits=(Edit("remove", path),))
        if document.value.get("mixed_precision") not in (None, "no", False):
            where = ("mixed_precision",)
            yield Found("AC103", where, "mixed_precision beside deepspeed_config_file", edits=(Edit("remove", where),))
        if find(named, document.file) is None:
            path = (base, "deepspeed_config_file")
            yield Found("AC104", path, f"deepspeed_config_file: {shown(named)} does not exist")
    elif section.get("zero3_init_flag") in (True, "true") and section.get("zero_stage", 2) in (0, 1, 2):
        path = (base, "zero3_init_flag")
        message = f"zero3_init_flag with zero_stage: {section.get('zero_stage', 2)}"
        yield Found("AC107", path, message, edits=(Edit("remove", path),))


def _unquoted(document: Document) -> Iterator[Found]:
    """Words that YAML 1.1 reads as true or false."""
    for key, kinds in _WORDS.items():
        span = document.spans.get((key,))
        value = document.value.get(key)
        if span is None or value is None or isinstance(value, kinds):
            continue
        text = document.text[span.start : span.end]
        if isinstance(value, bool) and _YAML_11.fullmatch(text):
            message = f"{key}: {text} is read as {shown(value)}"
            yield Found("AC108", (key,), message, edits=(Edit("set", (key,), text),))


def check_config(config: Mapping[str, Any], mixed_precision: str | None, from_file: bool) -> Iterator[Found]:
    """A DeepSpeed config that Accelerator (or the Trainer, which uses it) is given."""
    if from_file and "zero_optimization" not in config:
        edit = Edit("set", ("zero_optimization",), {"stage": 0})
        yield Found("AC109", (), "zero_optimization is missing", edits=(edit,))
    other = {"fp16": "bf16", "bf16": "fp16", "fp8": "fp16"}.get(mixed_precision or "")
    section = config.get(other) if other else None
    if isinstance(section, Mapping) and str(section.get("enabled")).lower() == "true":
        path: Path = (str(other), "enabled")
        yield Found("AC106", path, f"{other}.enabled=true with mixed_precision: {mixed_precision}")
