"""The file of `dstk calibrate`: written whole, read back, refused in one line; what each constant does to a step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_setups import changed, step_request

from toolkit.cli.main import main
from toolkit.config.layout import Batch, Layout
from toolkit.errors import RunError
from toolkit.hardware import cpu_name, gpu
from toolkit.models.shape import ModelShape, find_config
from toolkit.planner.auto.ranks import cluster_named
from toolkit.planner.calibration.file import Calibration, calibration_path, current_versions
from toolkit.planner.cluster import FORMER_NAMES, Cluster
from toolkit.planner.execution import Execution
from toolkit.planner.request import PlanRequest
from toolkit.planner.step_time import predict_step

CORE = {
    "products": {"fp32": [[256, 256, 256, 1e11], [1024, 1024, 1024, 8e10]], "bf16": [[256, 256, 256, 4e11]]},
    "attention": {"fp32": [4e10, 2e10], "bf16": [4e10, 2e10]},
    "layer_bytes_per_second": [5e9, 4e9],
    "layer_seconds": [2e-4, 3e-4],
    "loss_bytes_per_second": [5e9, 4e9],
}
FACTS = {
    "cores": 2,
    "host_memory_bytes": 2e10,
    "link_latency_seconds": 5e-5,
    "link_bytes_per_second": 2e9,
    "network_latency_seconds": 5e-5,
    "network_bytes_per_second": 2e9,
    "collective_seconds": 5e-5,
    "send_seconds": 1e-3,
    "step_overhead_seconds": 2e-3,
    "micro_batch_overhead_seconds": 1e-3,
    "sharded_seconds": 1e-3,
    "slowdown": 1.1,
}


def document(**changes: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "gpu": "cpu",
        "hardware": cpu_name(),
        "date": "2026-11-23",
        "versions": current_versions(),
        "cluster": FACTS,
        "memory_bytes_per_second": 1e10,
        "kernel_seconds": 2e-6,
        "core": CORE,
    } | changes


def calibration(**changes: Any) -> Calibration:
    return Calibration.model_validate(document(**changes))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSTK_CACHE", str(tmp_path / "cache"))
    calibration().write(calibration_path())
    return calibration_path()


def step(layout: str, found: Calibration, **changes: Any) -> float:
    config = find_config("gpt2")
    assert config is not None
    parsed = Layout.parse(layout)
    ranks = parsed.world_size
    request = step_request(
        replace(ModelShape.from_config(config), layers=4),
        parsed,
        cluster=found.of_ranks(ranks),
        micro_batch_size=2,
        accumulation=8 // parsed.dp,
        seq_len=128,
        execution=Execution(precision="fp32"),
    )
    return predict_step(changed(request, **changes)).seconds


def test_a_calibration_is_read_as_it_was_written(stored: Path) -> None:
    assert Calibration.of_this_machine() == calibration()
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]


def test_a_file_that_cannot_be_written_whole_leaves_the_one_before(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("toolkit.planner.calibration.file.sync", full)
    with pytest.raises(OSError, match="No space"):
        calibration(date="2027-01-01").write(stored)
    assert Calibration.read(stored).date == "2026-11-23"
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "EOF"),
        (json.dumps(document(format=2)), "format"),
        (json.dumps(document(colour="red")), "colour"),
        (json.dumps(document(kernel_seconds=-1)), "kernel_seconds"),
        (json.dumps(document(memory_bytes_per_second=0)), "memory_bytes_per_second"),
        (json.dumps(document(cluster={"cores": 2})), "host_memory_bytes"),
        (json.dumps(document(cluster=FACTS | {"speed": 1})), "speed"),
        (json.dumps(document(core=CORE | {"products": {"bf16": [[1, 1, 1, 1.0]]}})), "fp32"),
        (json.dumps(document(hardware="another processor, 64 cores")), "another processor"),
        (json.dumps(document(versions=current_versions() | {"torch": "1.0"})), "torch 1.0"),
    ],
)
def test_content_that_is_wrong_or_stale_is_one_line(
    stored: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    stored.write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match=named):
        Calibration.of_this_machine()
    with pytest.raises(SystemExit) as end:
        main(["plan", "--model", "gpt2", "--gpus", "2xcpu", "--seq", "128", "--global-batch", "8"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "dstk calibrate" in error


def test_the_plan_uses_what_is_stored_and_any_file(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", "--model", "gpt2", "--seq", "128", "--global-batch", "8", "--json"]
    other = stored.with_name("other.json")
    calibration(core=CORE | {"attention": {"fp32": [1e9, 1e9], "bf16": [1e9, 1e9]}}).write(other)
    seconds = []
    for arguments in ([], ["--cluster", "measured"], ["--cluster", str(other)]):
        with pytest.raises(SystemExit) as end:
            main([*ask, "--gpus", "2xcpu", "--top", "1", *arguments])
        assert end.value.code == 0
        seconds.append(json.loads(capsys.readouterr().out)["plans"][0]["step_seconds"])
    assert seconds[0] == seconds[1] < seconds[2]


_REACTS = {
    "products": ("dp1-z1", {"core": {"products": {"fp32": [[256, 256, 256, 5e10]], "bf16": [[256, 256, 256, 1e11]]}}}),
    "attention": ("dp1-z1", {"core": {"attention": {"fp32": [2e10, 1e10], "bf16": [2e10, 1e10]}}}),
    "layer_bytes_per_second": ("dp1-z1", {"core": {"layer_bytes_per_second": [4e9, 4e9]}}),
    "layer_seconds": ("dp1-z1", {"core": {"layer_seconds": [3e-4, 3e-4]}}),
    "loss_bytes_per_second": ("dp1-z1", {"core": {"loss_bytes_per_second": [5e9, 3e9]}}),
    "memory_bytes_per_second": ("dp1-z1", {"memory_bytes_per_second": 5e9}),
    "kernel_seconds": ("dp1-z1", {"kernel_seconds": 4e-6}),
    "cores": ("dp2-z1", {"cluster": {"cores": 1}}),
    "slowdown": ("dp2-z1", {"cluster": {"slowdown": 1.3}}),
    "link_latency_seconds": ("tp2-z1", {"cluster": {"link_latency_seconds": 1e-4}}),
    "link_bytes_per_second": ("tp2-z1", {"cluster": {"link_bytes_per_second": 1e9}}),
    "collective_seconds": ("tp2-z1", {"cluster": {"collective_seconds": 1e-4}}),
    "send_seconds": ("pp2-z1", {"cluster": {"send_seconds": 2e-3}}),
    "step_overhead_seconds": ("dp1-z1", {"cluster": {"step_overhead_seconds": 3e-3}}),
    "micro_batch_overhead_seconds": ("dp1-z1", {"cluster": {"micro_batch_overhead_seconds": 2e-3}}),
    "sharded_seconds": ("dp2-z3", {"cluster": {"sharded_seconds": 2e-3}}),
}


@pytest.mark.parametrize("constant", _REACTS)
def test_a_step_takes_longer_where_a_constant_is_worse(constant: str) -> None:
    layout, changes = _REACTS[constant]
    merged = {
        name: value if not isinstance(value, dict) else (CORE if name == "core" else FACTS) | value
        for name, value in changes.items()
    }
    assert step(layout, calibration(**merged)) > (1 + 1e-6) * step(layout, calibration())


def test_ranks_that_share_cores_take_as_long_as_fewer_ranks_with_more_samples() -> None:
    crowded = calibration(cluster=FACTS | {"slowdown": 1.0, "link_latency_seconds": 0, "collective_seconds": 0})
    two, four = (step(f"dp{ranks}-z1", crowded) for ranks in (2, 4))
    assert four == pytest.approx(two, rel=0.1)
    assert step("dp1-z1", crowded) > 1.8 * two


def test_a_pipeline_on_shared_cores_has_no_bubble_where_the_cores_stay_busy() -> None:
    found = calibration(cluster=FACTS | {"send_seconds": 0.0})
    assert step("dp2-pp2-z1", found) < 1.1 * step("dp4-z1", found)


def test_memory_and_time_of_a_plan_are_of_the_stages_that_training_has_there() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 8, "vocab_size": 4000, "n_positions": 64}
    layout = Layout(pp=2)
    batch = Batch(global_batch_size=8, micro_batch_size=2, dp=1)
    bounds = []
    for cluster in (calibration().of_ranks(2), Cluster.of(gpu("H100"))):
        asked = PlanRequest.of("gpt2", config, gpus=2, global_batch_size=8, seq_len=64, cluster=cluster)
        bounds.append(asked.memory_request(layout, batch).bounds)
        assert asked.step_request(layout, batch).bounds == bounds[-1]
    assert bounds[0] != bounds[1]


def test_a_plan_at_launch_takes_the_stored_constants_as_long_as_they_hold(stored: Path) -> None:
    found, measured = cluster_named("cpu", 4)[0], calibration().of_ranks(4)
    assert (found.gpu.core, found.link_latency_seconds) == (measured.gpu.core, measured.link_latency_seconds)
    calibration(versions={"torch": "1.0"}).write(stored)
    assert cluster_named("cpu", 4)[0].gpu.core is None


def test_a_gpu_has_its_measured_rates_in_the_place_of_the_data_sheets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "h100.json"
    known = gpu("H100")
    fields = {"gpu": known.name, "hardware": "NVIDIA H100", "core": None, "cluster": {"host_bytes_per_second": 5e10}}
    found = calibration(**fields, matmul_fraction={"bf16": 0.5}, memory_bytes_per_second=3e12)
    found.write(path)
    cluster = Calibration.read(path).of_ranks(8)
    assert (cluster.gpu.matmul_fraction, cluster.gpu.memory_bytes_per_second) == ({"bf16": 0.5}, 3e12)
    assert (cluster.host_bytes_per_second, cluster.link_bytes_per_second) == (5e10, known.link_bytes_per_second)
    with pytest.raises(SystemExit) as end:
        main(
            ["plan", "--model", "gpt2", "--gpus", "8xA100", "--seq", "8", "--global-batch", "8", "--cluster", str(path)]
        )
    assert end.value.code == 2
    assert known.name in capsys.readouterr().err


def test_a_file_with_the_former_names_of_fields_is_read() -> None:
    former = {present: name for name, present in FORMER_NAMES.items()}
    facts = {former.get(name, name): value for name, value in FACTS.items()}
    assert facts != FACTS
    assert Calibration.model_validate(document(cluster=facts)).cluster == FACTS
