"""Layout: how one training job is spread over ranks, and the rules that DeepSpeed would enforce too late.

A layout prints as `dp4-tp2-pp1-z2` (with `-ep2`, `-cp2` and `-u2` where they are on) and parses from that form or any
part of it. `u4` alone is DeepSpeed-Ulysses; beside a cp it is a factor of context parallelism: in `u4-cp2` eight ranks
share a sequence, each four neighbors exchange heads, and two such groups keys and values. In `u4-cp1` only heads are
exchanged. A pipeline schedule is a part of its own, `pp4-zbh1-z1`; chunks of an interleaved one are a factor of pp,
`pp4x2`.
Rank order is DeepSpeed's `PipeModelDataParallelTopology`: axes pipe, data, model, with model fastest. Context-parallel
ranks are neighbors along data: like replicas they hold the same parameters, whose gradients are summed over them.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

from toolkit.config import pipeline_schedules
from toolkit.config.source_text import shorten
from toolkit.errors import BatchError, LayoutError, Refusal, Setting, spell_setting
from toolkit.units import LARGEST_COUNT, divisors

OffloadDevice = Literal["none", "cpu", "nvme"]
Recompute = Literal[
    "none", "selective", "full", "every_2", "every_3", "every_4", "every_5", "every_6", "every_7", "every_8"
]
ExpertSharding = Literal["whole", "inner"]

RECOMPUTE_PERIODS: dict[str, int] = {"full": 1} | {f"every_{n}": n for n in range(2, 9)}
"""Whole decoder layers are recomputed where their index in the whole model is a multiple of this."""

CpExchange = Literal["auto", "gather", "ring"]
SCHEDULE_PARTS: dict[str, pipeline_schedules.Kind] = {"1f1b": "1f1b", "gpipe": "gpipe", "zbh1": "zb-h1", "zbv": "zb-v"}
"""Parts of a layout that name a pipeline schedule; `pp4x2` is interleaved with 2 chunks."""
_BOUNDED = re.compile(r"(zbh1|zbv)w([0-9]+)")
"""A schedule with at most so many passes W that wait on a rank, `zbh1w2`."""
_AXES = {"dp": "dp", "ep": "ep", "cp": "cp", "tp": "tp", "pp": "pp", "u": "ulysses", "z": "zero_stage"}


def recomputes(recompute: Recompute, layer: int) -> bool:
    """Whether the decoder layer with this index in the whole model is recomputed whole."""
    return recompute in RECOMPUTE_PERIODS and layer % RECOMPUTE_PERIODS[recompute] == 0


class Coordinate(NamedTuple):
    """The position of a rank on each axis. `data` counts replicas, and in each of them its context-parallel ranks."""

    pipe: int
    data: int
    model: int


def least_dp(*, ep: int | None = None, cp: int | None = None, hpz: int | None = None) -> int:
    """The fewest replicas that these sizes allow; None is 1."""
    shared = max(ep or 1, hpz or 1)
    return shared // math.gcd(shared, cp or 1)


def axis_size(field: str, text: str, part: str, digits: str) -> int:
    """The number in a part of a layout, `dp8`. Raises LayoutError for one that is out of range."""
    if len(digits) > len(str(LARGEST_COUNT)) or int(digits) > LARGEST_COUNT:
        reason = f"{shorten(part)} is out of range; sizes up to {LARGEST_COUNT} are counted"
        raise LayoutError.of(field, shorten(text), reason, "write a smaller number")
    return int(digits)


def sequence_fields(parsed: dict[str, Any]) -> dict[str, Any]:
    """Fields of Layout in which ulysses and cp that were given together are context parallelism over their product."""
    ulysses = parsed.get("ulysses", 0)
    if not ulysses or not parsed.get("cp"):
        return parsed
    others = {name: value for name, value in parsed.items() if name != "ulysses"}
    return others | {"cp": ulysses * parsed["cp"], "cp_ulysses": ulysses}


def sequence_axes(*, cp: int, cp_ulysses: int, ulysses: int) -> dict[str, int]:
    """Return the parts of a layout that say how ranks share a sequence, with their numbers: the reverse of
    `sequence_fields`."""
    axes = {}
    if cp > 1:
        axes["cp"] = cp // cp_ulysses
    heads = max(ulysses, cp_ulysses)
    if heads > 1:
        axes["u"] = heads
    return axes


def schedule_fields(field: str, text: str, part: str) -> dict[str, Any]:
    """The fields of Layout that a part about the pipeline schedule sets, `pp4x2`, `zbv`, `zbh1w2`; none for others."""
    kind = SCHEDULE_PARTS.get(part)
    if kind is not None:
        return {"schedule": kind, "chunks": pipeline_schedules.CHUNKS[kind]}
    bounded = _BOUNDED.fullmatch(part)
    if bounded is not None:
        fields = schedule_fields(field, text, bounded[1])
        return fields | {"max_pending_weights": axis_size(field, text, part, bounded[2])}
    interleaved = re.fullmatch(r"pp([0-9]+)x([0-9]+)", part)
    if interleaved is None:
        return {}
    ranks, chunks = (axis_size(field, text, part, digits) for digits in interleaved.groups())
    return {"pp": ranks, "schedule": "interleaved", "chunks": chunks}


def schedule_parts(kind: pipeline_schedules.Kind | None, max_pending_weights: int | None) -> list[str]:
    """Return the part of a layout that names a pipeline schedule, `zbh1w2`; nothing for none, and for chunks."""
    bound = "" if max_pending_weights is None else f"w{max_pending_weights}"
    return [f"{part}{bound}" for part, named in SCHEDULE_PARTS.items() if named == kind]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes, the ZeRO stage, offload and recompute. Raises LayoutError for what cannot run.

    `dp` counts data-parallel replicas; `tp` Megatron tensor-parallel ranks, `pp` pipeline stages, `cp` and `ulysses`
    ranks that share one sequence. `sequence_parallel` is Megatron's flag that rides on `tp`. `ep` adds no ranks: that
    many neighbors of the dp x cp ranks with the same parameters shard the experts of a mixture. Nor does
    `cp_ulysses`: that many neighbors of the cp ranks exchange heads for positions.
    """

    dp: int = 1
    ep: int = 1
    cp: int = 1
    cp_ulysses: int = 1
    tp: int = 1
    pp: int = 1
    ulysses: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    experts: ExpertSharding = "whole"
    offload_optimizer: OffloadDevice = "none"
    offload_params: OffloadDevice = "none"
    hpz: int = 1
    """Ranks that keep, between a forward and a backward pass, a secondary partition of ZeRO-3's weights (ZeRO++)."""
    recompute: Recompute = "none"
    offload_activations: bool = False
    tiled_mlp: bool = False
    schedule: pipeline_schedules.Kind | None = None
    """Order of a pipeline's passes; None: 1F1B by DeepSpeed's own instructions."""
    chunks: int = 1
    """Chunks of the model on each pipeline rank."""
    max_pending_weights: int | None = None
    """The most passes W of a zero-bubble schedule that wait on a rank; None: as many as the schedule lets wait."""

    def __post_init__(self) -> None:
        """Refuse what DeepSpeed cannot run in this layout, whatever the model is."""
        axes = {axis: getattr(self, axis) for axis in ("dp", "ep", "cp", "tp", "pp", "ulysses")}
        empty = next((axis for axis, size in axes.items() if size < 1), "")
        in_pipeline = self.pp > 1
        offloads = self.offload_optimizer != "none"
        # fmt: off
        rules: tuple[tuple[bool, tuple[str, ...], str, tuple[Setting | str, ...]], ...] = (
            (self.world_size > LARGEST_COUNT, tuple(axis for axis, size in axes.items() if size > 1 and axis != "ep"),
             f"{self.world_size} ranks are out of range; at most {LARGEST_COUNT} are counted", ("lower one of them",)),
            (bool(empty), (empty,), "an axis has at least one rank", ((empty, "1 or more"),)),
            (self.zero_stage not in (0, 1, 2, 3), ("zero_stage",),
             "ZeRO has the stages 0, 1, 2 and 3", ("choose one of them",)),
            (in_pipeline and self.zero_stage > 1, ("zero_stage", "pp"),
             "a DeepSpeed pipeline allows zero_stage 0 or 1", (("zero_stage", "0 or 1"), ("pp", 1))),
            (self.sequence_parallel and self.tp == 1, ("sequence_parallel", "tp"),
             "sequence parallelism splits what tp replicates", (("tp", "2 or more"), ("sequence_parallel", False))),
            (not empty and self.replicas % self.ep > 0, ("ep", "dp", "cp") if self.cp > 1 else ("ep", "dp"),
             "groups of ep replicas shard the experts", (("ep", f"a divisor of {self.replicas}"), "choose another dp")),
            (self.cp > 1 and self.ulysses > 1, ("cp", "ulysses"),
             "one of them splits a sequence; cp_ulysses exchanges heads under cp", (("ulysses", 1), ("cp", 1))),
            (self.cp_ulysses < 1 or self.cp % max(self.cp_ulysses, 1) > 0, ("cp_ulysses", "cp"),
             "the ranks that share a sequence exchange heads in groups of this size",
             (("cp_ulysses", f"a divisor of {self.cp}"), ("cp", f"a multiple of {max(self.cp_ulysses, 1)}"))),
            (self.ep > 1 and self.ulysses > 1, ("ep", "ulysses"),
             "ranks that share a sequence keep all experts in this version", (("ep", 1), ("ulysses", 1))),
            (self.experts == "inner" and self.tp == 1, ("experts", "tp"),
             "inner shards each expert over tp", (("tp", "2 or more"), ("experts", "whole"))),
            (self.experts == "inner" and self.ep > 1, ("experts", "ep"),
             "ep hands out whole experts", (("experts", "whole"), ("ep", 1))),
            (offloads and in_pipeline, ("offload_optimizer", "pp"),
             "a pipeline's optimizer stays on its device in this version", (("offload_optimizer", "none"), ("pp", 1))),
            (offloads and self.zero_stage == 0, ("offload_optimizer", "zero_stage"),
             "only a sharded optimizer can be offloaded", (("zero_stage", "1, 2 or 3"), ("offload_optimizer", "none"))),
            (self.offload_params != "none" and self.zero_stage != 3, ("offload_params", "zero_stage"),
             "only ZeRO-3 shards parameters", (("zero_stage", 3), ("offload_params", "none"))),
            (self.offload_optimizer == "nvme" and self.zero_stage < 3, ("offload_optimizer", "zero_stage"),
             "DeepSpeed would silently keep optimizer states in host memory",
             (("zero_stage", 3), ("offload_optimizer", "cpu"))),
            (self.offload_optimizer == "nvme" and self.ep > 1, ("offload_optimizer", "ep"),
             "experts that ep shards stay in memory in this version", (("offload_optimizer", "cpu"), ("ep", 1))),
            (self.offload_params == "nvme" and self.ep > 1, ("offload_params", "ep"),
             "experts that ep shards stay in memory in this version", (("offload_params", "cpu"), ("ep", 1))),
            (self.hpz < 1 or self.dp % max(self.hpz, 1) > 0, ("hpz", "dp"),
             "its groups are neighboring replicas", (("hpz", f"a divisor of {self.dp}"), "choose another dp")),
            (self.hpz > 1 and self.zero_stage < 3, ("hpz", "zero_stage"),
             "ZeRO++ is a part of ZeRO-3", (("zero_stage", 3), ("hpz", 1))),
            (self.hpz > 1 and self.tp * self.ulysses * self.ep > 1, ("hpz", "tp", "ulysses", "ep"),
             "ZeRO++ groups ranks as if all of them were data-parallel", (("hpz", 1), "set tp=1, ulysses=1 and ep=1")),
            (self.hpz > 1 and self.cp > 1, ("hpz", "cp"),
             "groups of ZeRO++ were not tried with it", (("hpz", 1), ("cp", 1))),
            (self.schedule is not None and not in_pipeline, ("schedule", "pp"),
             "a schedule orders the passes of a pipeline", (("pp", "2 or more"), ("schedule", None))),
            (self.schedule is None and self.chunks != 1, ("chunks", "schedule"),
             "only a schedule has chunks", (("schedule", "interleaved"), ("chunks", 1))),
        )
        # fmt: on
        for refused, fields, reason, remedy in rules:
            if refused:
                raise LayoutError.between(tuple((field, getattr(self, field)) for field in fields), reason, *remedy)
        if self.schedule is not None:
            pipeline_schedules.check_chunks(self.schedule, self.chunks, field="chunks", kind_field="schedule")
        pipeline_schedules.check_pending_weights(self.schedule, self.max_pending_weights, kind_field="schedule")

    def __str__(self) -> str:
        axes = sequence_axes(cp=self.cp, cp_ulysses=self.cp_ulysses, ulysses=self.ulysses)
        ulysses = f"-u{axes['u']}" if "u" in axes else ""
        ep = f"-ep{self.ep}" if self.ep > 1 else ""
        cp = f"-cp{axes['cp']}" if "cp" in axes else ""
        return f"dp{self.dp}{ep}{cp}-tp{self.tp}-{self.pipeline_text}{ulysses}-z{self.zero_stage}"

    @property
    def pipeline_text(self) -> str:
        """The pipeline's part of the layout: `pp4`, `pp4x2`, `pp4-zbv` or `pp4-zbh1w2`."""
        if self.schedule == "interleaved":
            return f"pp{self.pp}x{self.chunks}"
        return "-".join([f"pp{self.pp}", *schedule_parts(self.schedule, self.max_pending_weights)])

    def table(self, micro_batches: int) -> pipeline_schedules.Schedule:
        """Return the order in which the ranks of a pipeline run passes. Only of a layout with a schedule."""
        assert self.schedule is not None
        return pipeline_schedules.schedule_of(
            self.schedule,
            pp=self.pp,
            micro_batches=micro_batches,
            virtual_stages=self.chunks,
            max_pending_weights=self.max_pending_weights,
        )

    def refuse_schedule(self, reason: str) -> None:
        """Raise LayoutError with this reason where the layout has a pipeline schedule of the toolkit's own."""
        if self.schedule is not None:
            raise LayoutError.of("schedule", self.schedule, reason, ("schedule", None))

    @property
    def stages(self) -> int:
        """Stages of the pipeline: its ranks times the chunks on each."""
        return self.pp * self.chunks

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return pipeline_schedules.stage_ranks(self.schedule or "1f1b", self.pp, self.chunks)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.model_size

    @property
    def model_size(self) -> int:
        """Ranks that read the same samples."""
        return self.cp * self.tp * self.pp * self.ulysses

    @property
    def replicas(self) -> int:
        """Ranks with the same part of the parameters, over which DeepSpeed averages gradients and shards states."""
        return self.dp * self.cp

    @property
    def zero_shards(self) -> int:
        """Ranks over which ZeRO shards states: replicas, and ranks that share sequences with Ulysses."""
        return self.replicas * self.ulysses

    def for_teacher(self, *, has_experts: bool) -> Self:
        """The layout in which the same ranks compute what the teacher of a distillation says.

        Ranks that share each sequence of the student with Ulysses have sequences of their own: without gradients these
        fit. Those that shard the experts of a student are replicas of a teacher without experts.
        """
        return replace(
            self,
            dp=self.dp * self.ulysses,
            ulysses=1,
            ep=self.ep if has_experts else 1,
            experts=self.experts if has_experts else "whole",
        )

    @classmethod
    def parse(cls, text: str, *, world_size: int | None = None) -> Self:
        """Read `dp4-tp2-pp1-z2` or a part of it; a missing part is 1 (z: 0; dp: ep), and dp follows from `world_size`.

        Raises LayoutError when a part is unknown or given twice, or when the world size does not fit.
        """
        sizes: dict[str, Any] = {}
        for part in text.split("-"):
            fields = schedule_fields("layout", text, part)
            match = re.fullmatch(r"(dp|ep|cp|tp|pp|u|z)([0-9]+)", part)
            if not fields and match is not None:
                fields = {_AXES[match[1]]: axis_size("layout", text, part, match[2])}
            if not fields or fields.keys() & sizes.keys():
                problem = "is given twice" if fields else "is not a part of a layout"
                advice = "write parts such as dp4-tp2-pp1-z2, each at most once"
                raise LayoutError.of("layout", text, f"{part!r} {problem}", advice)
            sizes |= fields
        sizes = sequence_fields(sizes)
        if world_size is not None:
            return cls.resolve(world_size, dp=sizes.pop("dp", None), **sizes)
        return cls(**{"dp": least_dp(ep=sizes.get("ep"), cp=sizes.get("cp"))} | sizes)

    @classmethod
    def resolve(cls, world_size: int, *, dp: int | None = None, **fields: Any) -> Self:
        """The layout on `world_size` ranks, with dp derived when it is None. `fields` are the other ones of Layout.

        Raises LayoutError when the axes do not multiply to the world size, and says which launch would be right.
        """
        least = least_dp(ep=fields.get("ep"), cp=fields.get("cp"), hpz=fields.get("hpz"))
        layout = cls(dp=least if dp is None else dp, **fields)
        model = layout.model_size
        if dp is None:
            if world_size % model:
                raise LayoutError(layout._no_multiple(world_size))
            layout = replace(layout, dp=world_size // model)
        if layout.world_size != world_size:
            needed = layout.world_size
            launch = f"launch {spell_setting('world_size', needed)} (for instance `deepspeed --num_gpus {needed} …`)"
            remedies: list[Setting | str] = [launch]
            if world_size % model == 0:
                remedies.append(("dp", world_size // model))
            raise LayoutError(
                Refusal(
                    field="",
                    settings=(("world_size", world_size), *layout._sizes("dp", "cp", "tp", "pp", "ulysses")),
                    reason=f"this layout needs {spell_setting('world_size', needed)}",
                    remedy=tuple(remedies),
                )
            )
        return layout

    def coordinate(self, rank: int) -> Coordinate:
        """The position of global rank `rank`: pipe, data, model, with model fastest (Ulysses counts within model)."""
        width = self.tp * self.ulysses
        rest, model = divmod(rank, width)
        pipe, data = divmod(rest, self.replicas)
        return Coordinate(pipe, data, model)

    def rank(self, *, pipe: int = 0, data: int = 0, model: int = 0) -> int:
        """The global rank at a coordinate; the inverse of `coordinate`."""
        return (pipe * self.replicas + data) * self.tp * self.ulysses + model

    def sample_rank(self, rank: int) -> int:
        """The replica of global rank `rank`, by which it takes its samples."""
        return self.coordinate(rank).data // self.cp

    def ranks_along(
        self, axis: Literal["pipe", "data", "model", "expert", "expert_data", "context", "stage"]
    ) -> list[list[int]]:
        """Every group of ranks that differ in one axis alone, in the order of their first ranks.

        `expert`: each ep neighbors along data, which shard the experts; `expert_data`: those with the same experts.
        `context`: each cp neighbors along data, which share sequences. `stage`: those of a pipeline stage, which differ
        in data and model.
        """
        if axis == "stage":
            size = self.world_size // self.pp
            return [list(range(first, first + size)) for first in range(0, self.world_size, size)]
        if axis in ("expert", "expert_data", "context"):
            size = self.cp if axis == "context" else self.ep
            replicas = self.ranks_along("data")
            if axis != "expert_data":
                return [ranks[i : i + size] for ranks in replicas for i in range(0, self.replicas, size)]
            return [ranks[i::size] for ranks in replicas for i in range(size)]
        groups: dict[Coordinate, list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(self.coordinate(rank)._replace(**{axis: 0}), []).append(rank)
        return list(groups.values())

    def _no_multiple(self, world_size: int) -> Refusal:
        model = self.model_size
        sizes = self._sizes("cp", "tp", "pp", "ulysses")
        lower = world_size // model * model
        choices = f"{lower} or {lower + model}" if lower else f"{model}"
        large = " or ".join(name for name, size in sizes if size > 1)
        return Refusal(
            field="",
            settings=(("world_size", world_size), *sizes),
            reason=f"the world size must be a multiple of {' x '.join(name for name, _ in sizes)} = {model}",
            remedy=(f"launch {choices} ranks", f"lower {large}"),
        )

    def _sizes(self, *axes: str) -> tuple[tuple[str, int], ...]:
        return tuple(
            (axis, getattr(self, axis)) for axis in axes if axis not in ("cp", "ulysses") or getattr(self, axis) > 1
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sizes in samples. Raises BatchError through `resolve` when they do not divide."""

    global_batch_size: int
    micro_batch_size: int
    dp: int

    @property
    def accumulation(self) -> int:
        """Micro-batches that each rank computes for one optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @classmethod
    def resolve(cls, *, global_batch_size: int, micro_batch_size: int, dp: int) -> Self:
        """Derive the accumulation. Raises BatchError that names the nearest sizes which work."""
        per_step = micro_batch_size * dp
        if global_batch_size % per_step:
            lower = global_batch_size // per_step * per_step
            near = f"{lower} or {lower + per_step}" if lower else str(per_step)
            micro = [] if global_batch_size % dp else divisors(global_batch_size // dp)
            some = ", ".join(map(str, micro if len(micro) <= 6 else [*micro[:3], *micro[-2:]]))
            remedies = [("batch.global_batch_size", near)]
            if micro:
                remedies.append(("batch.micro_batch_size", f"one of {some}"))
            raise BatchError(
                Refusal(
                    field="batch.global_batch_size",
                    settings=(
                        ("batch.global_batch_size", global_batch_size),
                        ("batch.micro_batch_size", micro_batch_size),
                        ("parallel.dp", dp),
                    ),
                    reason=f"{global_batch_size} is not a multiple of {micro_batch_size} x {dp} = {per_step}",
                    remedy=tuple(remedies),
                )
            )
        return cls(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp=dp)

    def block_start(self, *, accumulation_step: int, data_rank: int) -> int:
        """Position in the global batch of the first sample of a rank's micro-batch."""
        return (accumulation_step * self.dp + data_rank) * self.micro_batch_size
