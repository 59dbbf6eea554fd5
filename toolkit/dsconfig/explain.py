"""Explain every key of a generated config: purpose, DeepSpeed's default, and reason of its value (explain.json)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.dsconfig.buckets import of_a_layer
from toolkit.dsconfig.build import Config, ConfigJob
from toolkit.dsconfig.merge import leaves


@dataclass(frozen=True, kw_only=True)
class Key:
    """The row of a key in explain.json."""

    purpose: str
    why: str | Mapping[str, str]
    """Why a job has the value that it has: a text, or a text for each value (as JSON has it) and `else`.

    `{job}`, `{value}` and `{buckets}` are filled in.
    """
    default: Any = None
    """Value that DeepSpeed uses if the key is absent and no other key decides."""
    auto: str | None = None
    """What the Hugging Face Trainer replaces `auto` by, an argument of its or another value; None where it does not."""


AUTO = "auto"
_TABLE = json.loads(Path(__file__).with_name("explain.json").read_text(encoding="utf-8"))
KEYS: Mapping[str, Key] = {path: Key(**row) for path, row in _TABLE["keys"].items()}
"""Every key that is ever generated, by its path."""
OPTIMIZER_DEFAULTS: Mapping[str, Mapping[str, Any]] = _TABLE["optimizer_defaults"]
"""Defaults of the class that DeepSpeed builds for a type: FusedAdam, torch's SGD and Adagrad, FusedLamb, FusedLion."""
SCHEDULER_DEFAULTS: Mapping[str, Mapping[str, Any]] = _TABLE["scheduler_defaults"]

_COMPUTED_DEFAULTS: Mapping[str, Callable[[ConfigJob, str], Any]] = {
    "zero_optimization.overlap_comm": lambda job, path: job.layout.zero_stage == 3,
    **{
        path: lambda job, path: _default_of_type(job.config, path)
        for path, key in KEYS.items()
        if ".params." in path and key.default is None
    },
}


@dataclass(frozen=True, kw_only=True)
class ExplainedKey:
    """One key of one config."""

    path: str
    value: Any
    purpose: str
    default: Any
    why: str


def explain(config: Config, job: ConfigJob) -> list[ExplainedKey]:
    """Explain every key of a config that was built for `job`, in its order."""
    written = dict(leaves(job.config))
    return [
        ExplainedKey(
            path=path,
            value=value,
            purpose=KEYS[path].purpose,
            default=_COMPUTED_DEFAULTS[path](job, path) if has_computed_default(path) else KEYS[path].default,
            why=f"filled in from {KEYS[path].auto}" if value == AUTO else _why(path, written.get(path), job),
        )
        for path, value in leaves(config)
    ]


def has_computed_default(path: str) -> bool:
    """Return whether DeepSpeed's default follows from another key."""
    return path in _COMPUTED_DEFAULTS


def _why(path: str, value: Any, job: ConfigJob) -> str:
    why = KEYS[path].why
    if not isinstance(why, str):
        name = value if isinstance(value, str) else json.dumps(value)
        why = why[name] if name in why else why["else"]
    buckets = (job.options.buckets or of_a_layer(job.hidden_size)) if "{buckets" in why else None
    return why.format(job=job, value=value, buckets=buckets)


def _default_of_type(config: Config, path: str) -> Any:
    section, name = path.split(".params.")
    table = OPTIMIZER_DEFAULTS if section == "optimizer" else SCHEDULER_DEFAULTS
    return table[config[section]["type"]].get(name)
