"""train.profile: the terms of a traced step add up to it, and each is what it says."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import recipe_conflicts
from toolkit.config.recipe import Recipe
from toolkit.report.trace_terms import TERMS, ProfiledSteps, trace_terms


def event(name: str, begin: float, end: float, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "cat": cat, "args": args}


def test_the_terms_of_a_gpu_are_known_in_closed_form() -> None:
    launch = [event("cudaLaunchKernel", at, at + 1, "cuda_runtime", correlation=number)
              for number, at in enumerate((10, 20, 605, 30, 40, 50))]  # fmt: skip
    group = {"Process Group Name": "3"}
    trace = [
        event("phase forward", 0, 600), event("phase update", 600, 1000), *launch,
        event("gemm", 100, 300, "kernel", correlation=0),
        event("gemm", 250, 400, "kernel", correlation=1),  # another stream: 50 of both
        event("adam", 700, 900, "kernel", correlation=2),
        event("ncclDevKernel_AllReduce", 350, 500, "kernel", correlation=3, **group),  # 100 of it exposed
        event("ncclDevKernel_ReduceScatter", 480, 550, "kernel", correlation=4, **{"Process Group Name": "7"}),
        event("Memcpy HtoD", 890, 950, "gpu_memcpy", correlation=5),
    ]  # fmt: skip
    found = trace_terms({"traceEvents": trace}, {"3": "tensor", "7": "data"})
    microseconds = {name: round(1e6 * seconds) for name, seconds in found.terms.items() if seconds}
    assert microseconds == {"compute": 300, "tensor": 100, "data": 50, "optimizer": 200, "copies": 50, "idle": 300}
    assert {name: round(1e6 * s) for name, s in found.communication.items()} == {"tensor": 150, "data": 70}
    assert found.seconds == pytest.approx(1e-3)


def test_operations_of_gloo_are_of_the_groups_of_their_calls_or_of_none() -> None:
    calls = [event("group 3", 100, 110), event("group 7", 200, 210), event("group 3", 300, 310)]
    sent = [event("gloo:all_reduce", at, at + 50) for at in (105, 205, 305)]
    phase = event("phase forward", 0, 1000)
    kinds = {"3": "tensor", "7": "data"}
    found = trace_terms({"traceEvents": [phase, *calls, *sent]}, kinds)
    assert {name: round(1e6 * s) for name, s in found.communication.items()} == {"tensor": 100, "data": 50}
    found = trace_terms({"traceEvents": [phase, *calls[1:], *sent]}, kinds)
    assert {name: round(1e6 * s) for name, s in found.communication.items()} == {"world": 150}


Train = Callable[..., str]


@pytest.mark.parametrize(
    ("layout", "communicates"),
    [
        ({"parallel": {"tp": 2, "zero_stage": 1}}, {"tensor", "data"}),
        pytest.param({"parallel": {"pp": 2}}, {"pipeline", "data"}, marks=pytest.mark.whole),
        pytest.param({"parallel": {"zero_stage": 3}}, {"data"}, marks=pytest.mark.whole),
        pytest.param({"parallel": {"ulysses": 2}}, {"sequence"}, marks=pytest.mark.whole),
    ],
)
def test_a_profiled_run_says_what_its_ranks_wait_for(
    train: Train, tmp_path: Path, layout: dict[str, Any], communicates: set[str]
) -> None:
    said = train("train.profile.start=2", "train.profile.steps=2", "run_dir=run", world_size=4, **layout)
    assert "steps 2 to 3 profiled" in said
    table = json.loads((tmp_path / "run/profile/terms.json").read_text())
    assert (table["start"], table["steps"]) == (2, 2)
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for rank in range(4):
        spent = {name: table["seconds"][name][rank] for name in TERMS}
        assert spent["compute"] > 0
        assert sum(spent.values()) <= sum(line["seconds"] for line in logged[1:3])
        exchanged = {name[4:] for name, each in table["seconds"].items() if name.startswith("all ") and each[rank]}
        assert exchanged - {"world"} == communicates
    traces = sorted((tmp_path / "run/profile").glob("trace-*"))
    assert 0 < len(traces) < 4 or not layout["parallel"].get("tp")
    names = [one["name"] for one in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]]
    calls = [name for name in names if name.startswith("group ")]
    assert len(calls) == len([name for name in names if name.startswith("gloo:")]) > 0
    assert {"phase backward", "phase update"} <= set(names) or "pp" in layout["parallel"]
    steps = ProfiledSteps.read(tmp_path / "run")
    assert steps is not None
    assert sum(steps.step(0).values()) == pytest.approx(sum(table["seconds"][name][0] for name in TERMS) / 2)
    assert steps.step()["compute"] <= steps.step(steps.busiest)["compute"] + steps.step(steps.busiest)["optimizer"]


def test_a_profile_after_the_end_of_the_run_is_refused(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(train__steps=11, train__profile={"start": 10, "steps": 3})
    [refusal] = recipe_conflicts(recipe)
    assert refusal.settings == (("train.profile.start", 10), ("train.profile.steps", 3), ("train.steps", 11))
