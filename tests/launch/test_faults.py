"""One rank of a run fails; the others exit, name it, and leave a valid checkpoint.

tests/cluster/faults.py runs many random cases.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from daily import daily
from faults import run_fault, write_recipe
from faulty_ranks import Fault


@pytest.mark.parametrize(
    ("fault", "layout", "words"),
    [
        # Rank 0 hosts the heartbeat store.
        (Fault(kind="stop", victim=0, step=4, phase="backward"), "dp2-z1", "no longer responds"),
        (Fault(kind="stall", victim=1, step=5, phase="data"), "dp2-z2", "(data) hangs, and the others wait in step 5"),
        (Fault(kind="segfault", victim=0, step=3, phase="evaluate"), "pp2-z1", "killed or crashed in native code"),
        (Fault(kind="exception", victim=1, step=4, phase="checkpoint"), "dp2-z3", "ZeroDivisionError: a bug of mine"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_rank_that_fails_is_named_with_its_step(
    ranks: Callable[..., list[Any]], tmp_path: Path, fault: Fault, layout: str, words: str
) -> None:
    write_recipe(tmp_path)
    found = run_fault(fault, layout, tmp_path)
    assert found["problem"] == ""
    assert found["phase"] == fault.phase
    assert words in found["line"]


PASSES = (
    "backward pass for the weights of micro-batch 1 in stage 1",
    "backward pass for the input of micro-batch 2 in stage 1",
    "forward pass of micro-batch 3 in stage 1",
    "waits for the activation of micro-batch 0 at stage 1",
    "sums gradients",
)


ENDS = {"exception": "ZeroDivisionError: a bug of mine", "kill": "killed or crashed"}
"""How a rank ends, and what is said of it. The last heartbeat of one that is killed is from another pass."""


@pytest.mark.parametrize(
    "case",
    daily(
        [("exception", name) for name in PASSES] + [("kill", name) for name in PASSES[:3]],
        lambda _, case: case[1] == PASSES[0],
    ),
)
def test_a_rank_that_ends_in_a_schedule_is_named_with_its_pass_and_micro_batch(
    ranks: Callable[..., list[Any]], tmp_path: Path, case: tuple[Literal["exception", "kill"], str]
) -> None:
    kind, at = case
    write_recipe(tmp_path)
    fault = Fault(kind=kind, victim=1, step=3, phase=f"pipeline: {at}")
    outcome = run_fault(fault, "pp2-zbh1-z1", tmp_path)
    assert outcome["problem"] == ""
    assert f"died in step 3 (pipeline: {at}): {ENDS[kind]}" in outcome["line"]
