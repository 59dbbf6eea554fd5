"""Engines: from steps whose seconds follow from known constants, exactly these constants."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from toolkit.calibrate import engines
from toolkit.calibrate.engines import EngineRun
from toolkit.hardware import CoreRates, gpu
from toolkit.planner.cluster import Cluster

CORE = CoreRates(
    products={"fp32": ((64, 64, 64, 5e9), (256, 256, 256, 2e10))},
    attention={"fp32": (4e9, 3e9)},
    layer_bytes_per_second=(6e9, 4e9),
    layer_seconds=(1.5e-4, 2.5e-4),
    loss_bytes_per_second=(3e9, 2e9),
)
UNKNOWN = {
    "step_overhead_seconds": 0.0,
    "micro_batch_overhead_seconds": 0.0,
    "send_seconds": 0.0,
    "sharded_seconds": 0.0,
}


def machine(*, memory_bytes_per_second: float = 8e9, **constants: float) -> Callable[[int], Cluster]:
    """Clusters of ranks of one machine, whose kernels take no time to start and whose cores are as many as ranks."""
    rank = replace(gpu("a100-80gb"), core=CORE, kernel_seconds=0.0, memory_bytes_per_second=memory_bytes_per_second)

    def cluster(ranks: int) -> Cluster:
        return replace(Cluster.of(rank, gpus_per_node=ranks), cores=ranks, slowdown=1.0, **(UNKNOWN | constants))

    return cluster


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let every run take what the time model gives a machine with these constants."""

    def plant(**constants: float) -> None:
        cluster = machine(**constants)

        def take(run: EngineRun) -> tuple[float, float]:
            step = run.predicted(cluster)
            return step.seconds, step.optimizer

        monkeypatch.setattr(EngineRun, "measured", take)

    return plant


class TestOneRank:
    def test_constants_are_those_by_which_the_time_model_explains_the_steps(
        self, measured: Callable[..., None]
    ) -> None:
        measured(step_overhead_seconds=3e-3, micro_batch_overhead_seconds=2e-3)
        found = engines.one_rank(machine())
        assert found["micro_batch_overhead_seconds"] == pytest.approx(2e-3)
        assert found["step_overhead_seconds"] == pytest.approx(3e-3)

    @pytest.mark.parametrize("assumed", [2e9, 3e10])
    def test_the_updates_rate_does_not_depend_on_what_was_assumed(
        self, measured: Callable[..., None], assumed: float
    ) -> None:
        measured(step_overhead_seconds=3e-3)
        at_assumed = engines.one_rank(machine(memory_bytes_per_second=assumed))["memory_bytes_per_second"]
        assert at_assumed == pytest.approx(engines.MEMORY_SHARE * 8e9)

    def test_a_step_that_was_quicker_than_predicted_has_no_negative_share(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(EngineRun, "measured", lambda run: (1e-6, 1e-7))
        found = engines.one_rank(machine())
        assert found["micro_batch_overhead_seconds"] == found["step_overhead_seconds"] == 0.0
        assert 0 < found["memory_bytes_per_second"] < float("inf")


class TestTwoRanks:
    def test_a_send_is_what_the_time_model_does_not_explain_of_a_pipeline(self, measured: Callable[..., None]) -> None:
        measured(send_seconds=4e-4)
        assert engines.two_ranks(machine()) == pytest.approx({"send_seconds": 4e-4, "sharded_seconds": 0.0}, abs=1e-9)

    def test_a_hook_is_what_it_does_not_explain_of_zero_3(self, measured: Callable[..., None]) -> None:
        measured(sharded_seconds=7e-4)
        assert engines.two_ranks(machine()) == pytest.approx({"send_seconds": 0.0, "sharded_seconds": 7e-4}, abs=1e-9)

    def test_runs_that_were_quicker_than_predicted_have_no_negative_share(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(EngineRun, "measured", lambda run: (1e-6, 1e-7))
        assert engines.two_ranks(machine()) == {"send_seconds": 0.0, "sharded_seconds": 0.0}


@pytest.mark.parametrize(
    ("layout", "ranks", "global_batch_size"), [("dp1-z1", 1, 5), ("dp2-z3", 2, 10), ("pp2-z1", 2, 5)]
)
def test_a_run_has_its_micro_batches_on_every_rank(layout: str, ranks: int, global_batch_size: int) -> None:
    job = EngineRun(layout=layout, micro_batches=5).job
    assert job.layout.world_size == ranks
    assert job.batch.global_batch_size == global_batch_size
    assert job.batch.accumulation == 5


def test_a_measurement_is_the_slowest_ranks_step_and_the_first_ones_update(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds: list[int] = []

    def run_ranks(function: object, world_size: int, *, timeout_seconds: float) -> list[tuple[float, float]]:
        worlds.append(world_size)
        return [(2.0, 0.5), (3.0, 0.25)]

    monkeypatch.setattr(engines, "run_ranks", run_ranks)
    assert EngineRun(layout="dp2-z3", micro_batches=2).measured() == (3.0, 0.5)
    assert worlds == [2]
