"""`dstk calibrate` measures: all of it in tiny, without ranks; with ranks among the whole matrix."""

from dataclasses import replace

import pytest

from toolkit.calibrate import measure
from toolkit.calibrate.layers import Layer
from toolkit.calibrate.measure import Effort, calibrate
from toolkit.cli.main import main
from toolkit.planner.calibration.file import Calibration, calibration_path

TINY = Effort(
    seconds=0.005,
    products=((32, 64, 64), (64, 64, 128)),
    buffer_bytes=1 << 20,
    layer=Layer(hidden=64, vocab=256, small=(1, 8), large=(2, 64)),
    ranks=False,
)


def test_all_of_a_rank_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = calibrate(TINY)
    found.write(tmp_path / "calibration.json")
    assert Calibration.read(tmp_path / "calibration.json") == found
    assert found.core is not None
    for rows in found.core.products.values():
        assert {row[:3] for row in rows} == set(TINY.products)
    rates = [row[3] for rows in found.core.products.values() for row in rows]
    assert all(1e7 < rate < 1e13 for rate in rates)  # wide limits of one core: 10 MFLOP/s to 10 TFLOP/s
    assert 0 < found.kernel_seconds < 1e-2


@pytest.mark.whole
def test_the_command_measures_ranks_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DSTK_CACHE", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(measure, "FULL", replace(TINY, ranks=True))
    with pytest.raises(SystemExit) as end:
        main(["calibrate"])
    assert end.value.code == 0
    assert str(calibration_path()) in capsys.readouterr().out
    found = Calibration.of_this_machine().cluster
    assert found["slowdown"] >= 1
    assert {"link_latency_seconds", "send_seconds", "micro_batch_overhead_seconds", "sharded_seconds"} <= found.keys()
    assert found["link_latency_seconds"] > 0
