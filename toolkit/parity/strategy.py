"""Strategy: one way to train a recipe, as it is named on the command line: `z2`, `tp2-pp2-dp2-z1-sp`, `ddp`, `fsdp`.

Parts stand in any order, each at most once, with a - between them: the axes and ZeRO stage of a `Layout` (dp4 tp2 pp2
u2 z1), an engine (reference, ddp, fsdp; deepspeed is meant where none is named), sp (Megatron sequence parallelism),
recompute, selective (attention alone is recomputed), offload (the optimizer to host memory; with z3 the parameters too)
and mN (micro-batches of N samples).
"""

import json
import re
from dataclasses import dataclass
from typing import Self, get_args

from toolkit.errors import LayoutError, nearest
from toolkit.layout import Layout
from toolkit.recipe import EngineName, Recipe

_ENGINES = get_args(EngineName)
_FLAGS = ("sp", "recompute", "selective", "offload")
_AXIS = re.compile(r"(dp|tp|pp|u|z|m)(\d{1,6})")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A strategy as it was asked for; what was left out is None or off."""

    text: str
    engine: EngineName = "deepspeed"
    dp: int | None = None
    tp: int = 1
    pp: int = 1
    ulysses: int = 1
    zero_stage: int | None = None
    micro_size: int | None = None
    sp: bool = False
    recompute: bool = False
    selective: bool = False
    offload: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one name. Raises LayoutError for what is no strategy or cannot run."""
        fields: dict[str, object] = {}
        for part in text.split("-"):
            axis = _AXIS.fullmatch(part)
            if axis is not None:
                field = {"u": "ulysses", "z": "zero_stage", "m": "micro_size"}.get(axis[1], axis[1])
                value: object = int(axis[2])
            elif part in _ENGINES:
                field, value = "engine", part
            elif part in _FLAGS:
                field, value = part, True
            else:
                raise LayoutError(
                    f"strategy {text!r}: {part!r} is not a part of one.{nearest(part, [*_ENGINES, *_FLAGS])} "
                    "Write parts such as tp2-pp2-dp2-z1-sp, z3-offload, ddp, fsdp or reference."
                )
            if field in fields:
                raise LayoutError(f"strategy {text!r}: {field} is given twice. Give each part once.")
            fields[field] = value
        strategy = cls(text=text, **fields)  # type: ignore[arg-type]
        strategy._check()
        return strategy

    @classmethod
    def parse_list(cls, text: str) -> list[Self]:
        """Several names with commas between them, each once. Raises LayoutError."""
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise LayoutError(f"{text!r} names no strategy. Give a list such as z1,z3,tp2,pp2-z1,ddp.")
        return [cls.parse(name) for name in dict.fromkeys(names)]

    @property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp * self.ulysses

    def world_size(self, nproc: int) -> int:
        """Ranks to start where `nproc` are offered: one for the reference, else whole replicas, as many as fit."""
        if self.engine == "reference":
            return 1
        replicas = max(1, nproc // self.model_size) if self.dp is None else self.dp
        return replicas * self.model_size

    def apply(self, recipe: Recipe, nproc: int) -> Recipe:
        """`recipe` under this strategy: another place for the same arithmetic."""
        dp = self.world_size(nproc) // self.model_size
        micro = self.micro_size
        if micro is None:
            # Where fewer samples fall to a replica: the next smaller size that divides them.
            sizes = range(min(recipe.batch.micro_size, recipe.batch.global_size), 0, -1)
            micro = next((size for size in sizes if recipe.batch.global_size % (size * dp) == 0), 1)
        offload = "cpu" if self.offload else "none"
        parallel = recipe.parallel.model_copy(
            update={
                "dp": dp,
                "tp": self.tp,
                "pp": self.pp,
                "ulysses": self.ulysses,
                "sequence_parallel": self.sp,
                "zero_stage": self._stage,
                "recompute": "full" if self.recompute else "selective" if self.selective else "none",
                "offload_optimizer": offload,
                "offload_params": offload if self._stage == 3 else "none",
            }
        )
        return recipe.model_copy(
            update={
                "parallel": parallel,
                "batch": recipe.batch.model_copy(update={"micro_size": micro}),
                "train": recipe.train.model_copy(update={"engine": self.engine}),
            }
        )

    def overrides(self, recipe: Recipe, nproc: int) -> list[str]:
        """What `apply` changes in `recipe`, as overrides for a command line."""
        own, words = self.apply(recipe, nproc), []
        for name in ("parallel", "batch", "train"):
            given = getattr(recipe, name).model_dump(mode="json")
            for field, value in getattr(own, name).model_dump(mode="json").items():
                if value != given[field]:
                    words.append(f"{name}.{field}={json.dumps(value) if isinstance(value, bool) else value}")
        return words

    @property
    def _stage(self) -> int:
        if self.zero_stage is not None:
            return self.zero_stage
        return 1 if self.engine == "deepspeed" else 0

    def _check(self) -> None:
        if self.engine != "deepspeed":
            wrong = [name for name in ("tp", "pp", "ulysses") if getattr(self, name) > 1]
            wrong += ["z"] * (self.zero_stage is not None) + ["sp"] * self.sp + ["offload"] * self.offload
            wrong += ["dp"] * (self.engine == "reference" and (self.dp or 1) > 1)
            if wrong:
                raise LayoutError(
                    f"strategy {self.text!r}: {self.engine} has no {' and '.join(wrong)}. "
                    f"Leave {'it' if len(wrong) == 1 else 'them'} out, or leave out {self.engine}."
                )
        if self.recompute and self.selective:
            raise LayoutError(
                f"strategy {self.text!r}: recompute computes whole layers again, selective only their attention. "
                "Leave one of them out."
            )
        if self.micro_size == 0:
            raise LayoutError(f"strategy {self.text!r}: m0: a micro-batch has at least one sample. Write m1 or more.")
        try:
            Layout(
                dp=1 if self.dp is None else self.dp,
                tp=self.tp,
                pp=self.pp,
                ulysses=self.ulysses,
                zero_stage=self._stage,
                sequence_parallel=self.sp,
                offload_optimizer="cpu" if self.offload else "none",
                offload_params="cpu" if self.offload and self._stage == 3 else "none",
            )
        except LayoutError as error:
            raise LayoutError(f"strategy {self.text!r}: {error}") from None
