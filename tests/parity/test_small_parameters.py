"""Parameters with fewer elements than ranks: some ranks have nothing of them, and the layout changes nothing else.

Apertus has two parameters of one element in each MLP, which ZeRO cannot divide, and tensor-parallel ranks replicate.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_states import assert_same_bits, resumed_run, whole_run
from transformers import ApertusConfig

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.base import Engine
from toolkit.engines.factory import create_engine
from toolkit.engines.optimizer_states import MASTER
from toolkit.parallel.shard import shard_of
from toolkit.parity import ParityResult
from toolkit.parity.run.train_in_memory import train_in_memory

LAYOUTS = ("dp4-z0", "dp4-z1", "dp4-z2", "dp4-z3", "tp2-dp2-z1", "tp2-dp2-z3", "pp2-dp2-z1", "fsdp-dp4")
CELLS = [
    pytest.param(*cell, marks=[] if cell in {("tp2-dp2-z3", "adamw"), ("dp4-z3", "adafactor")} else pytest.mark.whole)
    for cell in product(LAYOUTS, ("adamw", "sgd", "lion", "muon", "adafactor"))
]
MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="module")
def recipe_of(make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Recipe]:
    folder = tmp_path_factory.mktemp("apertus")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 321}
    ApertusConfig(**shape, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder)

    def make(layout: str, optimizer: str) -> Recipe:
        settings = {"name": optimizer, "lr": 0.1 if optimizer == "sgd" else 3e-4, "weight_decay": 0.1}
        recipe = make_recipe(
            model={"name_or_path": str(Path(folder))},
            optimizer=settings | ({"momentum": 0.9} if optimizer == "sgd" else {}),
            train__steps=7,
            train__grad_clip=0.2,
        )
        return Strategy.parse(layout).apply(recipe, 1)

    return make


def with_padding(*arguments: Any, **options: Any) -> Engine:
    """An engine whose ranks find other values in the memory that ZeRO-3 pads with."""
    engine = create_engine(*arguments, **options)
    for parameter in engine.model.parameters():
        if hasattr(parameter, "ds_tensor"):
            _, length = engine.states.extent(parameter)
            parameter.ds_tensor.data[length:] = dist.get_rank()
    return engine


def wrong_fragments(engine: Engine) -> list[str]:
    """What a checkpoint would save of each state, where it is not what the whole tensor has there."""
    wrong = []
    for kind in (MASTER, *engine.states.kinds):
        whole = {name: value.clone() for name, value in engine.full_states(kind)}
        for name, parameter in engine.named_parameters():
            if name not in whole or kind in ("row_var", "col_var"):  # which have another shape than the parameter
                continue
            start, length = engine.states.extent(parameter, kind)
            if not length:
                continue
            full = whole[name] if engine.partition is None else shard_of(parameter).take(whole[name])
            if not torch.equal(engine.states.local(parameter, kind), full.reshape(-1)[start : start + length]):
                wrong.append(f"{kind} of {name}")
    return wrong


@pytest.mark.parametrize(("layout", "optimizer"), CELLS)
def test_they_train_what_one_process_trains(
    layout: str, optimizer: str, recipe_of: Callable[[str, str], Recipe], ranks: Callable[..., list[Any]]
) -> None:
    baseline = ranks(train_in_memory, 1, recipe_of("reference", optimizer))[0]
    assert any(value.size == 1 for value in baseline.initial.values())
    runs = ranks(_train, Strategy.parse(layout).world_size(1), recipe_of(layout, optimizer))
    result = ParityResult.of(runs[0], baseline)
    assert result.passed, str(result)
    assert not result.run.diverged_at_start
    assert [run.inspected for run in runs] == [[]] * len(runs)


def _train(recipe: Recipe) -> Any:
    return train_in_memory(recipe, wrong_fragments, engine_factory=with_padding)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("tp2-dp2-z3", "dp4-z1"),
        *(pytest.param(*pair, marks=pytest.mark.whole) for pair in product(LAYOUTS, LAYOUTS)),
    ],
)
def test_their_states_continue_in_another_layout(
    one: str, other: str, recipe_of: Callable[[str, str], Recipe], ranks: Callable[..., list[Any]]
) -> None:
    before, curve, _ = ranks(whole_run, Strategy.parse(one).world_size(1), recipe_of(one, "adamw"))[0]
    found, continued, _ = ranks(resumed_run, Strategy.parse(other).world_size(1), recipe_of(other, "adamw"), before)[0]
    assert_same_bits(found[0], before[0])
    for (loss, norm), (wanted_loss, wanted_norm) in zip(continued, curve, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
