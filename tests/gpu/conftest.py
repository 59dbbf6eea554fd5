"""The runs of tests/gpu, and a file with a line a test, which benchmarks/gpu reads: $DSTK_GPU_RESULTS."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_cells import Spec, device_here, missing, on_cpu
from gpu_runs import Runs


@pytest.fixture(scope="session")
def device() -> Iterator[str]:
    """What the ranks run on. The tests' own environment is for CPU ranks, so that it is changed before one starts."""
    with pytest.MonkeyPatch.context() as environment:
        if not on_cpu():
            environment.delenv("DS_ACCELERATOR", raising=False)
            assert "deepspeed" not in sys.modules, "DeepSpeed has chosen the CPU: run tests/gpu/test_gpu.py by itself"
        found = device_here()
        if found == "cpu" and not on_cpu():
            pytest.skip("no CUDA device")
        # Triton is imported by now: it would interpret the kernels of Liger and torch.compile.
        interprets = os.environ.get("TRITON_INTERPRET") == "1"
        assert on_cpu() or not interprets, "set TRITON_INTERPRET=0, as `make test-gpu` does"
        yield found


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, device: str, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """All runs of the tests that were selected and can run here."""
    from toolkit.launch.local_ranks import preload
    from toolkit.launch.output import quiet

    preload("gpt2", "llama", "qwen3")
    quiet(debug=False)
    specs: list[Spec] = []
    for item in request.session.items:
        cell = item.callspec.params.get("cell") if hasattr(item, "callspec") else None
        if cell is not None and not missing(getattr(cell, "needs", ""), device):
            specs += cell.specs
    made = Runs(tmp_path_factory.mktemp("gpu"), corpus, device, specs)
    yield made
    made.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        _write(item, "not run", "the time was up")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    reason = ""
    if report.skipped:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = (crash.message if crash else str(report.longrepr)).splitlines()[0].removeprefix("AssertionError: ")
    if report.when == "call" or not report.passed:
        _write(item, report.outcome, reason)


def _write(item: pytest.Item, outcome: str, reason: str) -> None:
    """Of a test, the last line counts."""
    path = os.environ.get("DSTK_GPU_RESULTS")
    cell = item.callspec.params.get("cell") if hasattr(item, "callspec") else None
    if path is not None and cell is not None:
        line = {"group": cell.group, "name": cell.name, "outcome": outcome, "reason": reason}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | dict(item.user_properties)) + "\n")
