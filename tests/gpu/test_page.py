"""The page of `make gpu`: what is computed of a measurement, and what becomes of steps that fail. No ranks."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu import page, setups
from gpu.budget import Budget, Outcome
from gpu.setups import COMPILED, TOOLKIT, TORCH, TRAINER, Setup, fitted
from gpu.sides import Run
from gpu.traced import Trace, TracedRun, read_trace
from measure.step_counter import HostRead, StepCounts
from measure.table import Sheet, publish_all
from torch.autograd import DeviceType

from toolkit.config.recipe import Recipe
from toolkit.estimate.flops import train_flops_per_token
from toolkit.hardware import Gpu, gpu
from toolkit.models.shape import ModelShape, local_config

H100 = gpu("H100-SXM-80GB")
SHAPE = ModelShape.from_config(local_config("llama-3.2-1b"))
SETUP = Setup(
    name="1B", model="llama-3.2-1b", seq_len=4096, micro_batch_size=2, accumulation=4, has_target=True,
)  # fmt: skip
MEMORY = {"group": "memory", "name": "gpt2", "outcome": "passed", "reason": ""}


def speed(side: str, seconds: float | None, reason: str = "", **fields: Any) -> page.Speed:
    """A side whose steps took so long; None: it failed."""
    run = Run(seconds=[9.0, seconds or 0, seconds or 0], losses=[], peak_bytes=2**31)
    outcome = Outcome(state="failed", reason=reason) if seconds is None else Outcome(state="done", value=run)
    known = {"setup": SETUP, "shape": SHAPE, "peak_flops": H100.bf16_flops} | fields
    return page.Speed(side=side, outcome=outcome, **known)


def sheet(sheets: list[Sheet], title: str) -> list[list[str]]:
    (found,) = (one for one in sheets if one.title == title)
    return [list(row) for row in found.rows]


def test_a_step_that_does_the_peaks_flops_has_all_of_the_mfu() -> None:
    assert H100.bf16_flops is not None
    flops = SETUP.tokens * train_flops_per_token(SHAPE, SETUP.seq_len)
    twice_the_peak = speed(TOOLKIT, 2 * flops / H100.bf16_flops)
    assert twice_the_peak.mfu == pytest.approx(0.5)
    assert speed(TOOLKIT, flops / H100.bf16_flops).mfu == pytest.approx(1.0)
    assert twice_the_peak.tokens_per_second == pytest.approx(SETUP.tokens * H100.bf16_flops / (2 * flops))


def test_on_several_gpus_the_mfu_is_of_one() -> None:
    several = Setup(name="1B", model="llama-3.2-1b", seq_len=4096, micro_batch_size=2, accumulation=4, ranks=8)
    one, all_of_them = speed(TOOLKIT, 1.0), speed(TOOLKIT, 1.0, setup=several)
    assert several.tokens == 8 * SETUP.tokens
    assert all_of_them.mfu == one.mfu


def test_targets_stand_beside_what_was_measured() -> None:
    sides = [speed(TOOLKIT, 1.0), speed(TRAINER, 1.2), speed(TORCH, 0.9)]
    tests = [MEMORY | {"allocated": 100, "estimated_allocated": size} for size in (101, 94)]
    rows = sheet(page.page("first", sides, tests, {}), "first")
    assert rows[1][1:] == [">= 1.10x", "1.20x", "reached"]
    assert rows[2][1:] == ["within 5%", "-6.0%", "missed"]
    table = sheet(page.page("first", sides, tests, {}), "Speed of training")
    assert [row[-1] for row in table] == ["–", "1.20x", "0.90x"]


def test_a_side_that_fails_is_a_line_that_says_why() -> None:
    sides = [speed(TOOLKIT, None, "rank 0 failed: OutOfMemoryError: CUDA out of | memory"), speed(TRAINER, 1.0)]
    sheets = page.page("first", sides, [], {"tests/gpu": Outcome(state="not run", reason="no time")})
    assert sheet(sheets, "first")[0][2:] == ["failed", "–"]
    assert sheet(sheets, "Speed of training")[0][2] == "failed"
    assert sheet(sheets, "Failed, skipped and not run") == [
        ["1B: toolkit", "failed", "rank 0 failed: OutOfMemoryError: CUDA out of / memory"],
        ["tests/gpu", "not run", "no time"],
    ]
    assert page.failed(sides, [], {})
    assert not page.failed(failing_peer := [sides[1], speed(TRAINER, None)], [], {})
    assert page.failed(failing_peer, [], {}, peers=True)
    assert not page.failed(sides[1:], [], {"tests/gpu": Outcome(state="not run")})


def test_a_test_that_fails_is_counted_and_fails_the_whole() -> None:
    tests = [{"group": "fp32", "name": str(n), "outcome": o, "reason": "x"} for n, o in enumerate(("passed", "failed"))]
    sheets = page.page("first", [], tests, {})
    assert sheet(sheets, "Tests") == [["fp32", "1", "1", "–", "–"]]
    assert page.failed([], tests, {})


def test_a_step_gets_no_more_than_is_left() -> None:
    budget = Budget(10.0)
    limits: list[float] = []
    budget.attempt(limits.append, needs=5, limit=100)
    assert limits[0] <= 10
    assert budget.attempt(limits.append, needs=11, limit=100).state == "not run"
    assert len(limits) == 1
    broken = budget.attempt(lambda seconds: 1 / 0, needs=0, limit=1)
    assert (broken.state, broken.reason) == ("failed", "division by zero")


def test_a_model_that_does_not_fit_loses_layers_and_then_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a made-up estimate: so many bytes a layer and sample."""
    setup = Setup(
        name="8B", model="llama-tiny", seq_len=64, micro_batch_size=4, accumulation=1, layer_field="num_hidden_layers",
        layers=8,
    )  # fmt: skip

    def estimated(recipe: Recipe, ranks: int, gpu: Gpu) -> SimpleNamespace:
        total = recipe.model.overrides.get("num_hidden_layers", 8) * (recipe.batch.micro_batch_size or 1)
        return SimpleNamespace(total=total, fits=total <= gpu.memory_bytes, band=(0.0, 0.0))

    monkeypatch.setattr(setups, "estimate", estimated)
    found = [fitted(setup, tmp_path, replace(H100, memory_bytes=size)) for size in (32, 31, 15, 8)]
    assert [one.note for one in found] == ["", "6 of 8 layers", "2 of 8 layers", "2 of 8 layers"]
    assert [one.micro_batch_size for one in found] == [4, 4, 4, 2]
    assert {one.tokens for one in found} == {256}
    with pytest.raises(MemoryError, match="GiB"):
        fitted(setup, tmp_path, replace(H100, memory_bytes=1))


def test_the_page_is_markdown_with_a_table_a_sheet(tmp_path: Path) -> None:
    sheets = page.page("first", [speed(TOOLKIT, 1.0), speed(TRAINER, 1.2)], [], {})
    publish_all("gpu", sheets=sheets, notes=["an H100"], save=True, path=tmp_path / "gpu.md", command="make gpu")
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert lines[0] == "# first"
    assert sum(line.startswith("| ---") for line in lines) == len(sheets)
    assert "- an H100" in lines


def traced_event(name: str, start: float, end: float, *, on_gpu: bool, named: bool = False) -> Any:
    """An event as torch.profiler's `events()` has it, in microseconds."""
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=named)


EVENTS = [
    traced_event("aten::mm", 0, 5, on_gpu=False),
    traced_event("cudaLaunchKernel", 1, 2, on_gpu=False),
    traced_event("ampere_bf16_gemm", 10, 30, on_gpu=True),
    traced_event("elementwise_kernel", 30, 40, on_gpu=True),
    traced_event("nccl:all_reduce", 20, 60, on_gpu=True, named=True),
    traced_event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 35, 60, on_gpu=True),
    traced_event("Memcpy DtoH (Device -> Pinned)", 80, 82, on_gpu=True),
    traced_event("cudaStreamSynchronize", 5, 83, on_gpu=False),
    traced_event("Memset (Device)", 90, 91, on_gpu=True),
    traced_event("cudaDeviceSynchronize", 92, 100, on_gpu=False),
]


def test_a_trace_tells_kernels_from_collectives_and_copies() -> None:
    trace = read_trace(EVENTS)
    assert (trace.kernels, trace.collectives) == (2, 1)
    assert trace.copies == {"DtoH": 1, "memset": 1}
    assert trace.waits == {"cudaStreamSynchronize": 1}  # not the one that the profiler makes when it stops
    assert trace.busy_seconds == pytest.approx((50 + 2 + 1) * 1e-6)
    assert trace.seconds == pytest.approx(91e-6)


def test_a_step_of_its_own_that_waits_for_the_whole_device_is_seen() -> None:
    waits = read_trace([*EVENTS, traced_event("cudaDeviceSynchronize", 85, 86, on_gpu=False)]).waits
    assert waits["cudaDeviceSynchronize"] == 1


@pytest.mark.parametrize(
    ("trace", "shown"),
    [
        (None, ["7", "–", "2", "–", "0", "–", "–", "–"]),
        (read_trace(EVENTS), ["7", "2", "2", "1 cudaStreamSynchronize", "0", "1", "1 DtoH, 1 memset", "58%"]),
    ],
)
def test_what_is_counted_stands_beside_the_trace(trace: Trace | None, shown: list[str]) -> None:
    counts = StepCounts()
    counts.operations["forward"] = 7
    counts.host_reads[HostRead(phase="update", place="base.py:1", operation="tolist")] = 2
    traced = page.Traced(
        setup=SETUP, side=TOOLKIT, outcome=Outcome(state="done", value=TracedRun(counts=counts, trace=trace))
    )
    (row,) = sheet(page.page("first", [], [], {}, [traced]), "A step, counted and traced")
    assert row == ["1B", "dp1-tp1-pp1-z2", *shown]


def test_the_time_of_kernels_is_summed_by_what_they_do() -> None:
    spent = Counter({"nvjet_a": 0.02, "ampere_gemm": 0.01, "triton_poi": 0.004, "Memset": 0.001, "reduce": 0.002})
    trace = Trace(kernel_seconds=spent, busy_seconds=0.037, seconds=0.05)
    outcome = Outcome(state="done", value=TracedRun(counts=None, trace=trace))
    sheets = page.page("first", [], [], {}, [page.Traced(setup=SETUP, side=COMPILED, outcome=outcome)])
    (row,) = sheet(sheets, "Where the GPU's time goes, ms")
    assert row == [
        "1B, toolkit, compiled", "dp1-tp1-pp1-z2", "4.0", "0.0", "30.0", "0.0", "0.0", "1.0", "2.0", "13.0", "50.0",
    ]  # fmt: skip
    (row,) = sheet(sheets, "A step, counted and traced")
    assert row[2:4] == ["–", "0"]  # compiled layers are not counted


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused__scaled_dot_product_flash_attention_mul_1", "compiled"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "update"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collectives"),
        ("Memset (Device)", "copies, fills"),
        ("void at::native::reduce_kernel<512, 1, ...>", "other"),
    ],
)
def test_kernels_are_known_by_their_names(name: str, kind: str) -> None:
    assert page.kind_of_kernel(name) == kind


def test_a_trace_that_fails_is_a_line_and_the_exit_code() -> None:
    traced = page.Traced(setup=SETUP, side=TOOLKIT, outcome=Outcome(state="failed", reason="no profiler"))
    sheets = page.page("first", [], [], {}, [traced])
    assert sheet(sheets, "Failed, skipped and not run") == [["trace of 1B, dp1-tp1-pp1-z2", "failed", "no profiler"]]
    assert page.failed([], [], {}, [traced])
