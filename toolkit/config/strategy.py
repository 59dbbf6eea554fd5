"""Strategy: one way to train a recipe, in the form of the command line: `z2`, `tp2-pp2-dp2-z1-sp`, `ddp`, `fsdp`.

Parts are joined by - in any order, each at most once: axes and ZeRO stage of a `Layout` (dp4 ep2 cp2 tp2 pp2 u2 z1;
in u2-cp2 four ranks share a sequence: pairs exchange heads, and these pairs keys and values), its pipeline schedule
(1f1b, gpipe, zbh1, zbv; or chunks of an interleaved one: pp4x2), an engine (reference, ddp, fsdp; the default is
deepspeed), sp (Megatron sequence parallelism), inner (tp shards the inner dimension of experts), recompute, everyN
(recompute every Nth decoder layer), selective (recompute only attention), offload (the optimizer to host memory; with
z3 the parameters too), nvme (the same to files on a drive), offacts (activations to host memory), tiled (MLPs in
tiles), hpzN (ZeRO++ over N ranks) and mN (micro-batches of N samples).

After `trainer:` stands a layout of Hugging Face's Trainer: ddp, or fsdp2, tpN and epN of a model that transformers
shards when it is loaded (DistributedConfig); with dpN and mN. `trainer:` alone is one process.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Self, get_args

from toolkit.config import pipeline_schedules
from toolkit.config.layout import (
    RECOMPUTE_PERIODS,
    SCHEDULE_PARTS,
    Layout,
    axis_size,
    least_dp,
    schedule_fields,
    schedule_parts,
    sequence_axes,
    sequence_fields,
)
from toolkit.config.recipe import EngineName, Precision, Recipe
from toolkit.errors import LayoutError, nearest

_ENGINES = get_args(EngineName)
_FLAGS = ("sp", "inner", "recompute", "selective", "offload", "nvme", "offacts", "tiled")
_AXES = {
    "dp": "dp",
    "ep": "ep",
    "cp": "cp",
    "tp": "tp",
    "pp": "pp",
    "u": "ulysses",
    "z": "zero_stage",
    "m": "micro_batch_size",
    "every": "every",
    "hpz": "hpz",
}
_AXIS = re.compile(r"(dp|ep|cp|tp|pp|u|z|m|every|hpz)([0-9]+)")
_TRAINER = "trainer:"
_TRAINER_PARTS = ("ddp", "fsdp2")
_PART = re.compile(rf"{_AXIS.pattern}|pp[0-9]+x[0-9]+|(zbh1|zbv)w[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A parsed strategy; parts that were not given are None or off."""

    text: str
    engine: EngineName = "deepspeed"
    dp: int | None = None
    ep: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ulysses: int = 1
    cp_ulysses: int = 1
    zero_stage: int | None = None
    micro_batch_size: int | None = None
    sp: bool = False
    inner: bool = False
    recompute: bool = False
    every: int | None = None
    selective: bool = False
    offload: bool = False
    nvme: bool = False
    hpz: int = 1
    offacts: bool = False
    tiled: bool = False
    schedule: pipeline_schedules.Kind | None = None
    chunks: int = 1
    max_pending_weights: int | None = None
    trainer: bool = False
    """Whether Hugging Face's Trainer trains it; tp and ep are then those of transformers."""
    loads_sharded: bool = False
    """Whether transformers shards the model over replicas, tp and ep when it loads it."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse one strategy of the toolkit. Raises LayoutError if it is malformed or cannot run."""
        if text.startswith(_TRAINER):
            raise _refused(text, "Hugging Face's Trainer is for dstk compare --against alone", "name a layout here")
        fields: dict[str, Any] = {}
        for part in text.split("-"):
            axis = _AXIS.fullmatch(part)
            part_fields: dict[str, Any] = schedule_fields("strategy", text, part)
            if axis is not None:
                part_fields = {_AXES[axis[1]]: axis_size("strategy", text, part, axis[2])}
            elif part in _ENGINES:
                part_fields = {"engine": part}
            elif part in _FLAGS:
                part_fields = {part: True}
            elif not part_fields:
                advice = "write parts such as tp2-pp2-dp2-z1-sp, z3-offload, ddp, fsdp or reference"
                hint = nearest(part, [*_ENGINES, *_FLAGS, *SCHEDULE_PARTS]).strip()
                raise _refused(text, f"{part!r} is unknown", hint or advice)
            twice = next((field for field in part_fields if field in fields), None)
            if twice is not None:
                raise _refused(text, f"{twice} is given twice", "give each part once")
            fields |= part_fields
        strategy = cls(text=text, **sequence_fields(fields))
        strategy._check()
        return strategy

    @classmethod
    def _parse_trainer(cls, text: str) -> Self:
        """Parse a layout of the Trainer."""
        fields: dict[str, Any] = {}
        for part in filter(None, text.removeprefix(_TRAINER).split("-")):
            axis = _AXIS.fullmatch(part)
            if axis is not None and axis[1] in ("dp", "tp", "ep", "m"):
                part_fields: dict[str, Any] = {_AXES[axis[1]]: axis_size("strategy", text, part, axis[2])}
            elif part in _TRAINER_PARTS:
                part_fields = {"loads_sharded": part == "fsdp2"}
            else:
                raise _refused(text, f"{part!r} is unknown after {_TRAINER}", "write ddp, fsdp2, dp2, tp2, ep2 or m4")
            twice = next((field for field in part_fields if field in fields), None)
            if twice is not None:
                raise _refused(text, f"{twice.replace('loads_sharded', 'data parallelism')} is given twice", "give one")
            fields |= part_fields
        splits = max(fields.get("tp", 1), fields.get("ep", 1)) > 1
        if splits and fields.get("loads_sharded") is False:
            raise _refused(text, "the Trainer has no ddp beside tp or ep", "write fsdp2 instead of ddp")
        if any(type(size) is int and size == 0 for size in fields.values()):
            raise _refused(text, "sizes are 1 or more", "write a larger number")
        if fields.get("ep", 1) > 1 and fields["ep"] % fields.get("tp", 1):
            raise _refused(text, "transformers' ep is a multiple of its tp", "choose such an ep")
        if not fields.keys() - {"micro_batch_size"}:
            fields["dp"] = 1
        fields["loads_sharded"] = splits or fields.get("loads_sharded", False)
        return cls(text=text, engine="ddp", trainer=True, **fields)

    @classmethod
    def parse_list(cls, text: str) -> list[Self]:
        """Parse a comma-separated list without duplicates, of the Trainer too. Raises LayoutError."""
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise _refused(text, "it names no strategy", "give a list such as z1,z3,tp2,pp2-z1,ddp")
        unique = dict.fromkeys(names)
        return [cls._parse_trainer(name) if name.startswith(_TRAINER) else cls.parse(name) for name in unique]

    @property
    def model_size(self) -> int:
        """Number of ranks of one model replica."""
        return self.cp * self.tp * self.pp * self.ulysses

    def world_size(self, nproc: int) -> int:
        """Ranks to start, given `nproc`: one for the reference, else at least one replica and as many as fit."""
        if self.engine == "reference":
            return 1
        shared = self.ep // self.tp if self.trainer and self.ep > 1 else least_dp(ep=self.ep, cp=self.cp, hpz=self.hpz)
        replicas = max(shared, nproc // self.model_size // shared * shared) if self.dp is None else self.dp
        return replicas * self.model_size

    @classmethod
    def reads(cls, text: str) -> bool:
        """Return whether every part of a text is one of a strategy, whatever they say together."""
        words = (*_ENGINES, *_FLAGS, *SCHEDULE_PARTS)
        return all(_PART.fullmatch(part) or part in words for part in text.split("-"))

    def sections(self, dp: int | None) -> dict[str, dict[str, Any]]:
        """Return the fields of a recipe that it sets: all of `parallel`, the engine, a micro-batch if it names one."""
        parallel = {**self._layout_fields(dp), "recompute": self._recompute}
        batch = {} if self.micro_batch_size is None else {"micro_batch_size": self.micro_batch_size}
        return {"parallel": parallel, "train": {"engine": self.engine}, "batch": batch}

    def shrunk(self) -> Self:
        """Return the same kind of strategy on 8 ranks at most: two ranks on each axis that had more than one."""
        axes = sequence_axes(cp=self.cp, cp_ulysses=self.cp_ulysses, ulysses=self.ulysses)
        for name in ("dp", "ep", "tp", "pp", "hpz"):
            size = getattr(self, _AXES[name])
            if size and (size > 1 or name == "dp"):
                axes[name] = size
        parts = [f"{name}{min(2, axes[name])}" for name in _AXES if name in axes]
        if self.schedule == "interleaved":
            parts[parts.index("pp2")] = f"pp2x{self.chunks}"
        parts += schedule_parts(self.schedule, self.max_pending_weights)
        if self.engine != "deepspeed":
            parts.append(self.engine)
        if self.zero_stage is not None:
            parts.append(f"z{self.zero_stage}")
        if self.every is not None:
            parts.append(f"every{self.every}")
        parts += [flag for flag in _FLAGS if getattr(self, flag)]
        return type(self).parse("-".join(parts) or "dp1")

    def apply(self, recipe: Recipe, nproc: int) -> Recipe:
        """Return `recipe` under this strategy, which changes where the arithmetic happens and not what is computed.

        The reference is plain PyTorch: it takes no loss in chunks and no kernels of Liger.
        """
        dp = self.world_size(nproc) // self.model_size
        micro = self.micro_batch_size
        if micro is None:
            # If a replica has too few samples for it: the next smaller size that divides them.
            sizes = range(min(recipe.batch.micro_batch_size or 1, recipe.batch.global_batch_size), 0, -1)
            micro = next((size for size in sizes if recipe.batch.global_batch_size % (size * dp) == 0), 1)
        sections = self.sections(dp) | {"batch": {"micro_batch_size": micro}}
        if self.trainer:  # of the recipe the Trainer takes what it shares out among replicas
            plain = replace(self, trainer=False, ep=1, tp=1)
            sections = plain.sections(dp) | {"batch": {"micro_batch_size": micro}}
        if self.engine == "reference":
            sections |= {"model": {"loss": "auto", "kernels": "torch"}}
        parallel = {"auto": False, **sections["parallel"], **self._fields_that_need_other_axes()}
        return recipe.changed(sections | {"parallel": parallel})

    def baseline(self, precision: Precision) -> str:
        """Return the default baseline: a plain process in fp32; else the strategy of one rank that rounds alike.

        ZeRO 1 to 3 start their fp32 master weights from rounded ones, ZeRO-0 and DDP autocast over fp32 weights, FSDP
        rounds fp32 weights for each use. These differ by more than the order of a sum.
        """
        if precision == "fp32":
            return "reference"
        if self.engine == "fsdp":
            return "fsdp-dp1"
        return "dp1-z1" if self.engine == "deepspeed" and self.zero_stage != 0 else "dp1-z0"

    def _fields_that_need_other_axes(self) -> dict[str, Any]:
        """Return defaults for fields that no strategy names, where it lacks the axis or stage that they are for."""
        fields: dict[str, Any] = {}
        if self.cp == 1 or self.trainer:
            fields["cp_exchange"] = "auto"
        if self.zero_stage != 3 or max(self.tp, self.ulysses, self.ep, self.cp) > 1:
            fields |= {"quantized_weights": False, "quantized_gradients": False}
        return fields

    @property
    def _recompute(self) -> str:
        if self.every is not None:
            return f"every_{self.every}"
        if self.recompute:
            return "full"
        return "selective" if self.selective else "none"

    def _layout_fields(self, dp: int | None) -> dict[str, Any]:
        if self.nvme:
            offload = "nvme"
        else:
            offload = "cpu" if self.offload else "none"
        stage = int(self.engine == "deepspeed") if self.zero_stage is None else self.zero_stage
        return {
            "dp": dp,
            "ep": self.ep,
            "cp": self.cp,
            "cp_ulysses": self.cp_ulysses,
            "tp": self.tp,
            "pp": self.pp,
            "ulysses": self.ulysses,
            "zero_stage": stage,
            "sequence_parallel": self.sp,
            "experts": "inner" if self.inner else "whole",
            "offload_activations": self.offacts,
            "tiled_mlp": self.tiled,
            "offload_optimizer": offload,
            "offload_params": offload if stage == 3 else "none",
            "hpz": self.hpz,
            "schedule": self.schedule,
            "chunks": self.chunks,
            "max_pending_weights": self.max_pending_weights,
        }

    def _check(self) -> None:
        if self.engine != "deepspeed":
            wrong = [name for name in ("ep", "cp", "tp", "pp", "ulysses") if getattr(self, name) > 1]
            if self.zero_stage is not None:
                wrong.append("z")
            wrong += [flag for flag in ("sp", "inner", "offload", "nvme", "offacts", "tiled") if getattr(self, flag)]
            if self.hpz > 1:
                wrong.append("hpz")
            if self.schedule is not None and self.pp == 1:
                wrong.append("schedule")
            if self.engine == "reference" and (self.dp or 1) > 1:
                wrong.append("dp")
            if wrong:
                them = "it" if len(wrong) == 1 else "them"
                reason = f"{self.engine} has no {' and '.join(wrong)}"
                raise _refused(self.text, reason, f"remove {them}", f"remove {self.engine}")
        if self.recompute + self.selective + (self.every is not None) > 1:
            reason = "recompute is for whole layers, selective for their attention only"
            raise _refused(self.text, reason, "remove one of them")
        if self.every is not None and self._recompute not in RECOMPUTE_PERIODS:
            raise _refused(self.text, "every2 to every8 recompute a part of the layers", "choose one of them")
        if self.offload and self.nvme:
            raise _refused(self.text, "offload is to host memory, nvme to a drive", "remove one of them")
        if self.micro_batch_size == 0:
            raise _refused(self.text, "a micro-batch has at least one sample", "write m1 or more")
        replicas = self.world_size(1) // self.model_size if self.model_size else 1
        try:
            Layout(**self._layout_fields(replicas))
        except LayoutError as error:
            refusal = error.as_refusal()
            raise LayoutError(replace(refusal, settings=(("strategy", self.text), *refusal.settings))) from None


def parse_layout(text: str, *, world_size: int | None = None) -> Layout:
    """Read a layout with its flags, `dp8-z3-recompute-offacts`; without any as `Layout.parse`. Raises LayoutError."""
    parts = text.split("-")
    flags = [part for part in parts if part in _FLAGS or re.fullmatch(r"(every|hpz)[0-9]+", part)]
    axes = [part for part in parts if part not in flags]
    layout = Layout.parse("-".join(axes or ["dp1"]), world_size=world_size)
    if not flags:
        return layout
    strategy = Strategy.parse("-".join([str(layout), *flags]))
    return Layout(**strategy._layout_fields(layout.dp), recompute=strategy._recompute)  # type: ignore[arg-type]


def layout_text(layout: Layout) -> str:
    """A layout with its flags, in the form of a strategy."""
    flags = {
        "sp": layout.sequence_parallel,
        "inner": layout.experts == "inner",
        "recompute": layout.recompute == "full",
        layout.recompute.replace("_", ""): layout.recompute not in ("none", "full"),
        "offload": layout.offload_optimizer == "cpu",
        "nvme": layout.offload_optimizer == "nvme",
        "offacts": layout.offload_activations,
        "tiled": layout.tiled_mlp,
        f"hpz{layout.hpz}": layout.hpz > 1,
    }
    return "-".join([str(layout), *(flag for flag, is_set in flags.items() if is_set)])


def strategy_text(layout: Layout, micro_batch_size: int) -> str:
    """Return a layout with its flags and the micro-batch: `dp8-tp4-pp2-z1-sp-recompute-m2`."""
    return f"{layout_text(layout)}-m{micro_batch_size}"


def _refused(text: str, reason: str, *remedy: str) -> LayoutError:
    return LayoutError.of("strategy", text, reason, *remedy)
