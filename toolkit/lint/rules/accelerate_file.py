"""AC: the config file of accelerate, which names a DeepSpeed config or replaces it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from toolkit.config.source_text import Path
from toolkit.errors import nearest
from toolkit.lint.document import ConfigDocument
from toolkit.lint.finding import Violation, rename, set_to, shown
from toolkit.lint.key_schema import FACTS, misspelled
from toolkit.lint.other_programs import find
from toolkit.lint.values import as_number, is_number

_FACTS = FACTS["accelerate"]
"""`keys`: the fields of accelerate 1.15's ClusterConfig, and two old ones that it converts; `deepspeed_keys`: those of
deepspeed_config that become keys of DeepSpeed."""
_YAML_11 = re.compile(r"(?i:no|off|on|yes|y|n)")
_TRUTHS = ("y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0")
_OWN_ADDRESSES = ("0.0.0.0", "127.0.0.1", "localhost", "::1")
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
    """Return the DeepSpeed config that the file names."""
    section = value.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    return named if isinstance(named, str) else None


def derive(value: Mapping[str, Any]) -> Derived:
    """Return what accelerate makes of the keys of deepspeed_config."""
    section = value.get("deepspeed_config")
    section = section if isinstance(section, Mapping) else {}
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
    }
    origin: dict[Path, Path] = {(): ("deepspeed_config",), ("zero_optimization",): ("deepspeed_config",)}
    for key, target in _FACTS["deepspeed_keys"].items():
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
    for states in ("optimizer", "param"):
        offload = config["zero_optimization"].get(f"offload_{states}", {})
        if offload.get("device") != "nvme":
            offload.pop("nvme_path", None)
            if not offload:
                config["zero_optimization"].pop(f"offload_{states}", None)
    precision = value.get("mixed_precision")
    for name in ("bf16", "fp16"):
        config[name] = {"enabled": precision == name}
        origin[(name,)] = ("mixed_precision",)
    return Derived(config, origin)


def _as_environment(value: Any) -> Any:
    """Convert a value as accelerate does: it passes values on as strings, and parses numbers from them."""
    if isinstance(value, str):
        for number in (int, float):
            with suppress(ValueError):
                return number(value)
    return value


def check(document: ConfigDocument, gpus: int | None) -> Iterator[Violation]:
    """Check the file of accelerate itself."""
    value = document.value
    yield from _unknown("AC101", (), value, _FACTS["keys"], "accelerate")
    unquoted = [*_unquoted(document)]
    yield from unquoted
    yield from _words(value, {violation.path[0] for violation in unquoted})
    kind = value.get("distributed_type")
    section = value.get("deepspeed_config")
    if not isinstance(section, Mapping):
        return
    edits = set_to(("distributed_type",), "DEEPSPEED")
    if kind is None:
        yield Violation("AC111", (), "distributed_type is missing", edits=edits)
    elif kind != "DEEPSPEED" and section:
        word = shown(kind).strip('"')
        message = f"deepspeed_config with distributed_type: {word}"
        yield Violation("AC105", ("distributed_type",), message, edits=edits)
        return
    yield from _machines(value, section, gpus)
    yield from _section(document, section)


def _words(value: Mapping[str, Any], reported: set[Any]) -> Iterator[Violation]:
    for key, words in _FACTS["words"].items():
        word = value.get(key)
        if key == "distributed_type":
            known = word in words
        else:
            known = str(word).lower() in (allowed.lower() for allowed in words)
        if word is not None and key not in reported and not known:
            yield Violation("AC112", (key,), f"{key}: {shown(word)} is not {', '.join(words)}")
    for key in _FACTS["numbers"]:
        if (number := as_number(value.get(key))) is not None:
            yield Violation("DS202", (key,), f"{key}: {shown(value[key])} is a string, not a number").setting(number)


def _machines(value: Mapping[str, Any], section: Mapping[str, Any], gpus: int | None) -> Iterator[Violation]:
    machines = value.get("num_machines", 1)
    launcher = section.get("deepspeed_multinode_launcher", "pdsh")
    needed = ("main_process_ip", "machine_rank") if launcher in ("standard", "nossh") else ("deepspeed_hostfile",)
    missing = [key for key in needed if (dict(value) | dict(section)).get(key) is None]
    ranks = value.get("num_processes")
    machine = value.get("machine_rank")
    if is_number(machines) and machines > 1:
        if missing:
            yield Violation("AC113", ("num_machines",), f"num_machines: {machines} without {' and '.join(missing)}")
        if (address := value.get("main_process_ip")) in _OWN_ADDRESSES:
            yield Violation("AC113", ("main_process_ip",), f"main_process_ip: {address} on num_machines: {machines}")
        if is_number(ranks) and ranks > 0 and ranks % machines:
            yield Violation("AC115", ("num_processes",), f"num_processes: {ranks} on num_machines: {machines}")
        if is_number(machine) and machine >= machines:
            yield Violation("AC115", ("machine_rank",), f"machine_rank: {machine} of num_machines: {machines}")
    for key in ("fsdp_config", "megatron_lm_config"):
        if value.get("distributed_type") == "DEEPSPEED" and value.get(key):
            yield Violation("AC116", (key,), f"{key} with distributed_type: DEEPSPEED").removing()
    if gpus is not None and isinstance(ranks, int) and ranks not in (gpus, -1):
        yield Violation("AC110", ("num_processes",), f"num_processes: {ranks}, on {gpus} GPUs").setting(gpus)


def _unknown(rule: str, path: Path, config: Mapping[str, Any], known: list[str], where: str) -> Iterator[Violation]:
    for key in config:
        if key not in known:
            close = nearest(key, known)
            sure = misspelled(key, known, config)
            edits = rename((*path, key), sure) if sure else ()
            yield Violation(
                rule, (*path, key), f"{shown(key)} is not a key of {where}.{close}".rstrip("."), edits=edits
            )


def _section(document: ConfigDocument, section: Mapping[str, Any]) -> Iterator[Violation]:
    base = "deepspeed_config"
    collides = _FACTS["deepspeed_keys"].keys() - {"offload_optimizer_nvme_path"}
    known = [*_FACTS["deepspeed_keys"], *_FACTS["other_keys"]]
    yield from _unknown("AC102", (base,), section, known, "accelerate's deepspeed_config")
    for states in ("optimizer", "param"):
        key = f"offload_{states}_nvme_path"
        if section.get(key) and section.get(f"offload_{states}_device") != "nvme":
            yield Violation("DS525", (base, key), f"{key} with another device")
    if isinstance(flag := section.get("zero3_init_flag"), str) and flag.lower() not in _TRUTHS:
        yield Violation("AC112", (base, "zero3_init_flag"), f"zero3_init_flag: {shown(flag)} is not true or false")
    if section.get("gradient_accumulation_steps") == "auto":
        yield Violation("AC117", (base, "gradient_accumulation_steps"), "gradient_accumulation_steps: auto").removing()
    named = section.get("deepspeed_config_file")
    if isinstance(named, str) and named not in ("none", ""):
        for key in section:
            if key in collides:
                yield Violation("AC103", (base, key), f"{key} next to deepspeed_config_file").removing()
        if document.value.get("mixed_precision") not in (None, "no", False):
            yield Violation("AC103", ("mixed_precision",), "mixed_precision next to deepspeed_config_file").removing()
        if find(named, document.file) is None:
            message = f"deepspeed_config_file: {shown(named)} does not exist"
            yield Violation("AC104", (base, "deepspeed_config_file"), message)
    elif section.get("zero3_init_flag") in (True, "true") and section.get("zero_stage", 2) in (0, 1, 2):
        message = f"zero3_init_flag with zero_stage: {section.get('zero_stage', 2)}"
        yield Violation("AC107", (base, "zero3_init_flag"), message).removing()
    elif section.get("zero3_init_flag") in (False, "false") and section.get("zero_stage") == 3:
        yield Violation("AC114", (base, "zero3_init_flag"), "zero3_init_flag: false with zero_stage: 3")


def _unquoted(document: ConfigDocument) -> Iterator[Violation]:
    """Check for words that YAML 1.1 reads as true or false."""
    for key, kinds in _WORDS.items():
        span = document.spans.get((key,))
        value = document.value.get(key)
        if span is None or value is None or isinstance(value, kinds):
            continue
        text = document.text[span.start : span.end]
        if isinstance(value, bool) and _YAML_11.fullmatch(text):
            yield Violation("AC108", (key,), f"{key}: {text} is read as {shown(value)}").setting(text)


def check_config(config: Mapping[str, Any], mixed_precision: str | None, from_file: bool) -> Iterator[Violation]:
    """Check a DeepSpeed config that is given to Accelerator (or the Trainer, which uses it)."""
    if from_file and "zero_optimization" not in config:
        edits = set_to(("zero_optimization",), {"stage": 0})
        yield Violation("AC109", (), "zero_optimization is missing", edits=edits)
    precision = {"fp16": "bf16", "bf16": "fp16", "fp8": "fp16"}.get(mixed_precision or "")
    section = config.get(precision) if precision else None
    if isinstance(section, Mapping) and str(section.get("enabled")).lower() == "true":
        path: Path = (str(precision), "enabled")
        yield Violation("AC106", path, f"{precision}.enabled=true with mixed_precision: {mixed_precision}")
