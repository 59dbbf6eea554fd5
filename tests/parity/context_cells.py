"""Cells of the regression matrix whose ranks share sequences, or that run the toolkit's attention on whole ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from matrix import LONG_STEPS, VOCABULARY, Text
from mixtures import write_config
from small_chats import write_chats, write_tokenizer

from toolkit.config.data_section import DataSection
from toolkit.config.layout import CpExchange
from toolkit.config.recipe import (
    BatchSection,
    ModelSection,
    OptimizerName,
    OptimizerSection,
    Precision,
    Recipe,
    ScheduleSection,
    TrainSection,
)
from toolkit.config.strategy import Strategy
from toolkit.parallel.tiny_model import tiny_config

Data = Literal["packed", "documents", "padded chats"]

ACTIVE_CLIP = 0.02
"""Below every gradient norm of these runs, so that each step is clipped; this is checked."""
SEQ_LEN = 32
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "gpt_oss": {"sliding_window": 6},
    "phi3": {},
    "olmo2": {},
    "qwen3_moe": {},
}
"""Windows are shorter than a chunk. Gemma 2 bounds its scores, GPT-OSS has sinks and experts."""
STRATEGIES: tuple[tuple[str, tuple[CpExchange, ...]], ...] = (
    ("cp2-z0", ("gather", "ring")),
    ("cp2-z1", ("gather", "ring")),
    ("cp2-z2", ("gather", "ring")),
    ("cp2-z3", ("gather", "ring")),
    ("cp4-z1", ("gather", "ring")),
    ("dp2-cp2-z3-recompute", ("gather", "ring")),
    ("cp2-tp2-z1", ("gather", "ring")),
    ("cp2-tp2-z3-sp", ("gather", "ring")),
    ("cp2-pp2-z1", ("gather", "ring")),
    ("cp2-pp2-z0-recompute", ("gather", "ring")),
    ("cp2-z2-offload", ("gather", "ring")),
    ("cp2-ep2-z1", ("gather", "ring")),
    ("u2-cp2-z1", ("ring",)),
    ("u2-cp2-z3", ("gather",)),
    ("u2-cp1-tp2-z3-sp", ("gather",)),
    ("z1", ("auto",)),
    ("tp2-z3-sp", ("auto",)),
    ("pp2-z1-recompute", ("auto",)),
)
"""Strategies, and how their ranks exchange keys and values, by turns. Those without cp have whole sequences."""
TILED = ("cp2-z1", "cp2-tp2-z3-sp-recompute", "cp2-z3-offload")
"""Strategies whose MLPs run in tiles, and whose activations are on the host."""
DATA: tuple[Data, ...] = ("packed", "documents", "padded chats")


@dataclass(frozen=True, kw_only=True)
class ContextMathematics:
    """Everything that decides what is computed."""

    family: str
    data: Data
    optimizer: OptimizerName
    precision: Precision

    def recipe(self, text: Text, *, steps: int) -> Recipe:
        """Return the recipe of one plain process."""
        known = tiny_config(self.family).to_dict()
        without_dropout = {name: 0.0 for name, value in known.items() if "drop" in name and isinstance(value, float)}
        config = tiny_config(self.family, vocab_size=VOCABULARY, **FAMILIES[self.family])
        chats = self.data == "padded chats"
        return Recipe(
            model=ModelSection(
                name_or_path=str(write_config(config, text.models / f"context-{self.family}")),
                overrides=without_dropout,
            ),
            data=DataSection(
                source=str(text.chats if chats else text.corpus),
                tokenizer=str(text.chat_tokenizer) if chats else "bpe-300",
                format="chat" if chats else "text",
                packing="padded" if chats else "packed",
                document_masking=self.data == "documents",
                seq_len=SEQ_LEN,
                workers=1,
                eval_fraction=0.1,
                cache_dir=str(text.cache),
            ),
            batch=BatchSection(global_batch_size=8, micro_batch_size=2),
            optimizer=OptimizerSection(
                name=self.optimizer, lr=3e-4 if self.optimizer == "adamw" else 0.1, weight_decay=0.1
            ),
            schedule=ScheduleSection(name="cosine", warmup_steps=3),
            train=TrainSection(steps=steps, seed=1, grad_clip=ACTIVE_CLIP, eval_every=steps, engine="reference"),
            precision=self.precision,
        )


@dataclass(frozen=True, kw_only=True)
class ContextCell:
    """One way to train the same steps."""

    strategy: str
    family: str = "llama"
    data: Data = "packed"
    exchange: CpExchange = "gather"
    """How its ranks get keys and values of others, with context parallelism."""
    steps: int = 4
    optimizer: OptimizerName = "sgd"
    precision: Precision = "fp32"
    is_tiled: bool = False
    """MLPs in tiles, and activations on the host."""

    def __str__(self) -> str:
        name = f"{self.strategy}-{self.exchange}:{self.family}-{self.data}-{self.optimizer}-{self.steps}"
        return f"{name}-tiled" if self.is_tiled else name

    @property
    def where(self) -> Strategy:
        """The parsed strategy."""
        return Strategy.parse(self.strategy)

    @property
    def ranks(self) -> int:
        return self.where.world_size(1)

    @property
    def mathematics(self) -> ContextMathematics:
        return ContextMathematics(
            family=self.family, data=self.data, optimizer=self.optimizer, precision=self.precision
        )

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks have replicas of a parameter."""
        where = self.where
        if where.tp > 1:
            return True
        if where.pp > 1 and where.cp == 1:
            return bool(tiny_config(self.family).tie_word_embeddings)
        return self.ranks > 1 and where.zero_stage != 3

    def recipe(self, text: Text, *, steps: int) -> Recipe:
        """Return the recipe of the cell."""
        plain = self.mathematics.recipe(text, steps=steps).changed({"train": {"engine": "deepspeed"}})
        changes: dict[str, dict[str, Any]] = {
            "parallel": {"cp_exchange": self.exchange if self.where.cp > 1 else "auto"}
        }
        if self.is_tiled:
            changes["parallel"] |= {"tiled_mlp": True, "offload_activations": True}
        if self.where.cp == 1:
            changes["model"] = {"attn_implementation": "blocks"}
        return self.where.apply(plain, self.ranks).changed(changes)


def context_cells() -> Iterator[ContextCell]:
    """Every strategy with every family and kind of data."""
    pairs = list(product(FAMILIES, DATA))
    for (turn, (strategy, exchanges)), (number, (family, data)) in product(enumerate(STRATEGIES), enumerate(pairs)):
        has_experts = "moe" in family
        if ("ep2" in strategy and not has_experts) or not keeps_apart(family, data):
            continue
        exchange = exchanges[(turn + number) % len(exchanges)]
        yield ContextCell(strategy=strategy, family=family, data=data, exchange=exchange, steps=LONG_STEPS)
    for strategy, data in product(TILED, DATA):
        yield ContextCell(strategy=strategy, data=data, exchange="gather", steps=LONG_STEPS, is_tiled=True)


def keeps_apart(family: str, data: Data) -> bool:
    """Whether one process of transformers can train it: its GPT-OSS passes no positions to its masks."""
    return not (family == "gpt_oss" and data == "documents")


def write_chats_of(text: Text) -> None:
    """Write the conversations of `text` and their tokenizer: before ranks are forked."""
    text.cache.mkdir(parents=True, exist_ok=True)
    write_chats(text.chats)
    write_tokenizer(text.chat_tokenizer)
