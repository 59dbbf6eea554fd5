"""Layout: how one training job is spread over ranks, and the rules that DeepSpeed would enforce too late.

A layout prints as `dp4-tp2-pp1-z2` (and `-u2` where Ulysses is on) and parses from that form or any part of it.
Rank order is DeepSpeed's `PipeModelDataParallelTopology`: axes pipe, data, model, with model fastest.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

from toolkit.errors import LayoutError

OffloadDevice = Literal["none", "cpu"]
Recompute = Literal["none", "selective", "full"]

_AXES = {"dp": "dp", "tp": "tp", "pp": "pp", "u": "ulysses", "z": "zero_stage"}


class Coordinate(NamedTuple):
    """Where a rank stands on each axis."""

    pipe: int
    data: int
    model: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes, the ZeRO stage, offload and recompute. Raises LayoutError for what cannot run.

    `dp` counts data-parallel replicas; `tp` Megatron tensor-parallel ranks, `pp` pipeline stages, `ulysses` ranks that
    share one sequence. `sequence_parallel` is Megatron's flag that rides on `tp`.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ulysses: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    offload_optimizer: OffloadDevice = "none"
    offload_params: OffloadDevice = "none"
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        for axis in ("dp", "tp", "pp", "ulysses"):
            size = getattr(self, axis)
            if size < 1:
                raise LayoutError(f"{axis}={size}: an axis has at least one rank. Set {axis}=1 or more.")
        z, pp = self.zero_stage, self.pp
        if z not in (0, 1, 2, 3):
            raise LayoutError(f"zero_stage={z}: ZeRO has the stages 0, 1, 2 and 3. Choose one of them.")
        if pp > 1 and z > 1:
            raise LayoutError(
                f"zero_stage={z} with pp={pp}: a DeepSpeed pipeline allows zero_stage 0 or 1. "
                "Lower zero_stage, or set pp=1."
            )
        if self.sequence_parallel and self.tp == 1:
            raise LayoutError(
                "sequence_parallel=true with tp=1: sequence parallelism splits what tp replicates. "
                "Set tp=2 or more, or sequence_parallel=false."
            )
        if self.offload_optimizer != "none" and pp > 1:
            raise LayoutError(
                f"offload_optimizer={self.offload_optimizer} with pp={pp}: a pipeline's optimizer stays on its device "
                "in this version. Set offload_optimizer=none, or pp=1."
            )
        if self.offload_optimizer != "none" and z == 0:
            raise LayoutError(
                f"offload_optimizer={self.offload_optimizer} with zero_stage=0: only a sharded optimizer can be "
                "offloaded. Set zero_stage=1, 2 or 3, or offload_optimizer=none."
            )
        if self.offload_params != "none" and z != 3:
            raise LayoutError(
                f"offload_params={self.offload_params} with zero_stage={z}: only ZeRO-3 shards parameters. "
                "Set zero_stage=3, or offload_params=none."
            )

    def __str__(self) -> str:
        ulysses = f"-u{self.ulysses}" if self.ulysses > 1 else ""
        return f"dp{self.dp}-tp{self.tp}-pp{self.pp}{ulysses}-z{self.zero_stage}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.model_size

    @property
    def model_size(self) -> int:
        """Ranks that together hold one replica and read the same samples."""
        return self.tp * self.pp * self.ulysses

    @classmethod
    def parse(cls, text: str, *, world_size: int | None = None) -> Self:
        """Read `dp4-tp2-pp1-z2` or a part of it; what is left out is 1 (z: 0), and dp is what `world_size` leaves.

        Raises LayoutError when a part is unknown or given twice, or when the world size does not fit.
        """
        sizes: dict[str, int] = {}
        for part in text.split("-"):
            match = re.fullmatch(r"(dp|tp|pp|u|z)(\d{1,7})", part)
            if match is None or _AXES[match[1]] in sizes:
                problem = "is not a part of a layout" if match is None else "is given twice"
                raise LayoutError(
                    f"layout {text!r}: {part!r} {problem}. Write parts such as dp4-tp2-pp1-z2, each at most once."
                )
            sizes[_AXES[match[1]]] = int(match[2])
        if world_size is not None:
            return cls.resolve(world_size, dp=sizes.pop("dp", None), **sizes)  # type: ignore[arg-type]
        return cls(**sizes)  # type: ignore[arg-type]

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        dp: int | None = None,
        tp: int = 1,
        pp: int = 1,
        ulysses: int = 1,
        zero_stage: int = 0,
        sequence_parallel: bool = False,
        offload_optimizer: OffloadDevice = "none",
        offload_params: OffloadDevice = "none",
        recompute: Recompute = "none",
    ) -> Self:
        """The layout on `world_size` ranks, with dp derived when it is None.

        Raises LayoutError when the axes do not multiply to the world size, and says which launch would be right.
        """
        layout = cls(
            dp=1 if dp is None else dp,
            tp=tp,
            pp=pp,
            ulysses=ulysses,
            zero_stage=zero_stage,
            sequence_parallel=sequence_parallel,
            offload_optimizer=offload_optimizer,
            offload_params=offload_params,
            recompute=recompute,
        )
        model = layout.model_size
        if dp is None:
            if world_size % model:
                raise layout._no_multiple(world_size)
            layout = replace(layout, dp=world_size // model)
        if layout.world_size != world_size:
            hint = f", or set parallel.dp={world_size // model}" if world_size % model == 0 else ""
            raise LayoutError(
                f"{_ranks(world_size)} with {layout._axes(('dp', 'tp', 'pp', 'ulysses'))}: this layout needs "
                f"{_ranks(layout.world_size)}. Launch {_ranks(layout.world_size)} (for instance "
                f"`deepspeed --num_gpus {layout.world_size} …`){hint}."
            )
        return layout

    def coordinate(self, rank: int) -> Coordinate:
        """The place of global rank `rank`: pipe, data, model, with model fastest (Ulysses counts within model)."""
        width = self.tp * self.ulysses
        rest, model = divmod(rank, width)
        pipe, data = divmod(rest, self.dp)
        return Coordinate(pipe, data, model)

    def rank(self, *, pipe: int = 0, data: int = 0, model: int = 0) -> int:
        """The global rank at a coordinate; the inverse of `coordinate`."""
        return (pipe * self.dp + data) * self.tp * self.ulysses + model

    def _no_multiple(self, world_size: int) -> LayoutError:
        model, names = self.model_size, ("tp", "pp", "ulysses")
        lower = world_size // model * model
        choices = f"{lower} or {lower + model}" if lower else f"{model}"
        large = " or ".join(name for name in names if getattr(self, name) > 1)
        return LayoutError(
            f"{_ranks(world_size)} with {self._axes(names)}: the world size must be a multiple of "
            f"{' x '.join(self._shown(names))} = {model}. Launch {choices} ranks, or lower {large}."
        )

    def _axes(self, names: tuple[str, ...]) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in self._shown(names))

    def _shown(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if name != "ulysses" or self.ulysses > 1]


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
