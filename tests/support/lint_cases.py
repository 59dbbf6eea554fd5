"""Configs to lint: valid ones, as DeepSpeed's documentation and tests write them, and mistakes to plant into them."""

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from toolkit.config.layout import Layout
from toolkit.dsconfig.build import shape_of
from toolkit.lint import Finding, LintContext, Rule, Runner
from toolkit.lint.document import ConfigDocument, read_json, read_yaml
from toolkit.lint.key_schema import version_of
from toolkit.lint.linter import check_document

Config = dict[str, Any]

ADAMW = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
# PyTorch's kernels, so that nothing is compiled.
TORCH_ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "torch_adam": True}}


def document(example: Config | str) -> ConfigDocument:
    """A config, or the text of a JSON or YAML file."""
    if not isinstance(example, str):
        return read_json(json.dumps(example, indent=2), "config.json")
    is_json = example.lstrip("\ufeff").startswith("{")
    return read_json(example, "config.json") if is_json else read_yaml(example, "accelerate.yaml")


def lint(example: Config | str, *, runner: Runner | None = None, **context: Any) -> list[Finding]:
    return check_document(document(example), LintContext(**context), runner=runner)


def lint_example(
    rule: Rule, example: Config | str | None = None, context: Mapping[str, Any] | None = None
) -> list[Finding]:
    """The findings of a rule's example, or of another text with the same context."""
    given = context_of(rule.facts if context is None else context)
    return lint(rule.example if example is None else example, **given)


def context_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of LintContext for what a row of a table gives."""
    context = {name: _GIVEN.get(name, lambda value: value)(value) for name, value in given.items()}
    if "model" in context:
        context["shape"] = context.pop("model")
    return context


_GIVEN: dict[str, Callable[[Any], Any]] = {
    "layout": Layout.parse,
    "model": shape_of,
    "deepspeed": version_of,
    "conflicts": lambda rows: tuple((tuple(path), message) for path, message in rows),
}
"""How a value of Rule.facts becomes one of LintContext."""


def ids(findings: list[Finding], *severities: str) -> list[str]:
    return [finding.rule.id for finding in findings if not severities or finding.severity in severities]


def valid(runner: Runner = "deepspeed") -> dict[str, Config]:
    """Configs without an error or a warning, for 8 GPUs."""
    shared: Config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": True},
        "optimizer": ADAMW,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    zero = {"overlap_comm": True, "reduce_bucket_size": 50_000_000}
    out = {
        f"zero{stage}": shared | {"zero_optimization": {"stage": stage, **zero, "contiguous_gradients": True}}
        for stage in (1, 2)
    }
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    out["zero3"] = shared | {"zero_optimization": {"stage": 3, **zero, **gathers, "stage3_max_live_parameters": 1e9}}
    out["zero0"] = {key: value for key, value in shared.items() if key != "data_types"} | {
        "zero_optimization": {"stage": 0}
    }
    cpu = {"device": "cpu", "pin_memory": True}
    out["offload"] = shared | {"zero_optimization": {"stage": 2, **zero, "offload_optimizer": cpu}}
    everything = {"offload_optimizer": cpu, "offload_param": cpu}
    out["offload_all"] = shared | {"zero_optimization": {"stage": 3, **zero, **gathers, **everything}}
    out["fp16"] = shared | {
        "bf16": {"enabled": False},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
        "zero_optimization": {"stage": 1, **zero},
    }
    out["warmup"] = out["zero2"] | {
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-4,
                "warmup_num_steps": 100,
                "total_num_steps": 1000,
                "warmup_type": "linear",
            },
        }
    }
    return {name: copy.deepcopy(config) for name, config in out.items()}


class Planted(NamedTuple):
    """A valid config with one mistake, and the rule that must find it."""

    rule: str
    base: str
    config: Config
    context: dict[str, Any]


def planted(count: int, seed: int) -> list[Planted]:
    """`count` configs with one mistake each; every kind in turn, each time in another config with other values."""
    draw = random.Random(seed)
    bases = valid()
    out: list[Planted] = []
    kinds = list(_KINDS)
    while len(out) < count:
        for rule, plant in kinds:
            for base in draw.sample(sorted(bases), len(bases)):
                config = copy.deepcopy(bases[base])
                context = plant(config, draw)
                if context is not None and config != bases[base]:  # else this mistake has no place in this config
                    out.append(Planted(rule, base, config, context))
                    break
    return out[:count]


def _put(path: str, *values: Any) -> Callable[[Config, random.Random], dict[str, Any]]:
    def plant(config: Config, draw: random.Random) -> dict[str, Any]:
        inner = config
        *sections, key = path.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = copy.deepcopy(draw.choice(values))
        return {}

    return plant


def _misspelled(*paths: str) -> Callable[[Config, random.Random], dict[str, Any] | None]:
    """Drop, double or swap a letter of a key that is there."""

    def plant(config: Config, draw: random.Random) -> dict[str, Any] | None:
        path = draw.choice(paths)
        inner: Any = config
        *sections, key = path.split(".")
        for section in sections:
            inner = inner.get(section, {})
        if key not in inner:
            return None
        at = draw.randrange(1, len(key) - 1)
        wrong = draw.choice([key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:]])
        if wrong == key:
            return None
        entries = {wrong if name == key else name: value for name, value in inner.items()}
        inner.clear()
        inner.update(entries)
        return {}

    return plant


def _stage(*stages: int, needs: Callable[[Config, random.Random], Any]) -> Callable[[Config, random.Random], Any]:
    """A mistake that is one only at these stages."""

    def plant(config: Config, draw: random.Random) -> Any:
        if config["zero_optimization"]["stage"] not in stages:
            return None
        return needs(config, draw)

    return plant


def _as_text(*paths: str) -> Callable[[Config, random.Random], dict[str, Any] | None]:
    def plant(config: Config, draw: random.Random) -> dict[str, Any] | None:
        inner: Any = config
        *sections, key = draw.choice(paths).split(".")
        for section in sections:
            inner = inner.get(section, {})
        if key not in inner:
            return None
        inner[key] = str(inner[key])
        return {}

    return plant


def _without(path: str) -> Callable[[Config, random.Random], dict[str, Any] | None]:
    def plant(config: Config, draw: random.Random) -> dict[str, Any] | None:
        inner: Any = config
        *sections, key = path.split(".")
        for section in sections:
            inner = inner.get(section, {})
        return {} if inner.pop(key, None) is not None else None

    return plant


def _gpus(*numbers: int) -> Callable[[Config, random.Random], dict[str, Any]]:
    def plant(config: Config, draw: random.Random) -> dict[str, Any]:
        config["dump_state"] = False  # the mistake is the machine
        return {"gpus": draw.choice(numbers)}

    return plant


def _both_precisions(config: Config, draw: random.Random) -> dict[str, Any]:
    config["bf16"], config["fp16"] = {"enabled": True}, {"enabled": True}
    return {}


def _scheduler(**params: Any) -> Callable[[Config, random.Random], dict[str, Any]]:
    def plant(config: Config, draw: random.Random) -> dict[str, Any]:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_type": "linear"} | params}
        return {}

    return plant


def _both_names(config: Config, draw: random.Random) -> dict[str, Any] | None:
    zero = config["zero_optimization"]
    if "stage3_max_live_parameters" not in zero:
        return None
    zero["max_live_parameters"] = draw.choice((1e8, 1e9))
    return {}


def _auto_precision(config: Config, draw: random.Random) -> dict[str, Any]:
    config["bf16"] = {"enabled": "auto"}
    return {"runner": "deepspeed"}


_ZERO = "zero_optimization"
_KINDS: tuple[tuple[str, Callable[[Config, random.Random], Any]], ...] = (
    ("DS101", _misspelled("gradient_clipping", "steps_per_print", "wall_clock_breakdown", "optimizer")),
    ("DS102", _misspelled(f"{_ZERO}.overlap_comm", f"{_ZERO}.reduce_bucket_size", f"{_ZERO}.contiguous_gradients")),
    ("DS102", _misspelled("fp16.loss_scale", "bf16.enabled", f"{_ZERO}.stage3_max_live_parameters")),
    ("DS103", _put("flops_profiler.profile_steps", 3, 5)),
    ("DS103", _put("activation_checkpointing.partition_activation", False)),
    ("DS104", _put("amp", {"enabled": True}, {})),
    ("DS104", _put("curriculum_learning", {"enabled": False})),
    ("DS104", _put(f"{_ZERO}.mics_shard_size", 8)),
    ("DS105", _stage(1, 2, 3, needs=_put(f"{_ZERO}.cpu_offload_use_pin_memory", True, False))),
    ("DS107", _both_names),
    ("DS109", _put("per_device_train_batch_size", 1, 2, 8)),
    ("DS109", _put("max_grad_norm", 0.5, 1.0)),
    ("DS110", _put("reduce_bucket_size", 1e8)),
    ("DS110", _put("optimizer.lr", 1e-3, 2e-5)),
    ("DS111", _stage(1, 2, needs=_put(f"{_ZERO}.stage3_prefetch_bucket_size", 1e7, 1e8))),
    ("DS201", _put(f"{_ZERO}.overlap_comm", [], "perhaps")),
    ("DS201", _put(f"{_ZERO}.reduce_bucket_size", "large", {})),
    ("DS202", _as_text("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")),
    ("DS202", _as_text("optimizer.params.lr", "optimizer.params.weight_decay", "optimizer.params.eps")),
    ("DS203", _stage(1, 2, 3, needs=_put(f"{_ZERO}.reduce_bucket_size", 0, -1))),
    ("DS204", _put("gradient_accumulation_steps", 2.5, 1.5)),
    ("DS205", _put("communication_data_type", "float16", "half")),
    ("DS205", _put(f"{_ZERO}.stage", 4, -1, 7)),
    ("DS206", _put("prescale_gradients", "false", "no")),
    ("DS207", _put("gradient_clipping", None)),
    ("DS208", _put("flops_profiler", True, "on")),
    ("DS208", _put(_ZERO, 1, "2")),
    ("DS210", _put("gradient_clipping", -1, -0.5)),
    ("DS301", _put("train_batch_size", 257, 1023)),
    ("DS310", _gpus(4, 16, 2)),
    ("DS302", lambda config, draw: {} if config.pop("train_batch_size") and config.pop(_MICRO) else None),
    ("DS303", _put("train_micro_batch_size_per_gpu", 0, -4)),
    ("DS401", _both_precisions),
    ("DS405", lambda config, draw: {} if [config.pop(name, 0) for name in ("bf16", "fp16")] else None),
    ("DS501", _stage(1, 2, needs=_put(f"{_ZERO}.offload_param", {"device": "cpu"}))),
    ("DS502", _stage(0, needs=_put(f"{_ZERO}.offload_optimizer", {"device": "cpu"}))),
    ("DS503", _stage(3, needs=_put(f"{_ZERO}.offload_param", {"device": "nvme"}))),
    ("DS504", _stage(1, 2, needs=_put(f"{_ZERO}.offload_optimizer", {"device": "nvme", "nvme_path": "/nvme"}))),
    ("DS505", _stage(1, 2, needs=_put(f"{_ZERO}.offload_optimizer", {"device": "cpu", "ratio": 0.3}))),
    ("DS507", _without(f"{_ZERO}.stage3_gather_16bit_weights_on_model_save")),
    ("DS508", _put(f"{_ZERO}.compute_grad_norm", False)),
    ("DS509", _stage(0, 1, 2, needs=_put(f"{_ZERO}.zero_quantized_weights", True))),
    ("DS513", _stage(2, 3, needs=_put("prescale_gradients", True))),
    ("DS515", _stage(1, 2, 3, needs=_put("optimizer", {"type": "SGD", "params": {"lr": 0.1}}))),
    ("DS701", _put("optimizer.type", "sgd", "Adamw8bit", "adafactor")),
    ("DS702", _put("optimizer.type", "OneBitAdam", "ZeroOneAdam", "OneBitLamb")),
    ("DS704", _put("optimizer.params.max_grad_norm", 1.0, 0.5)),
    ("DS705", _put("optimizer.params.beta", 0.9)),
    ("DS706", _put("optimizer.params.betas", [0.9], [0.9, 1.0], 0.9)),
    ("DS707", _without("optimizer.params.lr")),
    ("DS709", _without("gradient_clipping")),
    ("DS751", _put("scheduler", {"type": "Cosine", "params": {}})),
    ("DS752", _put("scheduler", {"type": "WarmupCosineLR", "params": {"warmup_type": "linear"}})),
    ("DS753", _scheduler(warmup_steps=10)),
    ("DS755", _scheduler(warmup_num_steps=0)),
    ("DS757", _scheduler(warmup_type="cosine")),
    ("DS759", _scheduler(warmup_max_lr=0.01)),
    ("DS805", _put("wall_clock_breakdown", True)),
    ("HF103", _auto_precision),
    ("HF107", _put("train_batch_size", "Auto", "AUTO")),
)
_MICRO = "train_micro_batch_size_per_gpu"


def kinds() -> Iterator[str]:
    """The rules that the generator plants mistakes for."""
    yield from dict.fromkeys(rule for rule, _ in _KINDS)


class Reported(NamedTuple):
    """A mistake that somebody made and reported: the config, its context, and the key that a finding must name."""

    example: Config | str
    at: str
    link: str
    least: str
    given: dict[str, Any]

    def finding(self) -> Finding | None:
        """Return the first finding that is bad enough and names the key."""
        enough = ("error", "warning", "info")[: 3 if self.least == "info" else 2]
        for found in lint(self.example, **self.given):
            name = self.at.rpartition(".")[2]
            if found.severity in enough and (".".join(map(str, found.path)) == self.at or name in found.message):
                return found
        return None


def reported(path: Path, group: str = "mistakes", *, mistaken: bool = True) -> list[Reported]:
    """Read mistakes: each row changes (`put`) or shortens (`drop`) one of the file's base configs, or is a text.

    `expect` says what goes wrong and how to fix it. The rows with it, and those of `written_unseen`, were written
    before lint was held against them. Not `mistaken`: the base configs themselves, without the context.
    """
    data = json.loads(path.read_text())
    out = []
    for row in data[group]:
        config = copy.deepcopy(data["bases"].get(row.get("base"), {}))
        for name in row.get("drop", ()) if mistaken else ():
            del config[name]
        for name, value in row.get("put", {}).items() if mistaken else ():
            _put(name, value)(config, random.Random(0))
        text = yaml.safe_dump(config) if "distributed_type" in config else config
        example = row["text"] if mistaken and "text" in row else text
        given = context_of(row.get("given", {}) if mistaken else {})
        given["runner"] = row.get("runner") if mistaken else None
        out.append(Reported(example, row["at"], row.get("link", ""), row.get("least", "warning"), given))
    return out
