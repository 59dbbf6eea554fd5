"""What a rule sees: one DeepSpeed config, and the facts that are known beside it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.dsconfig.lint.finding import Path
from toolkit.dsconfig.lint.values import is_number
from toolkit.layout import Layout
from toolkit.shape import ModelShape, head_matmul_parameters, layer_matmul_parameters

Runner = Literal["deepspeed", "trainer", "accelerate", "toolkit"]
"""Who hands the config to DeepSpeed, and so who replaces `auto`: a script, the Hugging Face Trainer, `Accelerator`, or
a recipe of this toolkit."""

GPU_BYTES = 24 * 2**30
"""Memory of a GPU where nobody says how much there is: what is called wasteful then, is so on any GPU to train on."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known beside the config."""

    gpus: int | None = None
    layout: Layout | None = None
    """Its dp counts only where `gpus` is not given."""
    shape: ModelShape | None = None
    gpu_bytes: int = GPU_BYTES
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Hugging Face TrainingArguments, as far as they were given."""
    conflicts: tuple[tuple[Path, str], ...] = ()
    """What the recipe says against the config."""
    recipe: str | None = None
    runner: Runner = "deepspeed"
    deepspeed: tuple[int, ...] = (0, 19, 8)
    mixed_precision: str | None = None
    """accelerate's."""

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.layout.pp if self.layout else 1

    @property
    def parameters(self) -> int | None:
        """Parameters of the model, without norms and biases (under 0.1 %) and learned positions (1 % of GPT-2)."""
        shape = self.shape
        if shape is None:
            return None
        embedding = 0 if shape.tied else shape.vocab * shape.embed_dim
        return shape.layers * layer_matmul_parameters(shape) + head_matmul_parameters(shape) + embedding


class View:
    """A config with the questions that rules ask. Values of a wrong type answer like missing ones."""

    def __init__(self, config: Mapping[str, Any], facts: Facts) -> None:
        self.config, self.facts = config, facts

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value at `a.b.c`, or the default where it is missing."""
        value: Any = self.config
        for key in dotted.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value

    def has(self, dotted: str) -> bool:
        """Whether the key is written."""
        return self.get(dotted, _NOTHING) is not _NOTHING

    def section(self, dotted: str) -> Mapping[str, Any]:
        """The section, empty where there is none."""
        value = self.get(dotted)
        return value if isinstance(value, Mapping) else {}

    def number(self, dotted: str, default: float | None = None) -> float | None:
        """The number, or the default where there is none."""
        value = self.get(dotted)
        return value if is_number(value) else default

    def is_on(self, dotted: str, default: bool = False) -> bool:
        """Whether a switch is on, as pydantic would read it."""
        value = self.get(dotted, default)
        if isinstance(value, str):
            return value.lower() in ("1", "on", "t", "true", "y", "yes")
        return bool(value) if isinstance(value, (bool, int, float)) else default

    def walk(self) -> Iterator[tuple[Path, Any]]:
        """Every key with its value, sections too."""
        yield from _walk((), self.config)

    @property
    def stage(self) -> int:
        """The ZeRO stage that DeepSpeed would use; what it cannot read, and `auto`, is 0."""
        zero = self.get("zero_optimization")
        if isinstance(zero, bool):
            return int(zero)
        stage = self.get("zero_optimization.stage", 0)
        if stage == "auto" and self.facts.runner in ("trainer", "accelerate"):
            return 2  # accelerate's
        if isinstance(stage, str) and stage.strip() in ("0", "1", "2", "3"):
            return int(stage)
        return int(stage) if isinstance(stage, (int, float)) and stage in (0, 1, 2, 3) else 0

    @property
    def precision(self) -> Literal["bf16", "fp16", "fp32"]:
        """Of the model's parameters."""
        wanted = {"fp16": self.is_on("fp16.enabled"), "bf16": self.is_on(f"{self.bf16}.enabled")}
        if self.facts.runner in ("trainer", "accelerate"):
            for name in wanted:
                said = self.facts.trainer.get(name, self.facts.mixed_precision == name)
                if self.get(f"{name}.enabled", "auto") == "auto" and said is True:
                    wanted[name] = True
        return "bf16" if wanted["bf16"] else "fp16" if wanted["fp16"] else "fp32"

    @property
    def bf16(self) -> str:
        """The name of the bf16 section: DeepSpeed still reads the old one where there is no new one."""
        return "bf16" if self.get("bf16") is not None else "bfloat16"

    @property
    def has_pipeline(self) -> bool:
        """Whether the model is surely cut into stages."""
        return self.facts.pp > 1

    @property
    def dp(self) -> int | None:
        """Ranks that see different samples, where they can be counted."""
        layout, gpus = self.facts.layout, self.facts.gpus
        model = layout.model_size if layout else 1
        sequence = self.number("sequence_parallel_size", 1) or 1
        if layout is None and sequence > 1:
            model = int(sequence)
        if gpus is not None:
            return gpus // model if gpus % model == 0 else None
        return layout.dp if layout and layout.dp > 1 else None

    def offload(self, what: str) -> str:
        """The device that `optimizer` or `param` is offloaded to."""
        device = self.get(f"zero_optimization.offload_{what}.device", "none")
        old = {"optimizer": "cpu_offload", "param": "cpu_offload_param"}[what]
        if self.is_on(f"zero_optimization.{old}"):
            return "cpu"
        return device if device in ("cpu", "nvme") else "none"


_NOTHING: Any = object()


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    for key, child in value.items():
        yield (*path, key), child
        if isinstance(child, Mapping):
            yield from _walk((*path, key), child)
