"""What `dstk calibrate` makes of its measurements: with made-up rates and ranks, every figure of its file is known."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused

from toolkit.calibrate import measure
from toolkit.calibrate.layers import Layer
from toolkit.calibrate.measure import Effort, calibrate
from toolkit.cli.main import main
from toolkit.errors import RunError
from toolkit.hardware import gpu
from toolkit.planner.calibration.file import Calibration, calibration_path, current_versions
from toolkit.planner.kernels import MEMORY_SHARE

RATES = {
    "layer_bytes_per_second": (6e9, 4e9),
    "layer_seconds": (1.5e-4, 2.5e-4),
    "loss_bytes_per_second": (3e9, 2e9),
}
LINKS = {"link_latency_seconds": 3e-5, "link_bytes_per_second": 2e9, "collective_seconds": 4e-5}
ONE_RANK = {"micro_batch_overhead_seconds": 1e-3, "step_overhead_seconds": 2e-3, "memory_bytes_per_second": 5e9}
TWO_RANKS = {"send_seconds": 6e-4, "sharded_seconds": 7e-4}


class MadeUpLayer(Layer):
    """A layer whose rates are RATES."""

    def rates(self, gpu: Any, seconds: float) -> dict[str, tuple[float, float]]:
        return RATES


EFFORT = Effort(products=((32, 64, 64),), layer=MadeUpLayer())


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plant the measurements of a CPU. `slow`: seconds of the ranks beside each other, one for each core."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(measure.kernels, "product_rates", lambda *arguments: [(32, 64, 64, 7e9)])
    monkeypatch.setattr(measure.kernels, "attention_rates", lambda *arguments: (3e9, 2e9))
    monkeypatch.setattr(measure.kernels, "memory_rate", lambda *arguments: 9e9)
    monkeypatch.setattr(measure.kernels, "kernel_seconds", lambda *arguments: 2e-6)
    monkeypatch.setattr(measure, "preload", lambda name: None)
    monkeypatch.setattr(measure, "layer_times", lambda *arguments: 2.0)
    monkeypatch.setattr(measure.engines, "one_rank", lambda cluster: dict(ONE_RANK))
    monkeypatch.setattr(measure.engines, "two_ranks", lambda cluster: dict(TWO_RANKS))
    monkeypatch.setattr(measure.OtherLoad, "cores", 0.75)

    def plant(slow: tuple[float, ...] = (3.0, 4.0)) -> None:
        monkeypatch.setattr(measure.os, "sched_getaffinity", lambda process: set(range(len(slow))))

        def run_ranks(function: Any, world_size: int) -> list[Any]:
            if function.func is measure.measure_links:
                return [dict(LINKS)] * world_size
            assert function.func is measure.measure_alongside
            assert world_size == len(slow)
            return list(slow)

        monkeypatch.setattr(measure, "run_ranks", run_ranks)

    plant()
    return plant


class TestCpu:
    def test_a_rank_has_the_measured_rates(self, cpu: Callable[..., None]) -> None:
        core = calibrate(EFFORT).core
        assert core is not None
        assert core.products == dict.fromkeys(("fp32", "bf16"), ((32, 64, 64, 7e9),))
        assert core.attention == dict.fromkeys(("fp32", "bf16"), (3e9, 2e9))
        assert {name: getattr(core, name) for name in RATES} == RATES

    def test_the_cluster_has_what_ranks_measured(self, cpu: Callable[..., None]) -> None:
        cluster = calibrate(EFFORT).cluster
        fixed = {name: seconds for name, seconds in ONE_RANK.items() if name != "memory_bytes_per_second"}
        for name, measured in (LINKS | fixed | TWO_RANKS).items():
            assert cluster[name] == measured, name
        assert "memory_bytes_per_second" not in cluster

    def test_memory_is_as_fast_as_an_update_reads_it_of_which_kernels_reach_a_share(
        self, cpu: Callable[..., None]
    ) -> None:
        assert calibrate(EFFORT).memory_bytes_per_second == pytest.approx(5e9 / MEMORY_SHARE)

    def test_without_ranks_it_is_as_fast_as_a_kernel_reads_it(self, cpu: Callable[..., None]) -> None:
        found = calibrate(replace(EFFORT, ranks=False))
        assert found.memory_bytes_per_second == pytest.approx(9e9 / MEMORY_SHARE)
        assert "slowdown" not in found.cluster

    def test_the_engines_are_told_what_was_measured_before(
        self, cpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Any] = []

        def two_ranks(cluster: Callable[[int], Any]) -> dict[str, float]:
            seen.append(cluster(2))
            return dict(TWO_RANKS)

        monkeypatch.setattr(measure.engines, "two_ranks", two_ranks)
        calibrate(EFFORT)
        assert seen[0].link_latency_seconds == LINKS["link_latency_seconds"]
        assert seen[0].step_overhead_seconds == ONE_RANK["step_overhead_seconds"]
        assert seen[0].slowdown == 3.5 / 2.0

    @pytest.mark.parametrize(("slow", "slowdown"), [((3.0, 4.0), 1.75), ((1.0, 1.5), 1.0)])
    def test_the_slowdown_is_the_mean_over_the_cores_and_never_a_gain(
        self, cpu: Callable[..., None], slow: tuple[float, ...], slowdown: float
    ) -> None:
        cpu(slow)
        assert calibrate(EFFORT).cluster["slowdown"] == slowdown

    def test_a_single_core_has_no_neighbor(self, cpu: Callable[..., None]) -> None:
        cpu((3.0,))
        assert "slowdown" not in calibrate(EFFORT).cluster

    def test_ranks_of_several_threads_are_fewer(
        self, cpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cpu((3.0, 3.0, 3.0, 3.0))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert calibrate(replace(EFFORT, ranks=False)).cluster["cores"] == 2

    def test_the_load_of_other_programs_is_written_down(self, cpu: Callable[..., None]) -> None:
        assert calibrate(EFFORT).others == 0.75


class TestGpu:
    @pytest.fixture(autouse=True)
    def on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure, "local_device", lambda: torch.device("cuda"))

    def measured(self, monkeypatch: pytest.MonkeyPatch, name: str) -> Calibration:
        rates = {
            "best": 2e14,
            "memory_bytes_per_second": 1.5e12,
            "kernel_seconds": 4e-6,
            "cluster": {"host_bytes_per_second": 2.5e10},
        }
        monkeypatch.setattr(measure, "run_ranks", lambda function, world_size: [(name, rates)])
        return calibrate(EFFORT)

    def test_products_are_a_share_of_the_data_sheets_peak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.measured(monkeypatch, "NVIDIA A100-SXM4-80GB")
        peak = gpu("a100-80gb").bf16_flops
        assert peak is not None
        assert found.matmul_fraction == {"bf16": pytest.approx(2e14 / peak)}
        assert found.gpu == gpu("a100-80gb").name
        assert found.hardware == "NVIDIA A100-SXM4-80GB"
        assert found.cluster == {"host_bytes_per_second": 2.5e10}
        assert found.core is None

    def test_a_gpu_that_is_not_in_the_catalogue_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with refused(RunError, "gpu", remedy="add its row to toolkit/gpus.json"):
            self.measured(monkeypatch, "Quantum Abacus 9000")

    def test_its_rank_takes_the_best_product_and_the_share_of_memory_that_kernels_reach(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = [(2048, 4096, 4096, 1e14), (4096, 8192, 4096, 3e14), (8192, 4096, 4096, 2e14)]
        monkeypatch.setattr(measure.kernels, "product_rates", lambda *arguments: rows)
        monkeypatch.setattr(measure.kernels, "memory_rate", lambda *arguments: 9e11)
        monkeypatch.setattr(measure.kernels, "kernel_seconds", lambda *arguments: 3e-6)
        monkeypatch.setattr(measure.kernels, "host_rate", lambda *arguments: 2e10)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a name")
        name, rates = measure._gpu_rates(EFFORT)
        assert name == "a name"
        assert rates["best"] == 3e14
        assert rates["memory_bytes_per_second"] == pytest.approx(9e11 / MEMORY_SHARE)
        assert rates["kernel_seconds"] == 3e-6
        assert rates["cluster"] == {"host_bytes_per_second": 2e10}


class TestCommand:
    @pytest.fixture(autouse=True)
    def planted(self, cpu: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DSTK_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(measure, "FULL", EFFORT)

    def run(self, *arguments: str) -> int:
        with pytest.raises(SystemExit) as end:
            main(["calibrate", *arguments])
        assert isinstance(end.value.code, int)
        return end.value.code

    def test_its_file_is_what_was_measured(self) -> None:
        assert self.run() == 0
        assert Calibration.of_this_machine() == calibrate(EFFORT)

    def test_the_file_says_by_which_versions_it_was_measured(self) -> None:
        self.run()
        written = json.loads(calibration_path().read_text())
        assert written["format"] == 1
        assert written["gpu"] == "cpu"
        assert written["versions"] == current_versions()

    def test_another_file_leaves_the_cache_alone(self, tmp_path: Path) -> None:
        assert self.run("--output", str(tmp_path / "a.json")) == 0
        assert Calibration.read(tmp_path / "a.json") == calibrate(EFFORT)
        assert not calibration_path().exists()

    def test_it_warns_of_other_load(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.run()
        assert "kept 0.8 cores busy" in capsys.readouterr().err

    def test_an_unknown_gpu_is_one_line_and_writes_nothing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(measure, "local_device", lambda: torch.device("cuda"))
        monkeypatch.setattr(measure, "run_ranks", lambda function, world_size: [("Quantum Abacus 9000", {})])
        assert self.run() == 2
        assert "Quantum Abacus 9000" in capsys.readouterr().err.splitlines()[-1]
        assert not calibration_path().exists()
