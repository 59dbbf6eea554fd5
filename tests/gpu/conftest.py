"""The runs of tests/gpu, and a file with a line a test, which benchmarks/gpu reads: $DSTK_GPU_RESULTS."""

import json
import os
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
        found = device_here()
        if found == "cpu" and not on_cpu():
            pytest.skip("no CUDA device")
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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    path = os.environ.get("DSTK_GPU_RESULTS")
    if path is None or (report.when != "call" and report.passed) or "cell" not in getattr(item, "fixturenames", ()):
        return
    reason = ""
    if report.skipped:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = (crash.message if crash else str(report.longrepr)).splitlines()[0].removeprefix("AssertionError: ")
    cell = item.callspec.params["cell"]
    line = {"group": cell.group, "name": cell.name, "outcome": report.outcome, "reason": reason}
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | dict(item.user_properties)) + "\n")
