"""DeepSpeedSettings: the fields of a DeepSpeed config that affect memory, with DeepSpeed's defaults."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from toolkit.errors import ConfigError
from toolkit.estimate.states import moments_8bit

Wrapper = Literal["none", "bf16", "zero12", "zero3", "unfused"]
"""The optimizer of DeepSpeed that keeps the states; `none`: the client optimizer, not wrapped."""

BYTES = {"fp32": 4, "float32": 4, "float": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2}
_MOMENTS = {"adam": 2, "adamw": 2, "fusedadam": 2, "lamb": 2, "adagrad": 1, "lion": 1}
_FUSED = ("adam", "adamw")
_NOT_MODELED = {
    "zero_optimization": (
        "zenflow",
        "super_offload",
        "mics_shard_size",
        "zero_quantized_weights",
        "zero_quantized_gradients",
    ),
    "bf16": ("bf16_master_weights_and_grads",),
    "fp16": ("fp16_master_weights_and_grads",),
    "tensor_parallel": ("autotp_size",),
    "compile": ("deepcompile",),
}
"""Settings that take or save memory which the estimate does not know."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """Settings of one engine. `from_config` reads any DeepSpeed config."""

    zero_stage: int = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the weights; under autocast they are fp32."""
    autocast: Literal["none", "bf16", "fp16"] = "none"
    accumulation_bytes: int = 4
    """Bytes of an accumulated gradient's element."""
    communication_bytes: int = 4
    reduce_bucket_size: int = 500_000_000
    """Elements of a bucket in which gradients are reduced."""
    prefetch_bucket_size: int = 50_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    persistence_threshold: int = 100_000
    """ZeRO-3 replicates parameters of at most so many elements."""
    max_live_parameters: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_params: bool = False
    nvme_optimizer: bool = False
    """Whether what is offloaded is in files; the buffers through which it passes are in host memory."""
    nvme_params: bool = False
    optimizer_buffers: int = 4
    param_buffer_elements: int = 0
    """Elements of all buffers together through which offloaded parameters pass."""
    file_bytes: int = 2**20
    """Size from which on tensors are written to files; smaller ones stay in memory."""
    file_alignment: int = 8192
    hpz: int = 1
    """Ranks that share ZeRO++'s secondary partition of the weights."""
    moments: int = 2
    """fp32 states that the optimizer keeps per element."""
    in_8_bits: bool = False
    """Moments of one byte, by bitsandbytes."""
    hidden_in_8_bits: bool = False
    """Whether the moments of decoder layers' matrices alone take one byte each: the 8-bit AdamW of recipes."""
    muon: bool = False
    """The toolkit's Muon: of matrices of the decoder layers one moment, and no counter."""
    factored: bool = False
    """Adafactor of the toolkit: whole rows and columns, and neither moments nor counters."""
    counts_in_tensors: bool = True
    """PyTorch's Adam keeps a step counter beside each tensor; DeepSpeed's counts in plain numbers."""
    fused: bool = True
    """Whether the update runs in one kernel, without temporaries."""
    by_decay: bool = True
    """Whether parameters with and without weight decay are separate groups."""
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def model_bytes(self) -> int:
        return BYTES[self.precision]

    @property
    def wrapper(self) -> Wrapper:
        """The optimizer that DeepSpeed wraps around the one that updates (engine.py, `_do_optimizer_sanity_check`)."""
        if self.zero_stage == 3:
            return "zero3"
        if self.zero_stage:
            flat = self.precision == "bf16" and self.accumulation_bytes == 4
            return "bf16" if self.zero_stage == 1 and flat and not self.offload_optimizer else "zero12"
        return "none" if self.precision == "fp32" else "unfused"

    def optimizer_bytes(self, tensors: Iterable[tuple[int, int]]) -> int:
        """Moments of the tensors that are updated, given as (elements, how many), and counters of four bytes."""
        if self.in_8_bits:
            return moments_8bit(tensors)
        counter = 4 if self.counts_in_tensors else 0
        return sum((4 * self.moments * elements + counter) * count for elements, count in tensors)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, device: Literal["cuda", "cpu"] = "cuda") -> Self:
        """Read a DeepSpeed config. Raises ConfigError for settings that are not modeled."""
        zero = config.get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))
        _refuse(config, zero)
        precision = _precision(config)
        gradient = (config.get("data_types") or {}).get("grad_accum_dtype") or precision
        # DeepSpeed overlaps by default with ZeRO-3 alone (zero/config.py).
        overlap = zero.get("overlap_comm")
        return cls(
            zero_stage=stage,
            precision=precision,
            autocast=_autocast(config),
            accumulation_bytes=_bytes(gradient),
            communication_bytes=_bytes(config.get("communication_data_type") or precision),
            reduce_bucket_size=int(zero.get("reduce_bucket_size", 500_000_000)),
            prefetch_bucket_size=int(zero.get("stage3_prefetch_bucket_size", 50_000_000)),
            overlap_comm=stage == 3 if overlap is None else bool(overlap),
            contiguous_gradients=bool(zero.get("contiguous_gradients", True)),
            persistence_threshold=int(zero.get("stage3_param_persistence_threshold", 100_000)),
            max_live_parameters=int(zero.get("stage3_max_live_parameters", 1_000_000_000)),
            sub_group_size=int(zero.get("sub_group_size", 1_000_000_000)),
            offload_optimizer=_is_offloaded(zero, "offload_optimizer", "cpu_offload"),
            offload_params=_is_offloaded(zero, "offload_param", "cpu_offload_params"),
            **_nvme(config, zero),
            hpz=int(zero.get("zero_hpz_partition_size", 1)),
            **_optimizer(config.get("optimizer") or {}, device),
            device=device,
        )


def _precision(config: Mapping[str, Any]) -> Literal["fp32", "bf16", "fp16"]:
    """Return the dtype of the weights."""
    if _enabled(config.get("bf16") or config.get("bfloat16")):
        return "bf16"
    if _enabled(config.get("fp16")):
        return "fp16"
    return "fp32"


def _optimizer(section: Mapping[str, Any], device: Literal["cuda", "cpu"]) -> dict[str, Any]:
    """Return the fields that the optimizer decides. Without a section the caller's own runs: on a CPU PyTorch's."""
    name = str(section.get("type", "adamw")).lower()
    params = section.get("params") or {}
    is_pytorch = bool(params.get("torch_adam")) or (not section and device == "cpu")
    if name == "sgd":
        moments = 1 if params.get("momentum") else 0
    else:
        moments = _MOMENTS[name]
    return {
        "moments": moments,
        "counts_in_tensors": is_pytorch and name in _FUSED,
        "fused": not is_pytorch or bool(params.get("fused")),
    }


def _refuse(config: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that are not modeled."""
    section = zero.get("offload_param") or {}
    if section.get("device") == "nvme" and (in_memory := section.get("max_in_cpu", 1_000_000_000)):
        field = "zero_optimization.offload_param.max_in_cpu"
        raise ConfigError.of(field, in_memory, "only weights that are all on NVMe are estimated", (field, 0))
    for section, keys in _NOT_MODELED.items():
        for key in keys:
            value = (config.get(section) or {}).get(key)
            if value is True or (value not in (None, False, 0, 1, -1, "auto") and value != {}):
                raise ConfigError.of(f"{section}.{key}", value, "the estimate does not know it", "leave it out")
    ratio = (zero.get("offload_optimizer") or {}).get("ratio", 1)
    if float(ratio) != 1:
        key = "zero_optimization.offload_optimizer.ratio"
        raise ConfigError.of(key, ratio, "the estimate has all or nothing", "leave it out")
    optimizer = str((config.get("optimizer") or {}).get("type", "adamw")).lower()
    if optimizer not in (*_MOMENTS, "sgd"):
        raise ConfigError.of("optimizer.type", optimizer, "it is not estimated", f"choose {', '.join(_MOMENTS)} or sgd")


def _autocast(config: Mapping[str, Any]) -> Literal["none", "bf16", "fp16"]:
    """Return the dtype of DeepSpeed's torch_autocast section."""
    section = config.get("torch_autocast") or {}
    if not _enabled(section):
        return "none"
    return "fp16" if section.get("dtype") in ("float16", "fp16") else "bf16"


def _enabled(section: object) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _is_offloaded(zero: Mapping[str, Any], key: str, legacy: str) -> bool:
    """Whether a section names a device to offload to, or the `legacy` flag of older versions is on."""
    return (zero.get(key) or {}).get("device", "none") in ("cpu", "nvme") or zero.get(legacy) is True


def _nvme(config: Mapping[str, Any], zero: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of NVMe offload (deepspeed/runtime/swap_tensor: optimizer_utils.py, partitioned_param_swapper.py)."""
    optimizer = zero.get("offload_optimizer") or {}
    params = zero.get("offload_param") or {}
    aio = config.get("aio") or {}
    return {
        "nvme_optimizer": optimizer.get("device") == "nvme" and int(zero.get("stage", 0)) == 3,
        "nvme_params": params.get("device") == "nvme",
        "optimizer_buffers": int(optimizer.get("buffer_count", 4)),
        "param_buffer_elements": int(params.get("buffer_count", 5)) * int(params.get("buffer_size", 100_000_000)),
        "file_bytes": max(2**20, int(aio.get("block_size", 2**20))),
        "file_alignment": 1024 * int(aio.get("intra_op_parallelism", 1)),
    }


def _bytes(name: str) -> int:
    if name not in BYTES:
        raise ConfigError.of("data_types", name, "DeepSpeed has no such dtype", "choose fp32, bf16 or fp16")
    return BYTES[name]
