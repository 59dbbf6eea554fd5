"""The view of a rule: a DeepSpeed config, and the context in which it is used."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.config.layout import Layout
from toolkit.config.source_text import Path
from toolkit.lint.values import is_number
from toolkit.models.shape import ModelShape
from toolkit.models.weights import head_matmul_parameters, layer_matmul_parameters

Runner = Literal["deepspeed", "trainer", "accelerate", "toolkit"]
"""Program that passes the config to DeepSpeed, and so replaces `auto`: a script, the Hugging Face Trainer,
`Accelerator`, or a recipe of this toolkit."""

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
GPU_BYTES = 24 * 2**30
"""Default memory of a GPU: what is wasteful on 24 GiB is wasteful on any GPU for training."""


@dataclass(frozen=True, kw_only=True)
class LintContext:
    """Facts that are known about the run besides the config."""

    gpus: int | None = None
    nodes: int | None = None
    layout: Layout | None = None
    """Layout of the run; None if unknown. Its dp counts only if `gpus` is not given."""
    shape: ModelShape | None = None
    gpu_bytes: int = GPU_BYTES
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """The Hugging Face TrainingArguments that were given."""
    conflicts: tuple[tuple[Path, str], ...] = ()
    """Values that contradict the recipe: path and message."""
    recipe: str | None = None
    runner: Runner = "deepspeed"
    deepspeed: tuple[int, ...] = (0, 19, 8)
    mixed_precision: str | None = None
    """The precision in accelerate's config; None if there is none."""
    inference: bool = False
    """Whether the name of the file says that the config is for inference."""

    @property
    def pp(self) -> int:
        return self.layout.pp if self.layout else 1

    @property
    def tp(self) -> int:
        return self.layout.tp if self.layout else 1

    @property
    def parameters(self) -> int | None:
        """Parameters of the model, without norms and biases (under 0.1 %) and learned positions (1 % of GPT-2)."""
        shape = self.shape
        if shape is None:
            return None
        embedding = 0 if shape.tied else shape.vocab * shape.embed_dim
        return shape.layers * layer_matmul_parameters(shape) + head_matmul_parameters(shape) + embedding


class View:
    """A config with the queries that rules need. A value of a wrong type counts as missing."""

    def __init__(self, config: Mapping[str, Any], context: LintContext) -> None:
        self.config = config
        self.context = context

    def get(self, dotted: str, default: Any = None) -> Any:
        """Return the value at `a.b.c`, or the default if it is missing."""
        value: Any = self.config
        for key in dotted.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value

    def has(self, dotted: str) -> bool:
        return self.get(dotted, _NOTHING) is not _NOTHING

    def section(self, dotted: str) -> Mapping[str, Any]:
        value = self.get(dotted)
        return value if isinstance(value, Mapping) else {}

    def number(self, dotted: str, default: float | None = None) -> float | None:
        value = self.get(dotted)
        return value if is_number(value) else default

    def is_on(self, dotted: str, default: bool = False) -> bool:
        """Return whether a switch is on, as pydantic would read it."""
        value = self.get(dotted, default)
        if isinstance(value, str):
            return value.lower() in ("1", "on", "t", "true", "y", "yes")
        return bool(value) if isinstance(value, (bool, int, float)) else default

    def walk(self) -> Iterator[tuple[Path, Any]]:
        """Yield every key with its value, including sections."""
        yield from _walk((), self.config)

    @property
    def stage(self) -> int:
        """The ZeRO stage that DeepSpeed would use; 0 for an invalid one and for `auto`."""
        zero = self.get("zero_optimization")
        if isinstance(zero, bool):
            return int(zero)
        stage = self.get("zero_optimization.stage", 0)
        if stage == "auto" and self.context.runner in ("trainer", "accelerate"):
            return 2  # accelerate's
        if isinstance(stage, str) and stage.strip() in ("0", "1", "2", "3"):
            return int(stage)
        return int(stage) if isinstance(stage, (int, float)) and stage in (0, 1, 2, 3) else 0

    @property
    def precision(self) -> Literal["bf16", "fp16", "fp32"]:
        wanted = {"fp16": self.is_on("fp16.enabled"), "bf16": self.is_on(f"{self.bf16}.enabled")}
        if self.context.runner in ("trainer", "accelerate"):
            for name in wanted:
                argument = self.context.trainer.get(name, self.context.mixed_precision == name)
                if self.get(f"{name}.enabled", "auto") == "auto" and argument is True:
                    wanted[name] = True
        if wanted["bf16"]:
            return "bf16"
        return "fp16" if wanted["fp16"] else "fp32"

    @property
    def bf16(self) -> str:
        """The name of the bf16 section: DeepSpeed still reads the old one if there is no new one."""
        return "bf16" if self.get("bf16") is not None else "bfloat16"

    @property
    def has_auto_batch(self) -> bool:
        """Whether a batch size is left to the Trainer or Accelerator: DeepSpeed alone fails on it."""
        return "auto" in (self.get(name) for name in BATCH_SIZES)

    @property
    def is_inference(self) -> bool:
        """Whether the config is ZeRO-Inference's: ZeRO-3 with parameters offloaded, and nothing that only trains."""
        trains = ("optimizer", "scheduler", "gradient_accumulation_steps", "zero_optimization.offload_optimizer")
        written = any(self.has(key) for key in trains)
        return self.context.inference or (self.stage == 3 and self.offload("param") != "none" and not written)

    @property
    def has_autosp(self) -> bool:
        """Whether DeepSpeed's compiler partitions the sequences, which takes ZeRO-0 or ZeRO-1 and no mpu."""
        passes = self.get("compile.passes")
        return isinstance(passes, list) and "autosp" in passes

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether DeepSpeed's AutoTP splits the model."""
        return (self.number("tensor_parallel.autotp_size", 0) or 0) > 1

    @property
    def has_pipeline(self) -> bool:
        return self.context.pp > 1

    @property
    def has_experts(self) -> bool:
        """Whether ranks share out experts: by AutoEP, or by the code of the script (a layout with ep)."""
        layout = self.context.layout
        return self.is_on("expert_parallel.enabled") or (layout is not None and layout.ep > 1)

    @property
    def dp(self) -> int | None:
        """Data-parallel ranks, None if they are not known."""
        layout = self.context.layout
        gpus = self.context.gpus
        sequence = self.number("sequence_parallel_size", 1) or 1
        if layout is not None:
            model = layout.model_size // layout.cp  # to DeepSpeed, ranks that share sequences by cp are replicas
        elif sequence > 1:
            model = int(sequence)
        else:
            model = 1
        if gpus is not None:
            return gpus // model if gpus % model == 0 else None
        return layout.replicas if layout and layout.replicas > 1 else None

    def offload(self, states: str) -> str:
        """Return the device that `optimizer` or `param` is offloaded to."""
        device = self.get(f"zero_optimization.offload_{states}.device", "none")
        old = {"optimizer": "cpu_offload", "param": "cpu_offload_param"}[states]
        if self.is_on(f"zero_optimization.{old}"):
            return "cpu"
        return device if device in ("cpu", "nvme") else "none"


_NOTHING: Any = object()


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    for key, child in value.items():
        yield (*path, key), child
        if isinstance(child, Mapping):
            yield from _walk((*path, key), child)
