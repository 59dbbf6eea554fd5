"""The regression matrix: legal cells of strategy x family x optimizer x accumulation x clipping x tying x precision.

A cell is one way to train the same model. The rules of recipes decide which cells are legal.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal

from toolkit.config import recipe_problems
from toolkit.config.data_section import DataSection
from toolkit.config.recipe import (
    BatchSection,
    ModelSection,
    OptimizerName,
    OptimizerSection,
    ParallelSection,
    Precision,
    Recipe,
    ScheduleSection,
    TrainSection,
)
from toolkit.config.strategy import Strategy

STRATEGIES = (
    *("dp2-z0", "dp2-z1", "dp2-z2", "dp2-z3", "dp2-z1-offload", "dp2-z2-offload", "dp2-z3-offload"),
    *("dp2-ddp", "dp2-fsdp", "dp2-z3-recompute", "dp4-z1"),
    *("tp2-z0", "tp2-z1", "tp2-z2-sp", "tp2-z3-sp", "tp2-dp2-z1-sp", "tp4-z2"),
    *("pp2-z0", "pp2-z1", "pp2-z1-recompute", "pp4-z1", "tp2-pp2-z0-sp", "tp2-pp2-dp2-z1-sp"),
    *("u2-z0", "u2-z1", "u2-z2", "u2-z3"),
)
"""Strategies with every legal combination of options."""


def _layouts() -> Iterator[str]:
    plain = ("z0", "z1", "z2", "z3", "z1-offload", "z2-offload", "z3-offload", "ddp", "fsdp")
    yield from (f"dp{dp}-{place}" for dp, place in product((1, 4), plain))
    for tp, dp, zero, sp in product((2, 4), (1, 2), (0, 1, 2, 3), ("", "-sp")):
        yield f"tp{tp}{'-dp2' * (dp == 2)}-z{zero}{sp}"
    for pp, dp, zero in product((2, 4), (1, 2), (0, 1)):
        yield f"pp{pp}{'-dp2' * (dp == 2)}-z{zero}"
    yield from (f"tp2-pp2-dp2-z{zero}{sp}" for zero, sp in product((0, 1), ("", "-sp")))
    yield from (f"tp2-pp2-z{zero}{sp}" for zero, sp in product((0, 1), ("", "-sp")))
    yield from (f"{layout}-recompute" for layout in ("dp2-z1", "dp2-ddp", "dp2-fsdp", "pp4-z0", "pp2-dp2-z1"))
    yield from (f"tp2-z{zero}{sp}-recompute" for zero, sp in product((0, 1, 2, 3), ("", "-sp")))
    yield from ("tp4-z1-sp-recompute", "tp2-pp2-dp2-z1-sp-recompute", "u2-z3-recompute")
    yield from ("u2-dp2-z1", "u2-dp2-z2", "u2-dp2-z3", "u4-z1", "dp4-z3-hpz2")


LAYOUTS = tuple(name for name in _layouts() if name not in STRATEGIES)
"""The other strategies: each with enough combinations for every pair of options."""

FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    # Catalog model, overrides that make it small, and the family's name for its layers.
    "gpt2": ("gpt2-tiny", {"n_embd": 32, "n_head": 4, "n_positions": 32}, "n_layer"),
    # Fewer key-value heads than heads, and than tensor-parallel ranks.
    "llama": (
        "llama-tiny",
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64},
        "num_hidden_layers",
    ),
    # Norms in each head.
    "qwen3": (
        "qwen3-tiny",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
        },
        "num_hidden_layers",
    ),
    # Attention and MLP side by side, rotary positions on a part of each head.
    "gpt_neox": (
        "pythia-14m",
        {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64},
        "num_hidden_layers",
    ),
}
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "sgd")
ACCUMULATIONS = (1, 4)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
GLOBAL_BATCH = 16
VOCABULARY = 321
"""Odd, so that every tp pads it."""
ACTIVE_CLIP = 0.2
"""Below every gradient norm of these runs, so that each step is clipped; this is checked."""
STEPS, LONG_STEPS = 6, 30
"""Of a cell, and of one that trains longer in the whole matrix (`steps_of`)."""
ROUNDING_SEEDS = (1, 2, 3)
"""Of the reruns of a baseline in bf16, which round differently."""


Rounding = Literal["none", "weights", "autocast", "fsdp"]
"""How a strategy rounds to bf16: `weights` in bf16, whose fp32 masters start from rounded values (ZeRO 1 to 3);
`autocast` over fp32 weights (ZeRO-0, DDP); `fsdp` rounds fp32 weights for each use. They differ by more than the order
of a sum."""
_KINDS: dict[str, Rounding] = {"reference": "none", "dp1-z1": "weights", "dp1-z0": "autocast", "fsdp-dp1": "fsdp"}


@dataclass(frozen=True, kw_only=True)
class Text:
    """The corpus, and a folder for what is made from it."""

    corpus: Path
    cache: Path

    @property
    def chats(self) -> Path:
        """Conversations (context_cells.py)."""
        return self.cache / "chats.jsonl"

    @property
    def chat_tokenizer(self) -> Path:
        """Folder of their tokenizer."""
        return self.cache / "chat-tokenizer"

    @property
    def models(self) -> Path:
        """Folder of configs of models that no catalogue has."""
        return self.cache / "models"


@dataclass(frozen=True, kw_only=True)
class Mathematics:
    """Everything that decides what is computed: cells with equal mathematics share a baseline."""

    family: str
    layers: int
    optimizer: OptimizerName
    clipped: bool
    tied: bool
    precision: Precision
    rounding: Rounding

    @property
    def trainings(self) -> int:
        """How often a baseline is trained: in bf16 also with smaller micro-batches, and with other rounding."""
        return 1 if self.precision == "fp32" else 2 + len(ROUNDING_SEEDS)

    @property
    def packing(self) -> str:
        """Half of the cells are `padded`, balanced over each option: their micro-batches differ in target tokens."""
        return "padded" if (self.optimizer == "adamw") ^ self.clipped ^ self.tied else "packed"

    def recipe(self, text: Text, *, steps: int) -> Recipe:
        """Return the recipe of the baseline: a plain process in fp32; in bf16 one rank with the same rounding."""
        shape, small, layers = FAMILIES[self.family]
        overrides = small | {layers: self.layers, "vocab_size": VOCABULARY, "tie_word_embeddings": self.tied}
        # At 1e-3 AdamW amplifies rounding: the reference differs from itself by 9e-7 when only its micro-batches
        # change (2e-7 at 3e-4), which leaves no room below a bound of 1e-6.
        rate = 0.1 if self.optimizer == "sgd" else 3e-4
        data = DataSection(
            source=str(text.corpus),
            tokenizer="bpe-300",
            seq_len=32,
            packing=self.packing,
            workers=1,
            eval_fraction=0.1,
            cache_dir=str(text.cache),
        )
        return Recipe(
            model=ModelSection(name_or_path=shape, overrides=overrides),
            data=data,
            parallel=ParallelSection(zero_stage=0 if self.rounding == "autocast" else 1),
            batch=BatchSection(global_batch_size=GLOBAL_BATCH, micro_batch_size=GLOBAL_BATCH),
            precision=self.precision,
            optimizer=OptimizerSection(name=self.optimizer, lr=rate, weight_decay=0.1),
            schedule=ScheduleSection(name="cosine", warmup_steps=1),
            train=TrainSection(
                steps=steps,
                seed=1,
                grad_clip=ACTIVE_CLIP if self.clipped else 0.0,
                engine={"none": "reference", "fsdp": "fsdp"}.get(self.rounding, "deepspeed"),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to train a model."""

    strategy: str
    family: str
    optimizer: OptimizerName
    accumulation: int
    clipped: bool
    tied: bool
    precision: Precision

    def __str__(self) -> str:
        clip, tie = "clip" if self.clipped else "noclip", "tied" if self.tied else "untied"
        return f"{self.strategy}:{self.family}-{self.optimizer}-a{self.accumulation}-{clip}-{tie}-{self.precision}"

    @property
    def where(self) -> Strategy:
        """The parsed strategy."""
        return _parse(self.strategy)

    @property
    def ranks(self) -> int:
        return self.where.world_size(1)

    @property
    def mathematics(self) -> Mathematics:
        return Mathematics(
            family=self.family,
            layers=max(2, self.where.pp),
            optimizer=self.optimizer,
            clipped=self.clipped,
            tied=self.tied,
            precision=self.precision,
            rounding=self._rounding(),
        )

    def _rounding(self) -> Rounding:
        return _KINDS[self.where.baseline(self.precision)]

    def recipe(self, text: Text, *, steps: int) -> Recipe:
        """Return the recipe of the cell."""
        recipe = self.mathematics.recipe(text, steps=steps)
        replicas = self.ranks // self.where.model_size
        micro_batch_size = GLOBAL_BATCH // (replicas * self.accumulation)
        batch = recipe.batch.model_copy(update={"micro_batch_size": micro_batch_size})
        return self.where.apply(recipe.model_copy(update={"batch": batch}), 1)

    def problems(self) -> list[str]:
        """Return the errors that a user would get."""
        nowhere = Text(corpus=Path("documents.jsonl"), cache=Path("cache"))
        return recipe_problems(self.recipe(nowhere, steps=STEPS), self.ranks)

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks have replicas of a parameter."""
        where = self.where
        if where.engine == "fsdp":
            return False
        if where.tp == where.pp == 1:
            return self.ranks > 1 and where.zero_stage != 3
        # Stages of an untied model share nothing.
        return where.tp > 1 or self.ranks > where.model_size or self.tied

    @property
    def options(self) -> tuple[object, ...]:
        """Everything but the strategy."""
        return (
            self.family,
            self.optimizer,
            self.accumulation,
            self.clipped,
            self.tied,
            self.precision,
            self.mathematics.packing,
        )

    @property
    def parts(self) -> tuple[object, ...]:
        """The parts of the strategy."""
        where = self.where
        axes = (where.tp, where.pp, where.ulysses)
        replicas = self.ranks // where.model_size
        return (where.engine, where.zero_stage, axes, replicas, where.sp, where.recompute, where.offload)


@cache
def legal_cells() -> tuple[Cell, ...]:
    """All legal combinations of STRATEGIES, and a subset of those of LAYOUTS with every pair of options."""
    return tuple(
        cell
        for strategy in (*STRATEGIES, *LAYOUTS)
        for cell in _chosen(strategy, tuple(cell for cell in combinations_of(strategy) if not cell.problems()))
    )


def combinations_of(strategy: str) -> Iterator[Cell]:
    """One strategy with every combination of options, legal or not."""
    axes = product(FAMILIES, OPTIMIZERS, ACCUMULATIONS, (False, True), (True, False), PRECISIONS)
    for family, optimizer, accumulation, clipped, tied, precision in axes:
        yield Cell(
            strategy=strategy,
            family=family,
            optimizer=optimizer,
            accumulation=accumulation,
            clipped=clipped,
            tied=tied,
            precision=precision,
        )


def _chosen(strategy: str, cells: Sequence[Cell]) -> Sequence[Cell]:
    return cells if strategy in STRATEGIES else covering_subset(cells, lambda cell: cell.options, balanced=False)


@cache
def paired_cells() -> tuple[Cell, ...]:
    """Cells that cover every pair of strategy and option, and every pair of options, and share their baselines."""
    full = [cell for cell in legal_cells() if cell.strategy in STRATEGIES]
    return tuple(covering_subset(full, lambda cell: (cell.strategy, *cell.options), shares_baselines=True))


@cache
def long_cells() -> frozenset[Cell]:
    """Those of them that cover every pair of strategy parts and options."""
    return frozenset(covering_subset(paired_cells(), lambda cell: (*cell.parts, *cell.options)))


@cache
def daily_cells() -> tuple[Cell, ...]:
    """Cells of `make test`: every strategy, and every pair of strategy parts and options, with shared baselines."""
    return tuple(
        covering_subset(
            paired_cells(),
            lambda cell: (*cell.parts, *cell.options),
            each=lambda cell: cell.strategy,
            shares_baselines=True,
        )
    )


def steps_of(cell: Cell) -> int:
    """Steps of a cell: more for all of GPT-2 in fp32, and for the cells that cover each pair."""
    return LONG_STEPS if cell in long_cells() or (cell.family, cell.precision) == ("gpt2", "fp32") else STEPS


def covering_subset(
    cells: Sequence[Cell],
    axes: Callable[[Cell], tuple[object, ...]],
    *,
    each: Callable[[Cell], object] | None = None,
    balanced: bool = True,
    shares_baselines: bool = False,
) -> list[Cell]:
    """Choose cells that cover every pair of values of two axes and every value of `each`, greedily and
    deterministically.

    `balanced` breaks ties by how seldom the options were chosen; otherwise the first cell wins. With
    `shares_baselines` a cell that needs another baseline has to cover more: each training of it is worth a third of a
    pair, which halves what all cells and baselines train together.
    """
    shows: dict[Cell, set[object]] = {cell: set(combinations(enumerate(axes(cell)), 2)) for cell in cells}
    if each is not None:
        for cell, shown in shows.items():
            shown.add(each(cell))
    missing = set[object]().union(*shows.values())
    used: Counter[object] = Counter()
    trained: set[Mathematics] = set()
    chosen = []

    def merit(cell: Cell) -> tuple[float, int]:
        trainings = cell.mathematics.trainings if shares_baselines and cell.mathematics not in trained else 0
        covered = len(shows[cell] & missing)
        seldom = -sum(used[option] for option in enumerate(cell.options)) * balanced
        return (covered - trainings / 3 if covered else -math.inf), seldom

    while missing:
        best = max(shows, key=merit)
        chosen.append(best)
        trained.add(best.mathematics)
        used.update(enumerate(best.options))
        missing -= shows.pop(best)
    return chosen


@cache
def _parse(strategy: str) -> Strategy:
    return Strategy.parse(strategy)
