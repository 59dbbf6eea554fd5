"""Compositions: a family, a model of odd sizes, up to a dozen options of a recipe, and three layouts, all at random.

A composition follows from its seed and its index alone. Options and layouts are drawn without regard to what goes
together. A share of the compositions stays as it was drawn; the others are drawn again until `dstk validate` accepts
them, so that most of the time goes to compositions that train.
"""

import json
import math
import random
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from odd_models import MODELS, Sizes, families, write_model

from toolkit.config import load_recipe
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.errors import LayoutError, ToolkitError
from toolkit.models.support import NO_EXPERTS, all_families
from toolkit.parity.run import compare_strategies as runner

ROOT = Path(__file__).parents[2]
BASE = "tests/fuzz/base.yaml"
FOLDER = "build/fuzz"
"""Relative to the repository, like every path in a command."""
LAYOUTS = 3
MOST_RANKS = 4
MOST_OPTIONS = 12
VOCABULARIES = (321, 331, 347)
_AS_DRAWN = 0.25
"""The share of compositions that stay as they are drawn, legal or not."""
_ATTEMPTS = 30


@dataclass(frozen=True, kw_only=True)
class Composition:
    """What is trained, and where."""

    family: str
    sizes: Sizes
    steps: int
    options: Mapping[str, Any]
    """Field of the recipe -> value."""
    layouts: tuple[str, ...]
    """Strategies of `dstk compare`."""

    @property
    def model(self) -> str:
        """The directory of its model."""
        return f"{MODELS}/{self.family}-{self.sizes.name}"

    @property
    def overrides(self) -> list[str]:
        """What it changes of the base recipe, as on the command line."""
        fields = {"model.name_or_path": self.model, **self.options}
        return [f"{field}={_in_yaml(value)}" for field, value in fields.items()]

    def overrides_for(self, layout: str) -> list[str]:
        """Its overrides beside a layout, which has the say about what it names, as in `dstk compare`."""
        left_out = ["parallel.cp="]
        if re.search(r"(^|-)m\d", layout) is not None:
            left_out.append("batch.micro_batch_size=")
        if not _shares_keys(layout):
            left_out.append("parallel.cp_exchange=")
        return [text for text in self.overrides if not text.startswith(tuple(left_out))]

    @property
    def command(self) -> str:
        """The command that compares its layouts with one process."""
        words = ["dstk", "compare", "--recipe", BASE, "--against", ",".join(self.layouts)]
        return shlex.join([*words, "--steps", str(self.steps), *self.overrides])

    def load(self) -> Recipe:
        """Its recipe. Raises RecipeError as `dstk validate` does."""
        return load_recipe(BASE, self.overrides)


def _in_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shares_keys(layout: str) -> bool:
    """Whether ranks exchange keys and values."""
    try:
        return Strategy.parse(layout).cp > 1
    except LayoutError:
        return False


def draw(seed: int, index: int) -> Composition | None:
    """The composition with this index. None where transformers itself cannot run its family on input_ids.

    Writes its model below build/fuzz, and is called in the root of the repository.
    """
    chance = random.Random(f"{seed}/{index}")
    family = family_at(seed, index)
    sizes = _sizes(chance)
    if write_model(family, sizes) is None:
        return None
    blank = Composition(family=family, sizes=sizes, steps=chance.choice((3, 3, 3, 4)), options={}, layouts=())
    is_as_drawn = chance.random() < _AS_DRAWN
    composition = replace(blank, options=draw_options(chance, family))
    for _ in range(_ATTEMPTS):
        if is_as_drawn or _is_accepted(composition):
            break
        composition = replace(blank, options=draw_options(chance, family))
    layouts: list[str] = []
    for _ in range(LAYOUTS):
        for _ in range(_ATTEMPTS):
            layout = draw_layout(chance, composition)
            if is_as_drawn or (layout not in layouts and accepts_layout(composition, layout)):
                break
        layouts.append(layout)
    return replace(composition, layouts=tuple(dict.fromkeys(layouts)))


def accepts_layout(composition: Composition, layout: str) -> bool:
    """Whether the rules of recipes accept a layout, and what is checked of its model before ranks start."""
    try:
        strategy = Strategy.parse(layout)
        load_recipe(BASE, composition.overrides_for(layout), world_size=strategy.world_size(1), layout=layout)
        recipe = composition.load()
        (run,) = runner.plan(recipe, [strategy], 1)
    except ToolkitError:
        return False
    has_other_size = run.recipe.batch.micro_batch_size != recipe.batch.micro_batch_size
    return not (has_other_size and _depends_on_micro_batches(composition))


def _is_accepted(composition: Composition) -> bool:
    try:
        runner.plan(composition.load(), [Strategy.parse("dp1-z1")], 1)
    except ToolkitError:
        return False
    return True


def family_at(seed: int, index: int) -> str:
    """Families by turns, in an order of the seed: more often those that can be sharded, and most of all mixtures."""
    deck = [name for name in families() for _ in range(_weight(name))]
    rounds, place = divmod(index, len(deck))
    random.Random(f"{seed}/families/{rounds}").shuffle(deck)
    return deck[place]


def _weight(family: str) -> int:
    support = all_families()[family]
    return 1 + support.supports("tensor") + (support.ep_refusal != NO_EXPERTS)


def _sizes(chance: random.Random) -> Sizes:
    heads = chance.choice((None, 6))
    return Sizes(
        layers=chance.choice((None, 3, 5)),
        heads=heads,
        kv_heads=None if heads is None else chance.choice((2, 2, 2, 3)),
        vocabulary=chance.choice(VOCABULARIES),
        tied=chance.choice((None, True, False)),
    )


_SCHEDULES = (
    *("constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial"),
    *("inverse_sqrt", "warmup_stable_decay"),
)
_RATES = {"adamw": 1e-3, "adam": 1e-3, "sgd": 0.1, "lion": 3e-4, "muon": 3e-3, "adafactor": 1e-3, "adamw8bit": 1e-3}
_TOKENIZER = {"data.tokenizer": f"{FOLDER}/tokenizer"}
_CHATS = _TOKENIZER | {"data.source": f"{FOLDER}/chats.jsonl", "data.format": "chat"}
_PAIRED = ("dpo", "ipo", "hinge", "robust", "orpo", "simpo", "cpo")
_UNPAIRED = ("kto", "bco")
_WITH_REFERENCE = ("dpo", "ipo", "hinge", "robust", "kto", "bco")


def _optimizer(chance: random.Random) -> dict[str, Any]:
    name = chance.choices((*_RATES,), weights=(6, 4, 6, 5, 5, 5, 1))[0]
    options: dict[str, Any] = {"optimizer.name": name, "optimizer.lr": _RATES[name]}
    if name in ("sgd", "muon") and chance.random() < 0.7:
        options["optimizer.momentum"] = 0.9
    if name in ("adamw", "adam", "lion") and chance.random() < 0.4:
        options["optimizer.betas"] = [0.9, 0.95]
    if name == "muon" and chance.random() < 0.5:
        options["optimizer.adjust_lr"] = "original"
    if name == "muon" and chance.random() < 0.5:
        options["optimizer.adamw_lr"] = 1e-3
    return options


def _schedule(chance: random.Random) -> dict[str, Any]:
    name = chance.choice(_SCHEDULES)
    options: dict[str, Any] = {"schedule.name": name, "schedule.warmup_steps": chance.choice((0, 1, 2))}
    if name in ("cosine_with_min_lr", "polynomial", "warmup_stable_decay"):
        options["schedule.min_lr_ratio"] = 0.1
    return options


def _batch(chance: random.Random) -> dict[str, Any]:
    size, micro = chance.choice(((4, 1), (4, 2), (6, 1), (6, 3), (8, 2), (8, 4), (12, 3)))
    return {"batch.global_batch_size": size, "batch.micro_batch_size": micro}


def _lora(chance: random.Random) -> dict[str, Any]:
    lora: dict[str, Any] = {"r": chance.choice((1, 3, 4)), "alpha": chance.choice((4, 8))}
    if chance.random() < 0.6:
        lora["targets"] = ["all-linear"]
    if chance.random() < 0.3:
        lora["rslora"] = True
    if chance.random() < 0.3:
        lora["dora"] = True
    return {"model.lora": lora}


def _router_loss(chance: random.Random) -> dict[str, Any]:
    scope = chance.choice(("micro_batch", "sequence", "global"))
    return {"model.router_aux_loss": {"coefficient": 0.05, "scope": scope}}


def _preference(chance: random.Random) -> dict[str, Any]:
    """An objective with the rows that it takes."""
    name = chance.choice(_PAIRED + _UNPAIRED)
    row_format = "unpaired" if name in _UNPAIRED else "preference"
    objective: dict[str, Any] = {"name": name, "beta": chance.choice((0.1, 0.5))}
    if name == "robust" or (name == "dpo" and chance.random() < 0.3):
        objective["label_smoothing"] = 0.1
    if name in _WITH_REFERENCE and chance.random() < 0.3:
        objective["reference"] = "online"
    options: dict[str, Any] = _TOKENIZER | {"data.source": f"{FOLDER}/{row_format}.jsonl", "data.format": row_format}
    if chance.random() < 0.2:
        options["data.weight_field"] = "score"
    # Most samples hold several pairs, and some pairs are cut off.
    return options | {"train.objective": objective, "data.seq_len": chance.choice((32, 48, 64))}


def _distillation(chance: random.Random) -> dict[str, Any]:
    teacher = f"{FOLDER}/teacher-v{chance.choice(VOCABULARIES)}"
    distill: dict[str, Any] = {"teacher": teacher, "top_k": chance.choice((4, 64)), "weight": chance.choice((0.5, 1.0))}
    if chance.random() < 0.4:
        distill["divergence"] = "reverse"
    if chance.random() < 0.4:
        distill["temperature"] = 2.0
    return {"train.distill": distill}


def _mixture(chance: random.Random) -> dict[str, Any]:
    share = chance.choice((1, 3))
    sources = [{"path": f"{FOLDER}/documents.jsonl", "weight": share}, {"path": f"{FOLDER}/words.jsonl", "weight": 2}]
    return {"data.sources": sources}


def _one_of(field: str, *values: Any) -> Callable[[random.Random], dict[str, Any]]:
    return lambda chance: {field: chance.choice(values)}


Option = Callable[[random.Random], dict[str, Any]]
_OPTIONS: tuple[tuple[float, Option], ...] = (
    (0.85, _optimizer),
    (0.5, _schedule),
    (0.5, _batch),
    (0.6, _one_of("train.grad_clip", 0.0, 0.05, 0.3)),
    (0.5, _one_of("optimizer.weight_decay", 0.1, 0.01)),
    (0.4, _one_of("data.packing", "padded")),
    (0.2, _one_of("data.document_masking", True)),
    (0.2, lambda chance: dict(_CHATS)),
    (0.1, _one_of("data.train_on", "last_assistant", "each_assistant", "all")),
    (0.25, _one_of("data.seq_len", 16, 24, 27)),
    (0.2, _one_of("precision", "bf16")),
    (0.01, _one_of("precision", "fp16")),
    (0.2, _lora),
    (0.1, _one_of("model.freeze", ["*embed*"], ["*mlp*"], ["*norm*"], ["*.1.*"])),
    (0.06, _one_of("model.train_only", ["*mlp*"], ["*attn*"], ["*.0.*", "*head*"])),
    (0.3, _one_of("model.loss", "chunked", "plain")),
    (0.25, _one_of("model.attn_implementation", "eager", "sdpa", "blocks")),
    (0.02, _one_of("model.float8", "rowwise", "tensorwise")),
    (0.01, _one_of("model.load_in_4bit", True)),
    (0.02, _one_of("model.kernels", "liger")),
    (0.3, _one_of("train.seed", 1, 2, 3)),
    (0.15, _preference),
    (0.08, _distillation),
    (0.06, _mixture),
    (0.06, lambda chance: {"data.source": f"{FOLDER}/words.jsonl", "data.weight_field": "score"}),
    # Layouts without ranks that share a sequence take no notice of it.
    (0.3, lambda chance: {"parallel.cp": 2, "parallel.cp_exchange": chance.choice(("gather", "ring"))}),
)
"""The probability of an option, and what it sets."""
_EXPERT_OPTIONS: tuple[Option, ...] = (
    _router_loss,
    _one_of("model.router_z_loss", 0.01),
    _one_of("model.router_bias_update", 0.01),
    _one_of("model.expert_capacity_factor", 0.75, 1.0, 1.5),
)


def draw_options(chance: random.Random, family: str) -> dict[str, Any]:
    """Options at random, of at most MOST_OPTIONS kinds."""
    has_experts = all_families()[family].ep_refusal != NO_EXPERTS
    drawn = [option for probability, option in _OPTIONS if chance.random() < probability]
    drawn += [option for option in _EXPERT_OPTIONS if chance.random() < (0.4 if has_experts else 0.01)]
    chance.shuffle(drawn)
    options: dict[str, Any] = {}
    for option in drawn[:MOST_OPTIONS]:
        options |= option(chance)
    return options


_SIZES_OF_AXES = tuple(
    (dp, cp, tp, pp, ulysses)
    for dp in (1, 2, 3, 4)
    for cp in (1, 2, 3, 4)
    for tp in (1, 2, 3, 4)
    for pp in (1, 2, 3, 4)
    for ulysses in (1, 2, 3)
    if dp * cp * tp * pp * ulysses <= MOST_RANKS
)


@cache
def _weights_of_axes() -> Sequence[float]:
    """Fewer of three ranks, and of a single rank."""
    return [{1: 0.5, 2: 1.0, 3: 0.4, 4: 1.0}[math.prod(sizes)] for sizes in _SIZES_OF_AXES]


def draw_layout(chance: random.Random, composition: Composition) -> str:
    """A layout on at most MOST_RANKS ranks, with flags."""
    dp, cp, tp, pp, ulysses = chance.choices(_SIZES_OF_AXES, weights=_weights_of_axes())[0]
    if cp * tp * pp * ulysses == 1 and chance.random() < 0.12:
        return "-".join([chance.choice(("ddp", "fsdp")), f"dp{dp}", *_recomputing(chance, 0.3)])
    stage = chance.choices((0, 1, 2, 3), weights=(2, 3, 0.3, 0.3) if pp > 1 else (1, 1.5, 2, 3))[0]
    parts = [f"dp{dp}"]
    if _has_experts(composition) and dp * cp > 1 and chance.random() < 0.5:
        parts.append(f"ep{chance.choice([size for size in (2, 3, 4) if dp * cp % size == 0])}")
    # Beside cp, also of size 1, ranks that exchange heads take the attention in blocks and go with every axis.
    is_with_heads = ulysses > 1 and (cp > 1 or tp * pp > 1 or chance.random() < 0.5)
    parts += [f"{name}{size}" for name, size in (("tp", tp), ("u", ulysses)) if size > 1]
    if cp > 1 or is_with_heads:
        parts.append(f"cp{cp}")
    if pp > 1:
        parts += _pipeline(chance, pp)
    parts.append(f"z{stage}")
    if chance.random() < (0.4 if tp > 1 else 0.01):
        parts.append("sp")
    if _has_experts(composition) and tp > 1 and chance.random() < 0.3:
        parts.append("inner")
    if chance.random() < 0.2:
        parts.append("offload")
    if chance.random() < 0.12:
        parts.append("offacts")
    if chance.random() < 0.15:
        parts.append("tiled")
    if stage == 3 and dp == 4 and chance.random() < 0.3:
        parts.append("hpz2")
    if not _depends_on_micro_batches(composition) and chance.random() < 0.25:
        parts.append(f"m{chance.choice((1, 2, 3, 4))}")
    return "-".join([*parts, *_recomputing(chance, 0.4)])


def _pipeline(chance: random.Random, stages: int) -> Iterator[str]:
    """The parts for this many stages, with any schedule."""
    schedule = chance.choice(("", "", "1f1b", "gpipe", "interleaved", "zbh1", "zbh1w2", "zbv"))
    if schedule == "interleaved":
        yield f"pp{stages}x{chance.choice((2, 3))}"
        return
    yield f"pp{stages}"
    if schedule:
        yield schedule


def _recomputing(chance: random.Random, probability: float) -> Iterator[str]:
    if chance.random() < probability:
        yield chance.choice(("recompute", "selective", "every2", "every3"))


def _has_experts(composition: Composition) -> bool:
    return all_families()[composition.family].ep_refusal != NO_EXPERTS


def _depends_on_micro_batches(composition: Composition) -> bool:
    """Whether what is computed depends on which samples are in a micro-batch, as the fields' descriptions say."""
    options = composition.options
    return any(f"model.{name}" in options for name in ("router_aux_loss", "router_z_loss", "expert_capacity_factor"))
