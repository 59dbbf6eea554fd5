"""What only a machine with GPUs can show, with a torch that says what such a machine's says."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.launch import forked_script, local_ranks
from toolkit.launch.local_ranks import RankFailedError, in_one_line, run_ranks
from toolkit.parallel import gather


def with_cuda(monkeypatch: pytest.MonkeyPatch, **cuda: Any) -> None:
    """A CUDA build of torch, as the process sees it."""
    found = {"is_initialized": lambda: False, "is_available": lambda: True, "init": lambda: None} | cuda
    fake = SimpleNamespace(version=SimpleNamespace(cuda="13.0", hip=None), cuda=SimpleNamespace(**found))
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)


def broken() -> None:
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


@pytest.mark.parametrize(
    ("cuda", "usable"),
    [
        ({}, True),
        ({"is_available": lambda: False, "init": broken}, True),
        ({"init": broken}, False),
        ({"is_initialized": lambda: True}, False),
    ],
    ids=["usable", "no GPU", "a library has asked the driver", "initialized"],
)
def test_forks_are_tried_before_ranks_are_forked(
    monkeypatch: pytest.MonkeyPatch, cuda: dict[str, Any], usable: bool
) -> None:
    with_cuda(monkeypatch, **cuda)
    assert forked_script.forks_have_gpus() == usable
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert forked_script.forks_have_gpus()


def test_a_library_that_asks_the_driver_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is enough: forks made after it fail with "CUDA error: initialization error"."""
    with_cuda(monkeypatch)
    assert forked_script.forks_have_gpus()
    with_cuda(monkeypatch, init=broken)
    assert not forked_script.forks_have_gpus()


@pytest.mark.whole
def test_ranks_that_cannot_be_forked_are_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "forks_have_gpus", lambda: False)
    assert run_ranks(math.sqrt, 2, 9.0, joined=False) == [3.0, 3.0]


def test_over_nccl_a_stage_without_buffers_takes_part_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where NCCL has no collectives, it would fail and leave the other stages waiting."""
    asked = []
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(gather, "_holders", lambda names, local, groups, device: asked.append(device) or [])
    groups: Any = SimpleNamespace(pipe=None, layout=SimpleNamespace(pp=2))
    list(gather.gather_buffers([], {}, groups))
    assert asked == [torch.device("cuda", 3)]


def test_an_error_is_the_line_of_a_traceback_that_names_it() -> None:
    text = (
        "rank 1 failed:\nTraceback (most recent call last):\n  File\ntorch.OutOfMemoryError: CUDA out of memory\nmore\n"
    )
    assert in_one_line(RankFailedError(text)) == "rank 1 failed: torch.OutOfMemoryError: CUDA out of memory"
    assert in_one_line(ValueError()) == "ValueError"
