"""The memory of a pipeline stage under another framework's profile: closed forms over its table of facts.

A layer keeps what Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations
1 to 6, count for Megatron's fused layers, tensor by tensor; a profile's facts say how many bytes of each size.

Dims: b samples, s positions, h hidden, a heads, k key-value heads, d features of a head, f MLP width, v vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from toolkit.config.layout import Layout
from toolkit.errors import LayoutError, Setting
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.overhead import beside, is_hopper, workspace_bytes
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.states import ModelStates
from toolkit.hardware import Gpu
from toolkit.models.families.registry import CONFIG_SCHEMAS
from toolkit.models.shape import ModelShape

if TYPE_CHECKING:
    from toolkit.estimate.memory_model import Workload

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ProfileActivations:
    """Bytes of one micro-batch in one model chunk of a stage."""

    kept: int
    """By the layers, for the backward pass."""
    ends: int
    """By embedding and head."""
    head: int
    """The most beyond `kept` and `ends` at the loss."""
    layer: int
    """The most beyond `kept` in the backward pass of the last layer."""
    lowest: int
    """All that is live in the backward pass of the first layer."""
    boundary: int
    """The hidden state between two stages."""
    in_flight: int
    """Chunks whose activations are live at once, this one included."""


def check(profile: FrameworkProfile, shape: ModelShape, layout: Layout, work: "Workload") -> None:
    """Raise LayoutError for what the framework's profile does not say."""
    if shape.family not in CONFIG_SCHEMAS and (shape.experts is None or "routed" not in profile.facts):
        given_family: tuple[Setting, ...] = (("framework", profile.name), ("model_type", shape.family))
        raise LayoutError.between(given_family, "its profile does not have the layers of this family", "leave it out")
    kinds = profile.facts["attention"]
    if work.attention not in kinds:
        given: tuple[Setting, ...] = (("attention", work.attention), ("framework", profile.name))
        raise LayoutError.between(given, f"its profile has {', '.join(kinds)}", "choose one of them")
    sharded = profile.facts["states"] == "fsdp2"
    offloads = layout.offload_optimizer != "none" or layout.offload_activations or layout.tiled_mlp
    if (
        sharded
        and "selective" in profile.facts
        and (layout.zero_stage != 3 or layout.tp * layout.pp > 1 or work.recompute != "selective")
    ):
        reason = "its profile has z3 without tp and pp, and selective recomputation"
        raise LayoutError.of("framework", profile.name, reason, "choose that")
    if (layout.zero_stage > 1 and not sharded) or layout.ulysses > 1 or offloads:
        reason = "its profile has ZeRO-0 and 1, without offload or Ulysses"
        raise LayoutError.of("framework", profile.name, reason, "choose that")
    if work.recompute.startswith("every"):
        given = (("recompute", work.recompute), ("framework", profile.name))
        raise LayoutError.between(given, "its profile recomputes all layers alike", ("recompute", "none or full"))
    if work.recompute == "selective" and work.attention != "eager" and not sharded:
        given = (("recompute", work.recompute), ("framework", profile.name))
        raise LayoutError.between(given, "flash attention keeps no scores", ("recompute", "none or full"))


def stage_layers(profile: FrameworkProfile, shape: ModelShape, parameters: ModelParameters, stages: int) -> list[range]:
    """Layers of each stage: items in equal numbers, earlier stages have one more; nanotron counts the head's cost.

    The fact `ends` says how many items embedding and head are.
    """
    before, after = profile.facts["ends"]
    if profile.facts.get("balance") != "head":
        each, more = divmod(shape.layers + before + after, stages)
        items = [stage * each + min(stage, more) for stage in range(stages + 1)]
        edges = [min(max(0, item - before), shape.layers) for item in items]
        return [range(*edge) for edge in pairwise(edges)]
    layer, head = parameters.layer_numels[0], shape.vocab * shape.hidden
    edges, total = [0], shape.layers * layer + head
    for done in range(1, shape.layers + 1):
        if done * layer * stages >= total * len(edges):
            edges.append(done)
    edges = (edges + [shape.layers] * stages)[:stages]
    return [range(*edge) for edge in pairwise([*edges, shape.layers])]


def activations(
    profile: FrameworkProfile, shape: ModelShape, layout: Layout, work: "Workload", stage: int, layers: int
) -> ProfileActivations:
    """What a micro-batch keeps and needs on a stage with `layers` decoder layers."""
    facts, first, last = profile.facts, stage == 0, stage == layout.pp - 1
    sizes = _sizes(profile, shape, layout, work)
    routed = facts.get("routed", {"kept": 0, "backward": 0})
    norm = _bytes(facts["norm"], sizes) + (0 if profile.fused_norm else _bytes(facts["unfused_norm"], sizes))
    branch = _bytes(facts.get("dropout", {}), sizes) if profile.drops_out else 0
    mlp_kind = "gated" if shape.gated else "plain"
    scores = _bytes(facts.get("score_dropout", {}), sizes) if profile.drops_out and work.attention == "eager" else 0
    attention = norm + branch + _bytes(facts["attention"][work.attention], sizes) + scores
    if work.recompute == "selective" and work.attention == "eager":
        attention -= scores + 2 * sizes["scores"]
    mlp = norm + branch + _bytes(facts["mlp"][mlp_kind], sizes) + routed["kept"] * sizes["routed"]
    layer, boundary = attention + mlp, 2 * sizes["hidden"]
    if "selective" in facts:
        layer = _bytes(facts["selective"], sizes) + (0 if profile.compiled else boundary)
    matrix = 0 if profile.fused_accumulation else 2 * shape.hidden * shape.ffn // layout.tp
    kind = work.attention if work.attention in facts["attention_backward"] else "flash"
    worst = max(
        _bytes(facts["mlp_backward"][mlp_kind], sizes) + routed["backward"] * sizes["routed"] + matrix,
        _bytes(facts["attention_backward"][kind], sizes) - mlp,
    )
    if work.recompute == "full":
        worst, layer = worst + layer - boundary, boundary
    chunks = profile.virtual_stages
    logits = sizes["logits"]
    loss = facts["loss"][profile.loss]
    embedding = (_bytes(facts["embedding"], sizes) + branch) if first else 0
    head = norm + loss["kept"] * logits if last else 0
    weight = 2 * shape.vocab * shape.hidden // layout.tp
    after_loss = 2 * logits + 2 * sizes["gathered"] + boundary + (0 if profile.fused_accumulation else weight)
    sent = 0 if last else facts.get("sent", 0) * sizes["hidden"]
    return ProfileActivations(
        kept=layers * layer // chunks,
        ends=embedding + head + sent,
        head=(max(loss["worst"] * logits, after_loss) - loss["kept"] * logits) if last else 0,
        layer=worst,
        lowest=embedding + sent + layer + worst,
        boundary=boundary,
        in_flight=_in_flight(layout.pp, stage, work.accumulation, chunks),
    )


def _in_flight(stages: int, stage: int, micro_batches: int, chunks: int) -> int:
    """1F1B, and interleaved (Narayanan et al. 2021, section 2.2; Megatron-LM, pipeline_parallel/schedules.py)."""
    if chunks == 1 or stages == 1:
        return min(stages - stage, micro_batches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micro_batches * chunks)


def _sizes(profile: FrameworkProfile, shape: ModelShape, layout: Layout, work: "Workload") -> dict[str, int]:
    """Elements of the tensors that facts name, on one rank."""
    tp, s = layout.tp, work.seq_len // profile.context_parallel
    tokens = s * work.micro_batch_size
    mlp, rows = float(shape.ffn), 0.0
    if shape.experts is not None:
        experts, mixed, inner = shape.experts, shape.experts.layers / shape.layers, layout.experts == "inner"
        lanes, ranks = (1 if inner else tp), layout.ep * (1 if inner else tp)
        rows = experts.per_token * (work.imbalance if ranks > 1 else 1.0) / lanes
        shared = max(0, experts.always - experts.count * shape.hidden) * experts.ffn / experts.weights
        # Elements of a tensor-parallel rank's share, times the ranks.
        mlp = (1 - mixed) * mlp + mixed * (rows * experts.ffn * lanes + shared)
        rows *= mixed
    split = tp if layout.sequence_parallel else 1
    return {
        "tokens": tokens,
        "rows": tokens // split,
        "hidden": tokens * shape.hidden // split,
        "gathered": tokens * shape.hidden if split > 1 else 0,
        "queries": tokens * shape.attention_dim // tp,
        "keys": tokens * shape.kv_dim // tp,
        "head_rows": tokens * shape.heads // tp,
        "scores": tokens * s * shape.heads // tp,
        "mask": s * s,
        "mlp": int(tokens * mlp / tp),
        "routed": int(tokens * rows * shape.hidden),
        "logits": tokens * (shape.vocab if profile.facts.get("whole_vocabulary") else -(-shape.vocab // tp)),
    }


def _bytes(facts: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    return sum(count * sizes[name] for name, count in facts.items())


def stage_parameters(
    parameters: ModelParameters, layout: Layout, stage: int, layers: range, *, by_decay: bool, **groups: bool
) -> RankParameters:
    """What a rank of a pipeline stage holds."""
    return parameters.rank_parameters(
        layers=layers,
        first=stage == 0,
        last=stage == layout.pp - 1,
        tp=layout.tp,
        ep=layout.ep,
        inner=layout.experts == "inner",
        by_decay=by_decay,
        **groups,
    )


def stage_breakdown(
    profile: FrameworkProfile,
    shape: ModelShape,
    parameters: ModelParameters,
    layout: Layout,
    work: "Workload",
    gpu: Gpu | None,
    stage: int,
    layers: range,
) -> MemoryBreakdown:
    """One stage: the worst of the loss, the last layer's and the first layer's backward pass, and the update."""
    check(profile, shape, layout, work)
    first, last = stage == 0, stage == layout.pp - 1
    params = stage_parameters(parameters, layout, stage, layers, by_decay=False)
    shards = layout.dp * profile.context_parallel
    states = profile.states(params, shards=shards, accumulation=work.accumulation, zero_stage=layout.zero_stage)
    one = activations(profile, shape, layout, work, stage, len(layers))
    name, live, fresh = _worst_moment(one, states, params, last=last)
    kept = (one.in_flight - 1) * (one.kept + (one.ends if profile.virtual_stages == 1 else 0))
    between = _between(profile, one, layout, work, shape, first=first, last=last)
    scattered = 0 if name == "head" else states.buckets  # FSDP's gradients; the others' buckets stay
    backward = states.accumulated + fresh + scattered + states.gathered + kept + live
    update = max(states.step, states.reduction)
    resident, workspace = states.resident, _workspaces(profile, gpu)
    if not profile.transformer_engine:
        workspace += _bytes(profile.facts["local"], _sizes(profile, shape, layout, work))
    static = resident.total + between + workspace
    allocated = static + max(backward, update)
    at_head = one.head if name == "head" else 0
    return MemoryBreakdown(
        stage=stage,
        rank=layout.rank(pipe=stage),
        layers=len(layers),
        parameter_count=params.numel,
        trained_count=params.trained,
        parameters=resident.parameters,
        gradients=resident.gradients + states.accumulated + fresh,
        masters=resident.masters,
        optimizer=resident.optimizer,
        buckets=resident.buckets + scattered + between,
        gathered=states.gathered,
        model_buffers=resident.model_buffers + resident.counters,
        activations={"layers": kept + min(live, one.kept), "ends": max(0, live - one.kept - at_head)},
        logits=at_head,
        update=max(0, update - backward),
        host=states.host,
        nvme=states.nvme,
        host_loading=4 * params.numel,
        static=static,
        workspace=workspace,
        band=profile.facts["band"],
        # FSDP2 gathers into, and reduces from, pools of streams that no other tensor uses (_fsdp_collectives.py).
        cached=(states.step if profile.facts.get("caches_update") else 0)
        + (states.gathered + states.complete if states.gathered else 0),
        **beside(layout, gpu, allocated, margin=profile.facts.get("margin"), context=profile.facts.get("context_mib")),
    )


def _worst_moment(
    one: ProfileActivations, states: ModelStates, params: RankParameters, *, last: bool
) -> tuple[str, int, int]:
    """The moment of the backward pass at which most is live: its name, its activations and the gradients so far."""
    grown = max(0, params.layers - 1) * states.fresh_layer
    outside = (params.numel - sum(params.layer_numels)) * states.fresh_layer // max(1, params.layer_numel)
    moments = (
        ("head", one.kept + one.ends + one.head, 0),
        ("layer", one.kept + one.ends + one.layer, outside if last else 0),
        ("lowest", one.lowest, grown + outside),
    )
    return max(moments, key=lambda moment: moment[1] + moment[2])


def _between(
    profile: FrameworkProfile,
    one: ProfileActivations,
    layout: Layout,
    work: "Workload",
    shape: ModelShape,
    *,
    first: bool,
    last: bool,
) -> int:
    """What a pipeline keeps between two steps: the last input with its gradient, or DeepSpeed's slots.

    Megatron-DeepSpeed sends hidden states in parts, one a tensor-parallel rank; its first stage's slots have tokens,
    positions and mask, its last stage's the logits in fp32, the input and its gradient (pipe/engine.py).
    """
    if not profile.facts.get("slots") or layout.pp == 1:
        return 0 if first else int(profile.facts.get("boundaries", 0)) * one.boundary
    tokens, count = work.micro_batch_size * work.seq_len, work.accumulation
    logits = tokens * -(-shape.vocab // layout.tp)
    slots = max(2, min(layout.pp + 1, count)) if first else min(2, count)
    total = 2 * work.seq_len**2
    total += 0 if first else one.boundary // layout.tp
    total += 0 if last else one.boundary
    if first:
        total += slots * (16 * tokens + work.seq_len**2)
    if last:
        total += slots * (4 * logits + 12 * tokens + (0 if first else 2 * one.boundary))
    return total


def _workspaces(profile: FrameworkProfile, gpu: Gpu | None) -> int:
    """cuBLAS's of two threads, and TransformerEngine's for matrix products."""
    if gpu is None:
        return 0
    own = workspace_bytes(gpu) if profile.cublas_mib is None else 2 * profile.cublas_mib * _MIB
    if not profile.transformer_engine:
        return own
    return own + int(profile.facts.get("workspaces", {}).get("hopper" if is_hopper(gpu) else "other", 0)) * _MIB
