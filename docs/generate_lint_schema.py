"""Write toolkit/lint/schema.json: every key that the installed DeepSpeed reads from a config.

python docs/generate_lint_schema.py

Sections that DeepSpeed declares (pydantic models) are read from the declarations. The others exist only as look-ups in
a dict: DeepSpeedConfig is built from a dict that records which keys are read, and with which defaults.
"""

import copy
import enum
import inspect
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import annotated_types
import deepspeed
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import config as ds
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.model_checkpointing.constants import CHECKPOINT_DATA_PARALLEL_UNITS, CHECKPOINT_WRITER_TYPES
from deepspeed.utils import logger
from deepspeed.utils.logging import log_levels
from lint_unread_keys import unread
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import override

FILE = Path(__file__).parents[1] / "toolkit" / "lint" / "schema.json"
Node = dict[str, Any]

_PROBE = "_a_key_that_nobody_declares"
_MINIMAL: Node = {"train_micro_batch_size_per_gpu": 1}
_MISSING: Any = object()

# Types of keys that are looked up with the default None: what DeepSpeed then computes with.
_TYPES = {
    "train_batch_size": "int",
    "train_micro_batch_size_per_gpu": "int",
    "gradient_accumulation_steps": "int",
    "steps_per_print": "int",
    "communication_data_type": "str",
    "log_level": "str",
    "vocabulary_size": "int",
    "sequence_parallel_size": "int",
    "data_parallel_size": "int",
    "activation_checkpointing.number_checkpoints": "int",
    "flops_profiler.output_file": "str",
    "data_types.grad_accum_dtype": "str",
    "data_types.param_dtype": "str",
    "data_types.buffer_dtype": "str",
    "data_types.keep_in_fp32_modules": "any",
    "checkpoint.writer.data_parallel": "str",
    "checkpoint.writer.type": "str",
    "autotuning.max_train_batch_size": "int",
    "autotuning.metric_path": "str",
    "autotuning.model_info_path": "str",
    "autotuning.arg_mappings": "object",
    "torch_autocast.dtype": "str",
    "torch_autocast.lower_precision_safe_modules": "list",
    "optimizer.type": "str",
    "scheduler.type": "str",
    "optimizer.params": "object",
    "scheduler.params": "object",
}
# Look-ups that accept one of a few words, from DeepSpeed's own list if it has one.
_DTYPES = sorted(name for dtype in ds.DtypeEnum for name in dtype._all_values if isinstance(name, str))
_WORDS = {
    "communication_data_type": ["bf16", "fp16", "fp32"],
    "seq_parallel_communication_data_type": ["bf16", "fp16", "fp32"],
    "gradient_allreduce_op": list(ds.GRADIENT_ALLREDUCE_OP_SUPPORTED),
    "checkpoint.tag_validation": list(ds.CHECKPOINT_TAG_VALIDATION_MODES),
    "data_types.grad_accum_dtype": [name for name in _DTYPES if "int" not in name],
    "data_types.param_dtype": _DTYPES,
    "data_types.buffer_dtype": _DTYPES,
    "torch_autocast.dtype": _DTYPES,
    "log_level": list(log_levels),
    "checkpoint.writer.type": list(CHECKPOINT_WRITER_TYPES),
    "checkpoint.writer.data_parallel": list(CHECKPOINT_DATA_PARALLEL_UNITS),
}
_UPPER_OR_LOWER = {
    *("communication_data_type", "seq_parallel_communication_data_type"),
    *("gradient_allreduce_op", "checkpoint.tag_validation", "log_level"),
    *("checkpoint.writer.type", "checkpoint.writer.data_parallel"),
}
_NULL_IS_FINE = {
    *("steps_per_print", "communication_data_type", "seq_parallel_communication_data_type"),
    *("data_types.grad_accum_dtype", "data_types.param_dtype", "data_types.buffer_dtype"),
    "checkpoint.writer.data_parallel",
}
# Constraints of validators.
_VALIDATED: dict[str, Node] = {
    "DeepSpeedFP16Config.loss_scale": {"ge": 0, "finite": True, "no_truth": True},
    "DeepSpeedFP16Config.loss_scale_window": {"no_truth": True},
    "DeepSpeedFP16Config.min_loss_scale": {"no_truth": True},
    "ZenFlowConfig.select_strategy": {"types": ["word"], "words": ["auto", "step", "epoch"]},
    "ZenFlowConfig.select_interval": {"types": ["int"], "exact": True},
    "ZenFlowConfig.update_interval": {"types": ["int"], "exact": True, "ge": 1},
    "DeepSpeedZeroLeafModuleConfig.classes": {"types": ["list", "str"]},
    "DeepSpeedZeroLeafModuleConfig.names": {"types": ["list", "str"]},
    "DeepSpeedZeroLeafModuleConfig.name_suffixes": {"types": ["list", "str"]},
    "DeepSpeedZeroConfig.leaf_module": {"types": ["null"]},
}
# Read by other code than DeepSpeedConfig, once the feature is on.
_READ_ELSEWHERE: Node = {
    "pipeline": {
        name: {"types": ["bool"], "default": default}
        for name, default in (("use_reentrant", True), ("pipe_partitioned", True), ("grad_partitioned", True))
    }
    | {"activation_checkpoint_interval": {"types": ["int"], "default": 0, "ge": 0}},
    "optimizer": {"legacy_fusion": {"types": ["bool"], "default": False}},
}
# Passed to the feature as they are.
_OPEN = (
    *("data_efficiency.data_sampling", "data_efficiency.data_routing", "datastates_ckpt"),
    *("optimizer.params", "scheduler.params"),
)


class Recorder(dict[str, Any]):
    """A dict that records which keys are read."""

    def __init__(self, values: Node | None = None) -> None:
        super().__init__(values or {})
        self.read: dict[str, Any] = {}

    def _record(self, key: Any, default: Any = _MISSING) -> None:
        if isinstance(key, str) and self.read.get(key, _MISSING) is _MISSING:
            self.read[key] = default

    @override
    def get(self, key: str, default: Any = None) -> Any:
        self._record(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._record(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._record(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        """Return itself: `key in d.keys()` is a look-up too."""
        return self

    def __copy__(self) -> "Recorder":
        return self

    def __deepcopy__(self, memo: Any) -> "Recorder":
        return self


def schema() -> Node:
    """Return the contents of the file."""
    removed = {**ds._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    keys = dict(sorted(_top_level(removed).items()))
    return {
        "deepspeed": deepspeed.__version__,
        "keys": keys,
        "unread": unread(keys),
        "removed": sorted([*removed, *(f"zero_optimization.{key}" for key in ds._REMOVED_ZERO_CONFIG_KEYS)]),
        "optimizers": _optimizers(),
        "schedulers": _schedulers(),
    }


def _top_level(removed: Iterable[str]) -> Node:
    recorder = Recorder(_MINIMAL)
    with (
        mock.patch.object(ds.dist, "get_rank", return_value=0),
        mock.patch.object(ds.dist, "get_world_size", return_value=1),
    ):
        ds.DeepSpeedConfig(recorder)
    read = recorder.read
    for key in re.findall(r'"(\w+)" in config\b', inspect.getsource(deepspeed.initialize)):
        read.setdefault(key, _MISSING)
    return {key: _node((key,), default) for key, default in read.items() if key not in set(removed)}


def _node(path: tuple[str, ...], default: Any) -> Node:
    """Return what the value at `path` is: a declared section, a section of look-ups, or a value."""
    name = ".".join(path)
    if name in _OPEN:
        return {"section": "open", "keys": {}}
    model = _model_at(path)
    if model is not None:
        return {"section": "strict", "keys": _fields(model)}
    probe = Recorder({"enabled": True, "type": "AdamW"})
    _build(path, probe)
    read = {key: value for key, value in probe.read.items() if key != _PROBE}
    if read or name in _READ_ELSEWHERE:
        keys = {key: _node((*path, key), value) for key, value in sorted(read.items())}
        return {"section": "lenient", "keys": dict(sorted((keys | _READ_ELSEWHERE.get(name, {})).items()))}
    return _value(name, default)


def _build(path: tuple[str, ...], value: Any) -> Exception | None:
    """Build a config with `value` at `path`, and return the error of DeepSpeed, if any."""
    for key in reversed(path[1:]):
        value = {"enabled": True, "type": "AdamW", key: value}
    config = copy.copy(_MINIMAL) | {path[0]: value}
    try:
        ds.DeepSpeedConfig(config)
    except Exception as error:
        return error
    return None


def _model_at(path: tuple[str, ...]) -> type[DeepSpeedConfigModel] | None:
    error = _build(path, {_PROBE: 1})
    places = [problem["loc"] for problem in error.errors()] if isinstance(error, ValidationError) else []
    place = next((place for place in places if place[-1] == _PROBE), None)
    if place is None:
        return None
    assert isinstance(error, ValidationError)
    model = next(model for model in _models(DeepSpeedConfigModel) if model.__name__ == error.title)
    for part in place[:-1]:
        model = _kinds(model.model_fields[str(part)].annotation)[2]
    return model


def _models(model: type[DeepSpeedConfigModel]) -> Iterator[type[DeepSpeedConfigModel]]:
    for child in model.__subclasses__():
        yield child
        yield from _models(child)


def _fields(model: type[DeepSpeedConfigModel]) -> Node:
    nodes = {}
    for name, field in model.model_fields.items():
        node = _field(field) | _VALIDATED.get(f"{model.__name__}.{name}", {})
        if field.alias:
            node["name"] = name  # accepted too
        nodes[field.alias or name] = node
    return dict(sorted(nodes.items()))


def _field(field: FieldInfo) -> Node:
    kinds, words, model = _kinds(field.annotation)
    items = [argument for kind in _parts(field.annotation) for argument in typing.get_args(kind)]
    if model is not None:
        return {"section": "strict", "keys": _fields(model), **({"types": ["null"]} if "null" in kinds else {})}
    node: Node = {"types": kinds}
    if words:
        node["words"] = words
    if "list" in kinds and items and items != [...]:
        item_kinds, item_words, _ = _kinds(items[0])
        node["items"] = {"types": item_kinds, **({"words": item_words} if item_words else {})}
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    node["default"] = _plain(default)
    for bound in field.metadata:
        for kind in ("Gt", "Ge", "Lt", "Le"):
            if isinstance(bound, getattr(annotated_types, kind)):
                node[kind.lower()] = _plain(getattr(bound, kind.lower()))
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra.get("deprecated"):
        node["deprecated"] = {"by": extra.get("new_param", ""), "moved": extra.get("set_new_param", True)}
    return node


def _parts(annotation: Any) -> list[Any]:
    """Return the list types of an annotation."""
    parts = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else ()
    return [part for part in (annotation, *parts) if typing.get_origin(part) is list]


def _kinds(annotation: Any) -> tuple[list[str], list[Any], type[DeepSpeedConfigModel] | None]:
    """Return the JSON types, the allowed words, and the model if it is a section."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [_kinds(part) for part in typing.get_args(annotation)]
        kinds = [kind for part in parts for kind in part[0]]
        words = [word for part in parts for word in part[1]]
        return kinds, words, next((part[2] for part in parts if part[2]), None)
    if origin is typing.Literal:
        return ["word"], list(typing.get_args(annotation)), None
    if isinstance(annotation, type) and issubclass(annotation, DeepSpeedConfigModel):
        return ["object"], [], annotation
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ["word"], list(dict.fromkeys(member.value for member in annotation)), None
    names = {bool: "bool", int: "int", float: "float", str: "str", Path: "str", type(None): "null"}
    names |= {list: "list", tuple: "list", dict: "object", torch.dtype: "python"}
    return [names.get(origin or annotation, "any")], [], None


def _value(name: str, default: Any) -> Node:
    known = None if default is _MISSING else default
    names: dict[type, str] = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "object"}
    node: Node = {"types": [_TYPES.get(name) or names.get(type(known), "any")], "default": _plain(known)}
    if known == "auto":
        node["types"] = ["any"]
    if (known is None and name not in _WORDS) or name in _NULL_IS_FINE:
        node["types"].append("null")
    if name in _WORDS:
        node["words"] = _WORDS[name]
        if name in _UPPER_OR_LOWER:
            node["any_case"] = True
    return node


def _plain(value: Any) -> Any:
    """Return a value as JSON."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value)


_ADAM_WORDS = {"torch_adam": False, "adam_w_mode": True, "fp32_optimizer_states": None}


def _optimizers() -> Node:
    """Return the parameters that the classes of each name accept: DeepSpeed's (GPU and CPU) and PyTorch's."""
    cpu_adam = _parameters(DeepSpeedCPUAdam, drop=("adamw_mode", "fp32_optimizer_states"))
    adam = {"gpu": _parameters(FusedAdam, drop=("adam_w_mode",)), "cpu": cpu_adam, "own": _ADAM_WORDS}
    muon = dict.fromkeys((*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS, "muon_lr", "adam_lr"))
    table: Node = {
        "adam": adam | {"torch": _parameters(torch.optim.Adam)},
        "adamw": adam | {"torch": _parameters(torch.optim.AdamW)},
        "adagrad": {"gpu": _parameters(torch.optim.Adagrad), "cpu": _parameters(DeepSpeedCPUAdagrad)},
        "lamb": {"gpu": _parameters(FusedLamb)},
        "lion": {"gpu": _parameters(FusedLion), "cpu": _parameters(DeepSpeedCPULion)},
        "muon": {"read": muon | {"ns_method": None, "per_head_muon": None}, "own": _ADAM_WORDS},
    }
    for name in sorted(set(ds.DEEPSPEED_OPTIMIZERS) - table.keys()):
        table[name] = {"package": "mup"}
    for name, kind in _classes(torch.optim, torch.optim.Optimizer):
        table[name] = {"gpu": _parameters(kind)}
    return {"names": sorted(ds.DEEPSPEED_OPTIMIZERS), "types": dict(sorted(table.items())), "tested": _tested()}


def _tested() -> list[str]:
    """Return the classes that ZeRO accepts without `zero_allow_untested_optimizer`."""
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    return sorted({kind.__name__ for kind in ZERO_SUPPORTED_OPTIMIZERS})


def _schedulers() -> Node:
    own = {name: _parameters(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES}
    torch_own = dict(_classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler))
    return {
        "names": sorted(own),
        "types": dict(sorted((own | {name: _parameters(kind) for name, kind in torch_own.items()}).items())),
    }


def _classes(module: types.ModuleType, base: type) -> list[tuple[str, type]]:
    found = inspect.getmembers(module, lambda kind: inspect.isclass(kind) and issubclass(kind, base))
    return [(name, kind) for name, kind in found if not name.startswith("_") and kind is not base]


def _parameters(kind: Callable[..., Any], drop: tuple[str, ...] = ()) -> Node:
    """Return the arguments of a constructor besides the parameters or the optimizer: name -> default, or `required`."""
    found = list(inspect.signature(kind).parameters.values())[1:]
    return {
        parameter.name: "required" if parameter.default is parameter.empty else _plain(parameter.default)
        for parameter in found
        if parameter.name not in drop and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def text() -> str:
    """Return the text of the file."""
    logger.setLevel("ERROR")
    return json.dumps(schema(), indent=1, sort_keys=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
