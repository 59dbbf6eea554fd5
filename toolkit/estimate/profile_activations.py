"""The activations of a pipeline stage under another framework's profile: closed forms over its table of facts.

A layer keeps what Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations
1 to 6, count for Megatron's fused layers, tensor by tensor; a profile's facts say how many bytes of each size.

Dims: b samples, s positions, h hidden, a heads, k key-value heads, d features of a head, f MLP width, v vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from toolkit.errors import LayoutError, Setting
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.profile_stages import stage_bounds
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.models.families.registry import CONFIG_SCHEMAS

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ProfileActivations:
    """Bytes of one micro-batch in one model chunk of a stage."""

    layers: int
    """Bytes that the layers keep for the backward pass."""
    ends: int
    """Bytes that the embedding and the head keep."""
    head: int
    """The most beyond `layers` and `ends` at the loss."""
    backward: int
    """The most beyond `layers` in the backward pass of the last layer."""
    lowest: int
    """All that is live in the backward pass of the first layer."""
    boundary: int
    """The hidden state between two stages."""
    in_flight: int
    """Chunks whose activations are live at once, this one included."""


def check(setup: TrainingSetup, profile: FrameworkProfile) -> None:
    """Raise LayoutError for what the framework's profile does not say."""
    layout = setup.layout
    shape = setup.model.shape
    attention = setup.computation.attention
    framework: Setting = ("framework", profile.name)
    recompute: Setting = ("recompute", layout.recompute)
    if shape.family not in CONFIG_SCHEMAS and (shape.experts is None or "routed" not in profile.facts):
        reason = "its profile does not have the layers of this family"
        raise LayoutError.between((framework, ("model_type", shape.family)), reason, "leave it out")
    if shape.experts is None and not shape.gated and "plain" not in profile.facts["mlp"]:
        reason = "its profile has no MLPs without a gate"
        raise LayoutError.between((framework, ("model_type", shape.family)), reason, "choose another framework")
    kinds = profile.facts["attention"]
    if attention not in kinds:
        reason = f"its profile has {', '.join(kinds)}"
        raise LayoutError.between((("attention", attention), framework), reason, "choose one of them")
    shards_states = profile.facts["states"] == "fsdp2"
    if shards_states and "selective" in profile.facts:
        is_sharded = layout.zero_stage == 3 and layout.tp * layout.pp == 1
        if not is_sharded or layout.recompute != "selective":
            reason = "its profile has z3 without tp and pp, and selective recomputation"
            raise LayoutError.of("framework", profile.name, reason, "choose that")
    offloads = layout.offload_optimizer != "none" or layout.offload_activations or layout.tiled_mlp
    if (layout.zero_stage > 1 and not shards_states) or layout.ulysses * layout.cp > 1 or offloads:
        reason = "its profile has ZeRO-0 and 1, without offload or Ulysses, and cp is an option of the framework"
        raise LayoutError.of("framework", profile.name, reason, "choose that")
    if layout.recompute.startswith("every"):
        reason = "its profile recomputes all layers alike"
        raise LayoutError.between((recompute, framework), reason, ("recompute", "none or full"))
    if layout.recompute == "selective" and attention != "eager" and not shards_states:
        reason = "flash attention keeps no scores"
        raise LayoutError.between((recompute, framework), reason, ("recompute", "none or full"))


def stage_layers(profile: FrameworkProfile, model: ModelFacts, stages: int) -> list[range]:
    """Layers of each stage, by the framework's rule."""
    bounds = stage_bounds(model.shape, stages, profile.facts["stages"])
    return [range(start, stop) for start, stop in pairwise(bounds)]


def activations(setup: TrainingSetup, profile: FrameworkProfile, stage: int, layers: int) -> ProfileActivations:
    """Return the activations of a micro-batch on a stage with `layers` decoder layers."""
    layout = setup.layout
    sizes = _sizes(setup, profile)
    layer = _layer_bytes(setup, profile, sizes)
    embedding = 0
    if stage == 0:
        embedding = _bytes(profile.facts["embedding"], sizes) + _dropout_bytes(profile, sizes)
    head_kept = 0
    at_head = 0
    sent = 0
    if stage == layout.pp - 1:
        head_kept = _norm_bytes(profile, sizes) + profile.facts["loss"][profile.loss]["kept"] * sizes["logits"]
        at_head = _loss_bytes(setup, profile, sizes)
    else:
        sent = profile.facts.get("sent", 0) * sizes["hidden"]
    return ProfileActivations(
        layers=layers * layer.kept // profile.virtual_stages,
        ends=embedding + head_kept + sent,
        head=at_head,
        backward=layer.backward,
        lowest=embedding + sent + layer.kept + layer.backward,
        boundary=_boundary_bytes(sizes),
        in_flight=_in_flight(layout.pp, stage, setup.accumulation, profile.virtual_stages),
    )


@dataclass(frozen=True, kw_only=True)
class _LayerBytes:
    """Bytes of one micro-batch in a decoder layer."""

    kept: int
    """What it keeps for its backward pass."""
    backward: int
    """The most beyond that in its backward pass."""


def _layer_bytes(setup: TrainingSetup, profile: FrameworkProfile, sizes: Mapping[str, int]) -> _LayerBytes:
    facts = profile.facts
    layout = setup.layout
    shape = setup.model.shape
    kernel = setup.computation.attention
    mlp_kind = "gated" if shape.gated else "plain"
    routed = facts.get("routed", {"kept": 0, "backward": 0})
    # Attention and MLP have a norm each, and a dropout of what they add to the residual stream.
    branch = _norm_bytes(profile, sizes) + _dropout_bytes(profile, sizes)
    attention = branch + _bytes(facts["attention"][kernel], sizes)
    if kernel == "eager" and layout.recompute == "selective":
        attention -= 2 * sizes["scores"]
    elif kernel == "eager" and profile.drops_out:
        attention += _bytes(facts.get("score_dropout", {}), sizes)
    mlp = branch + _bytes(facts["mlp"][mlp_kind], sizes) + routed["kept"] * sizes["routed"]
    kept = attention + mlp
    boundary = _boundary_bytes(sizes)
    if "selective" in facts:
        kept = _bytes(facts["selective"], sizes) + (0 if profile.compiled else boundary)
    attention_backward = facts["attention_backward"]
    backward_kernel = kernel if kernel in attention_backward else "flash"
    weight_gradient = 0 if profile.fused_accumulation else 2 * shape.hidden * shape.ffn // layout.tp
    in_mlp = _bytes(facts["mlp_backward"][mlp_kind], sizes) + routed["backward"] * sizes["routed"] + weight_gradient
    in_attention = _bytes(attention_backward[backward_kernel], sizes) - mlp  # what the MLP kept is freed by then
    backward = max(in_mlp, in_attention)
    if layout.recompute == "full":
        return _LayerBytes(kept=boundary, backward=backward + kept - boundary)
    return _LayerBytes(kept=kept, backward=backward)


def _loss_bytes(setup: TrainingSetup, profile: FrameworkProfile, sizes: Mapping[str, int]) -> int:
    """Return the most beyond what layers and ends keep, in the loss or in the head's backward pass, in bytes."""
    shape = setup.model.shape
    loss = profile.facts["loss"][profile.loss]
    logits = sizes["logits"]
    weight_gradient = 0 if profile.fused_accumulation else 2 * shape.vocab * shape.hidden // setup.layout.tp
    behind_loss = 2 * logits + 2 * sizes["gathered"] + _boundary_bytes(sizes) + weight_gradient
    at_worst: int = max(loss["worst"] * logits, behind_loss) - loss["kept"] * logits
    return at_worst


def _norm_bytes(profile: FrameworkProfile, sizes: Mapping[str, int]) -> int:
    """Return the bytes that a norm keeps."""
    fused = _bytes(profile.facts["norm"], sizes)
    return fused if profile.fused_norm else fused + _bytes(profile.facts["unfused_norm"], sizes)


def _dropout_bytes(profile: FrameworkProfile, sizes: Mapping[str, int]) -> int:
    """Return the bytes that the dropout of a hidden state keeps."""
    return _bytes(profile.facts.get("dropout", {}), sizes) if profile.drops_out else 0


def _boundary_bytes(sizes: Mapping[str, int]) -> int:
    """Return the bytes of the hidden state between two stages, in 16 bits."""
    return 2 * sizes["hidden"]


def _in_flight(stages: int, stage: int, micro_batches: int, chunks: int) -> int:
    """1F1B, and interleaved (Narayanan et al. 2021, section 2.2; Megatron-LM, pipeline_parallel/schedules.py)."""
    if chunks == 1 or stages == 1:
        return min(stages - stage, micro_batches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micro_batches * chunks)


def _sizes(setup: TrainingSetup, profile: FrameworkProfile) -> dict[str, int]:
    """Elements of the tensors that facts name, on one rank."""
    layout = setup.layout
    shape = setup.model.shape
    tp = layout.tp
    positions = setup.seq_len // profile.context_parallel
    tokens = positions * setup.micro_batch_size
    expert_rows = _ExpertRows.of(setup)
    split = tp if layout.sequence_parallel else 1
    vocabulary = shape.vocab if profile.facts.get("whole_vocabulary") else -(-shape.vocab // tp)
    return {
        "tokens": tokens,
        "rows": tokens // split,
        "hidden": tokens * shape.hidden // split,
        "gathered": tokens * shape.hidden if split > 1 else 0,
        "queries": tokens * shape.attention_dim // tp,
        "keys": tokens * shape.kv_dim // tp,
        "head_rows": tokens * shape.heads // tp,
        "scores": tokens * positions * shape.heads // tp,
        "mask": positions * positions,
        "mlp": int(tokens * expert_rows.mlp_width / tp),
        "routed": int(tokens * expert_rows.per_token * shape.hidden),
        "logits": tokens * vocabulary,
    }


@dataclass(frozen=True, kw_only=True)
class _ExpertRows:
    """What experts compute for a token in the mean layer; experts of a layer without any are none."""

    per_token: float
    """Routed rows, pairs of a token and an expert, for each token on the busiest rank."""
    mlp_width: float
    """Elements of the activation function for each token, of all tensor-parallel ranks together."""

    @classmethod
    def of(cls, setup: TrainingSetup) -> Self:
        """Count the rows of a setup's experts."""
        layout = setup.layout
        shape = setup.model.shape
        experts = shape.experts
        if experts is None:
            return cls(per_token=0.0, mlp_width=float(shape.ffn))
        share_of_layers = experts.layers / shape.layers
        token_shards = 1 if layout.experts == "inner" else layout.tp
        busiest = setup.computation.imbalance if setup.expert_owners > 1 else 1.0
        rows = experts.per_token * busiest / token_shards
        shared_width = max(0, experts.always - experts.count * shape.hidden) * experts.ffn / experts.weights
        expert_width = rows * experts.ffn * token_shards + shared_width
        return cls(
            per_token=rows * share_of_layers,
            mlp_width=(1 - share_of_layers) * float(shape.ffn) + share_of_layers * expert_width,
        )


def _bytes(facts: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    return sum(count * sizes[name] for name, count in facts.items())


def local_kernel_bytes(setup: TrainingSetup, profile: FrameworkProfile) -> int:
    """Return the bytes that the framework's own kernels keep in the place of TransformerEngine's; 0 with that."""
    if profile.transformer_engine:
        return 0
    return _bytes(profile.facts["local"], _sizes(setup, profile))
