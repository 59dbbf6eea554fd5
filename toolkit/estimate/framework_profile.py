"""FrameworkProfile: how a framework other than this toolkit trains a GPT, as a table of facts and a few options.

The facts stand in framework_profiles.json, each framework's with the files of its source that show them: bytes that it
keeps of a parameter, and bytes that its layers keep of an activation's element. What a profile cannot say is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from toolkit.errors import ConfigError, nearest
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.deepspeed_states import deepspeed_states
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.states import ModelStates, StateBytes, TorchStates
from toolkit.files import first_problem, printable
from toolkit.units import LARGEST_COUNT

_BUCKET = 500_000_000
"""Elements of a flat bucket of gradients in the update."""


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """A framework and what its user chose. Sizes of axes, recomputation and batch are in a TrainingSetup.

    ZeRO-1 in the layout is Megatron's distributed optimizer.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    precision: Literal["bf16", "fp16"] = "bf16"
    """Dtype of weights and activations; the framework's choice of gradients and masters follows."""
    virtual_stages: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] = 1
    """Model chunks of a pipeline stage, under the interleaved schedule."""
    context_parallel: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] = 1
    """Ranks that share a sequence in ring attention; they share optimizer states, too."""
    dropout: bool | None = None
    """Whether attention's scores and both branches are dropped out; None: as the framework does by default."""
    loss: Literal["plain", "fused", "compiled"] = "plain"
    """Kernels of the loss: fp32 logits, one kernel that works in the logits, or torch.compile's."""
    fused_accumulation: bool = True
    """Whether the matrix product adds weight gradients to the main ones by itself, without a temporary."""
    fused_norm: bool = True
    """Whether norms are one kernel, which keeps its input and a number or two a row."""
    transformer_engine: bool = True
    """Whether Megatron's layers are TransformerEngine's; its own attention keeps a buffer of scores throughout."""
    compiled: bool = False
    """Whether torch.compile drops results that no gradient needs (torchtitan)."""
    cublas_mib: int | None = None
    """Workspace of a cuBLAS handle, as CUBLAS_WORKSPACE_CONFIG sets it; None: PyTorch's own for the GPU."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an option that the framework does not have."""
        facts = self.facts
        allowed = facts.get("precisions", ("bf16", "fp16"))
        if self.precision not in allowed:
            raise self._not_offered("precision", f"choose {' or '.join(allowed)}")
        if self.loss not in facts["loss"]:
            raise self._not_offered("loss", f"choose {' or '.join(facts['loss'])}")
        if self.drops_out and "dropout" not in facts:
            raise self._not_offered("dropout")
        if not self.fused_norm and "unfused_norm" not in facts:
            raise self._not_offered("fused_norm")
        owners = {
            "virtual_stages": ("megatron", "automodel"),
            "context_parallel": ("megatron",),
            "compiled": ("torchtitan",),
        }
        for option, allowed in owners.items():
            if self.name not in allowed and getattr(self, option) != getattr(FrameworkProfile, option):
                raise self._not_offered(option)

    def _not_offered(self, option: str, advice: str = "leave it out") -> ConfigError:
        settings = ((option, getattr(self, option)), ("framework", self.name))
        return ConfigError.between(settings, "the profile has no such fact", advice)

    @property
    def drops_out(self) -> bool:
        """Whether there is any dropout."""
        return bool(self.facts.get("default_dropout", False)) if self.dropout is None else self.dropout

    @property
    def facts(self) -> Mapping[str, Any]:
        """The framework's row of the table."""
        rows = _profiles()
        if self.name not in rows:
            raise ConfigError.of("framework", self.name, "it has no profile", f"choose {', '.join(rows)}")
        return rows[self.name]

    def states(self, params: RankParameters, *, shards: int, accumulation: int = 2, zero_stage: int) -> ModelStates:
        """The states of one rank whose replicas are `shards` ranks, with `accumulation` micro-batches a step."""
        if self.facts["states"] == "fsdp2":
            states = TorchStates(gathered_bytes=2, weight_bytes=self.facts.get("weight_bytes", 4))
            unsharded = states.states(params, shards=shards, accumulation=accumulation)
            # Weights that are not sharded again behind the forward pass, but for experts that no other rank has.
            shared = sum(group.numel for group in params.groups if group.ep < shards)
            return unsharded if zero_stage == 3 else replace(unsharded, gathered=2 * shared)
        if not self.facts["states"]:
            return deepspeed_states(self.deepspeed(zero_stage), params, dp=shards, accumulation=accumulation)
        of = self.facts["states"][self.precision]
        elements = params.numel
        share = sum(-(-group.numel * group.ep // shards) for group in params.groups) if zero_stage else elements
        copies = of.get("gradient_copies", 0) * share
        buckets = of.get("replica_buckets", 0) * elements if shards > 1 and not zero_stage else 0
        gathers = shards > 1 and zero_stage
        update = of.get("gathered_update", 0) * elements + of.get("gathered_share", 0) * share if gathers else 0
        update += of.get("update_share", 0) * share
        fresh = of.get("fresh", 0) * elements
        return ModelStates(
            resident=StateBytes(
                parameters=of["parameters"] * elements,
                gradients=of["gradients"] * elements + copies,
                masters=of["masters"] * share,
                optimizer=of["moments"] * share,
                buckets=buckets,
                model_buffers=params.buffer_bytes,
            ),
            accumulated=fresh,
            fresh_layer=of.get("growing", 0) * params.layer_numel,
            reduction=of.get("reduction", 0) * elements + of.get("update_bucket", 0) * min(elements, _BUCKET),
            step=update,
        )

    def deepspeed(self, zero_stage: int) -> DeepSpeedSettings:
        """The DeepSpeed config of Megatron-DeepSpeed: fp16 gradients are summed in fp16, bf16 ones in fp32.

        Its BF16_Optimizer shards masters and moments also in stage 0 (BLOOM's tr11-176B-ml.slurm asks for that stage).
        """
        size = 2 if self.precision == "fp16" else 4
        return DeepSpeedSettings(
            zero_stage=zero_stage if size == 2 else max(1, zero_stage),
            precision=self.precision,
            accumulation_bytes=size,
            communication_bytes=size,
            counts_in_tensors=False,
            by_decay=False,
        )


@cache
def _profiles() -> dict[str, dict[str, Any]]:
    content = Path(__file__).with_name("framework_profiles.json").read_text(encoding="utf-8")
    return dict(json.loads(content))


def profile(text: str) -> FrameworkProfile:
    """Read `megatron:virtual_stages=2,dropout=false`. Raises ConfigError."""
    name, _, options = text.partition(":")
    pairs = (option.partition("=") for option in filter(None, options.split(",")))
    chosen = {key: value for key, _, value in pairs}
    known = [field.name for field in fields(FrameworkProfile) if field.name != "name"]
    for key in chosen.keys() - known:
        advice = nearest(key, known).strip() or f"choose {', '.join(known)}"
        raise ConfigError.of("--framework", text, f"{printable(key)} is not an option of a profile", advice)
    try:
        return TypeAdapter(FrameworkProfile).validate_python(chosen | {"name": name})
    except ValidationError as error:
        raise ConfigError.of("--framework", text, first_problem(error)) from error
