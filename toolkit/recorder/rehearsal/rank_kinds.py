"""Kinds of ranks: those that may compute something else than others of a layout, and where each kind is found.

Of a pipeline, stages with the same decoder layers that are neither first nor last are alike; under a pipeline schedule
every rank has an order of its own. Of the ranks of a stage, the first one does what others need not (it counts what is
replicated), the last of the tensor- or sequence-parallel ones may have padding of the vocabulary, context-parallel ones
have other parts of a sequence, and other replicas have other partitions of ZeRO and other experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.config.layout import Layout
from toolkit.units import some

Place = Literal["first", "model", "context", "replica"]
"""The first rank of a stage; another tensor- or sequence-parallel rank of it; the context-parallel rank next to the
first; the last context-parallel rank of another replica."""


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """Ranks that do the same: those at one place of these pipeline stages."""

    layout: Layout
    stages: tuple[int, ...]
    """Pipeline ranks; without a schedule each has one stage."""
    place: Place

    @property
    def rank(self) -> int:
        """The rank that is rehearsed."""
        return self.rank_at(self.stages[0])

    def rank_at(self, stage: int) -> int:
        """The rank that stands for the kind on one of its stages."""
        layout = self.layout
        model = layout.tp * layout.ulysses - 1 if self.place == "model" else 0
        data = {"first": 0, "model": 0, "context": 1, "replica": layout.replicas - 1}[self.place]
        return layout.rank(pipe=stage, data=data, model=model)

    @property
    def count(self) -> int:
        """Number of ranks of the kind."""
        layout = self.layout
        model = layout.tp * layout.ulysses
        each = {
            "first": 1,
            "model": (model - 1) * layout.replicas,
            "context": layout.cp - 1,
            "replica": layout.replicas - layout.cp,
        }
        return each[self.place] * len(self.stages)

    @property
    def name(self) -> str:
        """The kind in words: `last stage, tensor-parallel ranks 1 to 7`."""
        layout = self.layout
        words = []
        if layout.schedule is not None:
            words.append(f"pipeline rank {self.stages[0]}")
        elif layout.pp > 1:
            if self.stages[0] == 0:
                words.append("first stage")
            elif self.stages[-1] == layout.pp - 1:
                words.append("last stage")
            else:
                words.append(f"stage {_span(self.stages)}")
        if self.place == "model":
            axis = "sequence-parallel" if layout.ulysses > 1 else "tensor-parallel"
            words.append(f"{axis} {_span(range(1, layout.tp * layout.ulysses))}")
        elif self.place == "context":
            words.append(f"context-parallel {_span(range(1, layout.cp))}")
        elif self.place == "replica":
            words.append(f"replica {_span(range(1, layout.dp))}")
        else:
            words.append("first rank")
        return ", ".join(words)


def rank_kinds(layout: Layout, bounds: Sequence[int], pattern: Sequence[int]) -> list[RankKind]:
    """The kinds of a layout, stage by stage. `bounds`, `pattern`: layers of each stage, and the kind of each layer."""
    last = layout.pp - 1
    stages: dict[tuple[object, ...], list[int]] = {}
    for stage in range(layout.pp):
        layers: object = tuple(pattern[bounds[stage] : bounds[stage + 1]])
        if layout.schedule is not None:
            layers = stage
        stages.setdefault((stage == 0, stage == last, layers), []).append(stage)
    places: list[Place] = ["first"]
    if layout.tp * layout.ulysses > 1:
        places.append("model")
    if layout.cp > 1:
        places.append("context")
    if layout.dp > 1:
        places.append("replica")
    ordered = sorted(stages.values())
    return [RankKind(layout=layout, stages=tuple(alike), place=place) for alike in ordered for place in places]


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return some(list(numbers), 4)
