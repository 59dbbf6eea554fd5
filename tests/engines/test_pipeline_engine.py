"""What a pipeline must do besides training right: stop before a NaN reaches weights, and read data at its ends only."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nonempty import nonempty

from toolkit.config.recipe import Recipe
from toolkit.data.samples.samples import Samples
from toolkit.engines.base import Engine
from toolkit.engines.factory import create_engine
from toolkit.errors import NonFiniteError
from toolkit.parity.run.train_in_memory import train_in_memory

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=["pp2", "tp2", "tp2-pp2"])
def test_a_loss_that_is_not_finite_ends_the_run_and_changes_no_weight(
    make_recipe: Make, ranks: Ranks, parallel: dict[str, int], stage: int
) -> None:
    recipe = make_recipe(
        optimizer={"name": "sgd", "lr": 1e30}, parallel=parallel | {"zero_stage": stage}, train__grad_clip=0.0
    )
    for message, is_unchanged in nonempty(ranks(_until_it_fails, 2 * len(parallel), recipe)):
        assert re.search(r"the loss is|the gradient norm is", message)
        assert is_unchanged


def _until_it_fails(recipe: Recipe) -> tuple[str, bool]:
    """What the failing step says, and whether this rank's weights are those of the step before."""
    held: dict[str, Any] = {}

    def weights() -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in held["engine"].model.named_parameters()}

    def watched(*arguments: Any, **options: Any) -> Engine:
        engine = held["engine"] = create_engine(*arguments, **options)
        step = engine.train_step

        def remembered(*batches: Any, **numbers: Any) -> Any:
            held["before"] = weights()
            return step(*batches, **numbers)

        engine.train_step = remembered  # type: ignore[method-assign]
        return engine

    with pytest.raises(NonFiniteError) as error:
        train_in_memory(recipe, engine_factory=watched)
    after = weights()
    return str(error.value), all(torch.equal(after[name], value) for name, value in held["before"].items())


def _reads(recipe: Recipe) -> int:
    read = 0
    batch = Samples.batch

    def counted(self: Samples, *arguments: Any, **seed: int) -> Any:
        nonlocal read
        read += 1
        return batch(self, *arguments, **seed)

    Samples.batch = counted  # type: ignore[method-assign]
    train_in_memory(recipe)
    return read


def test_only_the_first_and_the_last_stage_read_samples(make_recipe: Make, ranks: Ranks) -> None:
    recipe = make_recipe(parallel={"pp": 4, "zero_stage": 1}, overrides__n_layer=4, train__steps=2, train__eval_every=2)
    first, second, third, last = ranks(_reads, 4, recipe)
    assert first == last > 0
    assert second == third == 0


def _sizes(engine: Engine) -> tuple[int, int]:
    return engine.parameter_count(), sum(parameter.numel() for parameter in engine.model.parameters())


def test_a_rank_holds_its_stage_only(make_recipe: Make, ranks: Ranks) -> None:
    recipe = make_recipe(parallel={"pp": 4}, overrides__n_layer=4, train__steps=1, overrides__tie_word_embeddings=False)
    sizes = [run.inspected for run in ranks(train_in_memory, 4, recipe, _sizes)]
    whole = sizes[0][0]
    assert sum(held for _, held in sizes) == whole
    assert max(held for _, held in sizes) < whole / 2


def _meta_count(engine: Engine) -> int:
    return sum(parameter.is_meta or parameter.device.type != "cpu" for parameter in engine.model.parameters())


def test_nothing_stays_on_the_meta_device(make_recipe: Make, ranks: Ranks) -> None:
    recipe = make_recipe(parallel={"tp": 2, "pp": 2}, train__steps=1)
    assert [run.inspected for run in ranks(train_in_memory, 4, recipe, _meta_count)] == [0] * 4


@pytest.mark.parametrize("stages", [2, 4])
def test_fewer_micro_batches_than_stages_train_too(make_recipe: Make, ranks: Ranks, stages: int) -> None:
    changes = {"batch__micro_batch_size": 16, "train__steps": 2, "overrides__n_layer": 4}
    alone = ranks(train_in_memory, 1, make_recipe(**changes, train__engine="reference"))[0]
    split = ranks(train_in_memory, stages, make_recipe(**changes, parallel={"pp": stages}))[0]
    assert torch.allclose(torch.tensor(split.curve.losses), torch.tensor(alone.curve.losses), rtol=1e-6)
