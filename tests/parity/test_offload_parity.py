"""Offload to NVMe trains what one plain PyTorch process trains. Offload to host memory is in the matrix."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from async_io import skip_without_async_io
from cell_runs import Baselines, CellRun
from engine_memory import in_files
from matrix import OPTIMIZERS, PRECISIONS, STEPS, Cell, Mathematics, Text
from typing_extensions import override

from toolkit.config.recipe import OptimizerName, Precision, Recipe
from toolkit.parity import ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory


class WideMathematics(Mathematics):
    """Of a model whose matrices are large enough for files: on each of two ranks a MiB, in 16 bits too."""

    @override
    def recipe(self, text: Text, *, steps: int) -> Recipe:
        recipe = super().recipe(text, steps=steps)
        return recipe.changed({"model": {"overrides": recipe.model.overrides | {"intermediate_size": 2**15}}})


@dataclass(frozen=True, kw_only=True)
class NvmeCell(Cell):
    """One way to train it."""

    @property
    @override
    def mathematics(self) -> Mathematics:
        return WideMathematics(**vars(super().mathematics))


def train_from_files(recipe: Recipe) -> ParityRun:
    """With the bytes of each kind that this rank has in files at the end."""
    return train_in_memory(recipe, lambda _: in_files(recipe.parallel.nvme_path, dist.get_rank()))


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("optimizer", "precision"), list(product(OPTIMIZERS, PRECISIONS)))
def test_states_and_weights_in_files_train_what_one_process_trains(
    optimizer: OptimizerName,
    precision: Precision,
    text: Text,
    baselines: Baselines,
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    skip_without_async_io()
    cell = NvmeCell(
        strategy="dp2-z3-nvme",
        family="llama",
        optimizer=optimizer,
        accumulation=4,
        clipped=optimizer == "adamw",
        tied=False,
        precision=precision,
    )
    run = CellRun(cell=cell, steps=STEPS)
    baselines.train([run])
    recipe = cell.recipe(text, steps=STEPS).changed({"parallel": {"nvme_path": str(tmp_path)}})
    trained = ranks(train_from_files, 2, recipe)[0]
    assert trained.inspected.keys() >= {"nvme parameters", "nvme masters"}
    assert ("nvme optimizer" in trained.inspected) == (optimizer == "adamw")
    outcome = baselines.of(run).compare(cell, trained)
    assert not outcome.failure, outcome.failure
