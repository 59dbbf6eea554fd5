"""Mixtures of experts train what one plain PyTorch process trains, wherever their experts are."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cell_runs import CORES, Baselines, CellRun, Outcome, run_cells
from daily import daily
from matrix import LONG_STEPS, OPTIMIZERS, STEPS, Cell, Text
from mixtures import MIXTURES, MixtureCell
from transformers.integrations.moe import ExpertsInterface
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from toolkit.config.recipe import OptimizerName, Precision
from toolkit.parallel.experts import dispatch, sharding
from toolkit.parallel.shard import mark

DAILY = (
    *("dp4-ep2-z1", "dp4-ep2-z3", "dp4-ep4-z2", "pp2-dp2-ep2-z1"),
    *("tp2-z1-inner", "tp2-dp2-ep2-z3", "tp2-dp2-ep2-z2-sp"),
)
LAYOUTS = (
    *DAILY,
    *("dp4-ep2-z0", "dp4-ep2-z2", "tp2-dp2-ep2-z1", "tp2-pp2-dp2-ep2-z1", "tp2-z3-inner-sp"),
    *("dp2-ep2-z1-recompute", "dp2-ep2-z2-offload"),
)


def cell_of(
    strategy: str,
    family: str = "mixtral",
    optimizer: OptimizerName = "sgd",
    precision: Precision = "fp32",
    steps: int = STEPS,
) -> MixtureCell:
    fixed: dict[str, Any] = {"accumulation": 2, "clipped": True, "tied": False}
    return MixtureCell(strategy=strategy, family=family, optimizer=optimizer, precision=precision, steps=steps, **fixed)


def _cells() -> list[MixtureCell]:
    """Each family in a layout of its own, with SGD, whose updates show a factor that Adam hides, one with Adam: daily.
    Then all, for more steps.
    """
    few = [
        cell_of(layout, family, "sgd" if i else "adamw")
        for i, (layout, family) in enumerate(zip(DAILY, MIXTURES, strict=True))
    ]
    every = [cell_of(*options, steps=LONG_STEPS) for options in product(LAYOUTS, MIXTURES, OPTIMIZERS)]
    return few + every + [cell_of(layout, precision="bf16") for layout in LAYOUTS]


@pytest.mark.timeout(7200)  # the first test trains the cells of all
@pytest.mark.parametrize("cell", daily(_cells(), lambda number, cell: number < len(DAILY)), ids=str)
def test_a_mixture_trains_what_one_process_trains(cell: MixtureCell, outcomes: dict[Cell, Outcome]) -> None:
    assert not outcomes[cell].failure, outcomes[cell].failure


def test_a_rank_whose_experts_get_no_tokens(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token goes to the first two experts of eight, of which the second of two ranks has none.

    Experts run one by one, as those without tokens then do not run at all.
    """
    own = MixtralTopKRouter.forward

    def first_two(router: Any, hidden: torch.Tensor) -> Any:
        logits, _, index = own(router, hidden)
        return logits, torch.softmax(logits[:, :2].float(), dim=-1), torch.arange(2).expand_as(index)

    monkeypatch.setattr(MixtralTopKRouter, "forward", first_two)
    monkeypatch.setattr(ExpertsInterface, "get_interface", lambda interface, name, eager: eager)
    run = CellRun(cell=cell_of("dp2-ep2-z1-recompute"), steps=STEPS)
    ((_, outcome, _),) = run_cells([run], text, Baselines(text, cores=CORES), cores=CORES)
    assert not outcome.failure, outcome.failure


@pytest.mark.whole
class TestPlantedFaults:
    """Each is found by what it spoils, where a loss alone would hardly show it."""

    @pytest.fixture
    def failed_checks(self, text: Text, baselines: Baselines) -> Callable[[str], tuple[str, ...]]:
        def train(strategy: str) -> tuple[str, ...]:
            run = CellRun(cell=cell_of(strategy), steps=STEPS)
            ((_, outcome, _),) = run_cells([run], text, baselines, cores=CORES)
            return outcome.failed_checks

        return train

    @pytest.fixture(autouse=True)
    def trained(self, baselines: Baselines) -> None:
        baselines.train([CellRun(cell=cell_of("dp2-z1"), steps=STEPS)])

    @pytest.mark.parametrize("strategy", ["tp2-dp2-ep2-z1", "tp2-z1-inner"])
    def test_the_gradient_of_router_weights_of_one_rank(
        self, strategy: str, failed_checks: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dispatch, "c", SimpleNamespace(copy_to_tensor_ranks=lambda x, group: x))
        assert {"gradient", "norm", "replicas"} <= {*failed_checks(strategy)}

    def test_experts_that_are_not_marked_as_shards(self, failed_checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def unmarked(parameter: Any, shard: Any) -> Any:
            parameter = mark(parameter, shard)
            parameter.tensor_model_parallel = parameter.model_parallel = False
            return parameter

        monkeypatch.setattr(sharding, "mark", unmarked)
        assert {"norm", "parameters"} <= {*failed_checks("tp2-dp2-ep2-z1")}

    @pytest.mark.parametrize("strategy", ["dp4-ep2-z0", "dp4-ep2-z1", "dp4-ep2-z3"])
    def test_experts_that_are_averaged_over_all_replicas(
        self, strategy: str, failed_checks: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sharding.ExpertSharder, "_group", lambda *_: None)
        assert {"gradient", "norm", "parameters"} <= {*failed_checks(strategy)}
