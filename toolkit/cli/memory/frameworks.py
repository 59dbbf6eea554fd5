"""Setups of other frameworks in `dstk memory`: how they keep model states, and what a step of theirs computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from toolkit.cli import option_of
from toolkit.config.layout import Layout
from toolkit.config.recipe import Precision
from toolkit.errors import ConfigError, LayoutError
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.framework_profile import profile
from toolkit.estimate.memory_request import Framework
from toolkit.estimate.states import TorchStates
from toolkit.estimate.trainable import Trainable
from toolkit.files import expanded, read_json_object, reason_of

_TRAINER_BATCH = 8
"""`per_device_train_batch_size` of the Trainer."""
_PRECISIONS: dict[int, str] = {2: "16 bits", 4: "fp32"}
_DEFAULTS = {"reduce_bucket_size": 1, "overlap_comm": 1, "stage3_prefetch_bucket_size": 3, "sub_group_size": 3}
"""Keys of zero_optimization that take memory where a config leaves them out, and the stage from which on."""
_OFFLOAD = ("offload_optimizer", "offload_params")
_OMIT = "leave one of them out"
_EXCLUDES = {
    "framework": ("deepspeed", "trainer", "engine", "optimizer", "pure_bf16", "chunked_loss", "trainable", *_OFFLOAD),
    "deepspeed": ("engine", "pure_bf16", *_OFFLOAD),
    "trainer": _OFFLOAD,
    "pure_bf16": _OFFLOAD,
}


@dataclass(frozen=True, kw_only=True)
class FrameworkSetup:
    """Another framework's setup, where it differs from training with this toolkit."""

    name: str
    framework: Framework
    precision: Precision
    computed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Computation that the setup decides."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Layout that the setup decides."""
    micro_batch_size: int = 1
    accumulation: int | None = None
    notes: tuple[str, ...] = ()
    """Notes for the user about defaults that are another framework's."""


def framework_setup(options: Mapping[str, Any], layout: Layout, hidden: int) -> FrameworkSetup | None:
    """The setup that the options name; None where it is this toolkit's own. Raises ConfigError or LayoutError."""
    _check_exclusive(options)
    not_in_recipes = ["trainable", "chunked_loss"]
    if _has_own_8_bits(options):
        not_in_recipes.append("optimizer")
    decisive = next((name for name in ("deepspeed", "trainer", "pure_bf16", *not_in_recipes) if options[name]), "")
    if decisive and layout.tp * layout.pp > 1:
        conflict = ((option_of(decisive), options[decisive]), ("--layout", str(layout)))
        raise LayoutError.between(conflict, "these layers are not sharded by tp or pp", "leave tp and pp out")
    if options["deepspeed"]:
        return _deepspeed(options, layout, hidden)
    if options["framework"]:
        return _profile(options)
    if decisive in not_in_recipes and options["engine"] in (None, "deepspeed"):
        reason = "this toolkit's recipes do not have it"
        raise ConfigError.of(option_of(decisive), options[decisive], reason, "add --trainer, or --engine ddp or fsdp")
    return _torch(options, layout) if decisive else None


def _check_exclusive(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for two options that fix the same setting."""
    for name, others in _EXCLUDES.items():
        for other in others:
            agrees = name == options[other] == "deepspeed"  # the engine that --deepspeed FILE is for
            if options[name] and options[other] and not agrees:
                conflict = ((option_of(name), options[name]), (option_of(other), options[other]))
                raise ConfigError.between(conflict, "the first already fixes that setting", _OMIT)


def _has_own_8_bits(options: Mapping[str, Any]) -> bool:
    """Whether a script's own 8-bit AdamW is meant, which FSDP2 can have, too."""
    return options["optimizer"] == "adamw8bit" and options["engine"] in ("ddp", "fsdp")


def _profile(options: Mapping[str, Any]) -> FrameworkSetup:
    """A framework's profile. Its kind of attention is the default."""
    framework = profile(options["framework"])
    if options["precision"] is not None:
        framework = replace(framework, precision=options["precision"])
    return FrameworkSetup(
        name=framework.name,
        framework=framework,
        precision=framework.precision,
        computed={"attention": options["attention"] or next(iter(framework.facts["attention"]))},
    )


def _torch(options: Mapping[str, Any], layout: Layout) -> FrameworkSetup:
    """DDP or FSDP2 by the Trainer or a script: bf16 is autocast over fp32 weights, or everything with --pure-bf16."""
    engine = options["engine"] or "ddp"
    pure = options["pure_bf16"]
    precision: Precision = options["precision"] or "bf16"
    if engine == "deepspeed" or layout.zero_stage or layout.ulysses * layout.cp > 1:
        reason = "there is no ZeRO and no shared sequence without DeepSpeed"
        raise ConfigError.of("--layout", str(layout), reason, "name the config: --deepspeed FILE")
    if pure and precision != "bf16":
        conflict = (("--pure-bf16", True), ("--precision", precision))
        raise ConfigError.between(conflict, "the weights have one precision", _OMIT)
    in_16_bits = precision != "fp32"
    sharded = engine == "fsdp"
    trainable = _trainable(options)
    gathered_bytes = 0
    if sharded:
        gathered_bytes = 2 if in_16_bits else 4
    states = TorchStates(
        trained_bytes=4 if trainable.rank else 0,
        gathered_bytes=gathered_bytes,
        autocast=in_16_bits and not pure,
        has_buckets=not sharded and layout.dp > 1,
        weight_bytes=2 if pure else 4,
        moments=_moments(options),
        in_8_bits=options["optimizer"] == "adamw8bit",
        fp32_embeddings=bool(options["trainer"]) and not sharded,
        muon=options["optimizer"] == "muon",
        factored=options["optimizer"] == "adafactor",
    )
    return FrameworkSetup(
        name=f"Trainer, {engine}" if options["trainer"] else engine,
        framework=states,
        precision=precision,
        computed={"loss_chunk": options["chunked_loss"] or 0, "trainable": trainable.text},
        micro_batch_size=_TRAINER_BATCH if options["trainer"] else 1,
        accumulation=1 if options["trainer"] else None,
    )


def _trainable(options: Mapping[str, Any]) -> Trainable:
    """Return the selection of parameters that train; all of them without --trainable."""
    return Trainable.parse("all" if options["trainable"] is None else options["trainable"])


def _moments(options: Mapping[str, Any]) -> int:
    return {"sgd": 0, "lion": 1}.get(options["optimizer"], 2)


@dataclass(frozen=True, kw_only=True)
class _UserConfig:
    """The user's own DeepSpeed config, with what the Trainer fills in where it reads it."""

    path: str
    keys: Mapping[str, Any]
    zero: Mapping[str, Any]
    """The section zero_optimization; empty without one."""
    settings: DeepSpeedSettings

    @classmethod
    def read(cls, path: str, *, for_trainer: bool, hidden: int, precision: str) -> Self:
        """Read a config; with `for_trainer` its `auto` depends on the model's width and on the precision.

        Raises ConfigError for a file that is no config, or whose `auto` nobody replaces.
        """
        try:
            keys = read_json_object(expanded(path), follow=True)
            if for_trainer:
                keys = _as_trainer(keys, hidden, precision)
            zero = dict(keys.get("zero_optimization") or {})
            automatic = _autos(keys)
            if automatic:
                reason = f"{automatic[0]} is auto, which DeepSpeed does not replace"
                raise ConfigError.of("--deepspeed", path, reason, "add --trainer")
            return cls(path=path, keys=keys, zero=zero, settings=DeepSpeedSettings.from_config(keys))
        except OSError as error:
            raise ConfigError(f"{path}: {reason_of(error)}. Give a DeepSpeed config.") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: {reason_of(error)}. `dstk lint {path}` names what is wrong.") from error

    def count(self, key: str) -> int | None:
        """A batch size; None where it is left out. Raises ConfigError where it is none."""
        value = self.keys.get(key)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError.of(key, value, "it is not a number of samples", "write a whole number")
        return value

    @property
    def left_to_defaults(self) -> list[str]:
        """What takes memory by a default of DeepSpeed's, in words."""
        settings = self.settings
        defaults = []
        has_dtype = settings.model_bytes == 4 or (self.keys.get("data_types") or {}).get("grad_accum_dtype")
        if not has_dtype:
            precision = _PRECISIONS[settings.accumulation_bytes]
            defaults.append(f"gradients accumulate in {precision} (this toolkit's configs: fp32)")
        for key, least_stage in _DEFAULTS.items():
            if settings.zero_stage >= least_stage and key not in self.zero:
                defaults.append(f"{key} {_default(settings, key)}")
        return defaults


def _deepspeed(options: Mapping[str, Any], layout: Layout, hidden: int) -> FrameworkSetup:
    """The user's own DeepSpeed config. What it does not say has DeepSpeed's defaults, not this toolkit's."""
    path = options["deepspeed"]
    for_trainer = bool(options["trainer"])
    config = _UserConfig.read(path, for_trainer=for_trainer, hidden=hidden, precision=options["precision"] or "bf16")
    global_batch_size = config.count("train_batch_size")
    micro_batch_size = config.count("train_micro_batch_size_per_gpu")
    if micro_batch_size is None:
        micro_batch_size = _TRAINER_BATCH if for_trainer else 1
    settings = _with_optimizer(config, options)
    if layout.zero_stage not in (0, settings.zero_stage):
        reason = f"{path} says ZeRO stage {settings.zero_stage}"
        raise LayoutError.of("--layout", str(layout), reason, "leave z out of the layout")
    precision = settings.precision if settings.autocast == "none" else settings.autocast
    if options["precision"] not in (None, precision):
        raise ConfigError.of("--precision", options["precision"], f"{path} says {precision}", _OMIT)
    accumulation = config.count("gradient_accumulation_steps")
    if accumulation is None:
        accumulation = max(1, (global_batch_size or micro_batch_size) // (micro_batch_size * layout.replicas))
    trainable = _trainable(options)
    if settings.model_bytes == 2:  # the engine casts the whole model, with its adapters
        trainable = replace(trainable, in_fp32=False)
    defaults = config.left_to_defaults
    return FrameworkSetup(
        name="Trainer, DeepSpeed" if for_trainer else "DeepSpeed",
        framework=settings,
        precision=precision,
        computed={"loss_chunk": options["chunked_loss"] or 0, "trainable": trainable.text},
        layout={
            "zero_stage": settings.zero_stage,
            "hpz": settings.hpz,
            "offload_optimizer": _device(settings.offload_optimizer, settings.nvme_optimizer),
            "offload_params": _device(settings.offload_params, settings.nvme_params),
        },
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        notes=(f"{path} leaves to DeepSpeed's defaults: {', '.join(defaults)}",) if defaults else (),
    )


def _with_optimizer(config: _UserConfig, options: Mapping[str, Any]) -> DeepSpeedSettings:
    """Return the settings with the optimizer of the script, where the config has none.

    Raises ConfigError where both name one, or where DeepSpeed does not run the script's.
    """
    settings = config.settings
    if "optimizer" not in config.keys:
        _check_optimizer(options["optimizer"], settings)
        in_8_bits = options["optimizer"] == "adamw8bit"
        counts_in_tensors = bool(options["trainer"]) and not in_8_bits
        return replace(settings, moments=_moments(options), in_8_bits=in_8_bits, counts_in_tensors=counts_in_tensors)
    if options["optimizer"]:
        raise ConfigError.of("--optimizer", options["optimizer"], f"{config.path} has an optimizer", _OMIT)
    return settings


def _device(is_offloaded: bool, to_nvme: bool) -> str:
    if to_nvme:
        return "nvme"
    return "cpu" if is_offloaded else "none"


def _check_optimizer(name: str | None, settings: DeepSpeedSettings) -> None:
    """Raise ConfigError for an optimizer of the script that DeepSpeed's flat partitions do not suit."""
    reason = "it updates matrices, and DeepSpeed hands it flat partitions" if name in ("muon", "adafactor") else None
    if name == "adamw8bit" and settings.offload_optimizer:
        reason = "bitsandbytes has no such update for host memory"
    if reason:
        raise ConfigError.of("--optimizer", name, reason, "choose adamw")


def _default(settings: DeepSpeedSettings, key: str) -> str:
    value = getattr(settings, key.removeprefix("stage3_"))
    return str(value).lower() if isinstance(value, bool) else f"{value:,}"


def _as_trainer(config: Mapping[str, Any], hidden: int, precision: str) -> dict[str, Any]:
    """Return the config as the Trainer fills in `auto` (transformers, integrations/deepspeed.py)."""
    sizes = {
        "reduce_bucket_size": hidden**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden**2),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    zero = dict(config.get("zero_optimization") or {})
    for key, size in sizes.items():
        if zero.get(key) == "auto":
            zero[key] = size
    filled = {key: value for key, value in config.items() if value != "auto"}
    filled["zero_optimization"] = zero
    for name in ("bf16", "fp16"):
        if (config.get(name) or {}).get("enabled") == "auto":
            filled[name] = {"enabled": name == precision}
    return filled


def _autos(value: Any, name: str = "") -> list[str]:
    """Return the names of the keys that say auto and affect memory."""
    if isinstance(value, Mapping) and name not in ("scheduler", "optimizer"):
        return [path for key, inner in value.items() for path in _autos(inner, f"{name}.{key}".lstrip("."))]
    return [name] if value == "auto" else []
