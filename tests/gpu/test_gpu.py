"""What needs a GPU, from the tables of gpu_cells.py. `make test-gpu`; on CPU ranks `make gpu-rehearsal`."""

from collections.abc import Callable

import pytest
from gpu_cells import CELLS, GPUS, LAYOUT_CELLS, MEMORY_CELLS, RESUME_CELLS, Cell, MemoryCell, missing
from gpu_runs import Runs, estimate

from toolkit.parity import LossCurve, Tolerance, compare_curves

pytestmark = pytest.mark.gpu
WITHIN_PERCENT = 5
ALL = [*CELLS, *RESUME_CELLS, *(cell for cell in LAYOUT_CELLS if cell.ranks <= GPUS)]


@pytest.mark.parametrize("cell", ALL, ids=lambda cell: cell.id)
def test_it_trains_what_the_other_run_trains(cell: Cell, device: str, runs: Runs) -> None:
    if reason := missing(cell.needs, device):
        pytest.skip(reason)
    other, own = runs.result(cell.specs[1]), runs.result(cell.specs[0])
    if cell.only_last:
        assert own.losses[-1] == pytest.approx(other.losses[-1], rel=cell.within)
        return
    curves = [LossCurve.from_steps(name, list(zip(one.losses, one.norms, strict=True)))
              for name, one in ((cell.name, own), ("the other run", other))]  # fmt: skip
    tolerance = Tolerance(loss=(cell.within,), grad_norm=(10 * cell.within,), source="kernels of GPUs")
    report = compare_curves(*curves, tolerance)
    assert report.passed, str(report)


@pytest.mark.parametrize("cell", MEMORY_CELLS, ids=lambda cell: cell.id)
def test_the_estimate_is_the_peak(
    cell: MemoryCell, device: str, runs: Runs, record_property: Callable[[str, object], None]
) -> None:
    found = runs.result(cell.specs[0])
    expected = estimate(runs.recipe(cell.specs[0]), found)
    for name, one in (("allocated", expected.allocated), ("reserved", expected.reserved)):
        record_property(f"estimated_{name}", one)
        record_property(name, getattr(found, name))
    if device == "cuda":
        for name in ("allocated", "reserved"):
            assert getattr(expected, name) == pytest.approx(getattr(found, name), rel=WITHIN_PERCENT / 100), name
    else:
        # DeepSpeed's buckets of a GPU, of which there are two with overlap_comm, are estimated.
        assert expected.allocated == pytest.approx(found.allocated, rel=0.25)
