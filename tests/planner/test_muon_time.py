"""What Muon adds to a step, and how much less optimizers with smaller states read and write."""

import pytest

from toolkit.config.layout import Batch, Layout
from toolkit.hardware import gpu
from toolkit.planner.data_parallel_time import muon_seconds, optimizer_seconds
from toolkit.planner.request import request_for
from toolkit.planner.run_memory import recipe_of
from toolkit.planner.step_request import StepRequest


def setup_of(layout: Layout, optimizer: str = "muon") -> StepRequest:
    sizes = {"micro_batch_size": 1, "seq_len": 2048, "accumulation": 1}
    recipe = recipe_of("llama-3.1-8b", layout, **sizes, precision="bf16", optimizer=optimizer)  # type: ignore[arg-type]
    request = request_for(recipe, gpu("H100"), layout.world_size)
    return request.step_request(layout, Batch(global_batch_size=layout.dp, micro_batch_size=1, dp=layout.dp))


def seconds(layout: Layout) -> float:
    return muon_seconds(setup_of(layout))


def test_the_products_are_those_of_five_iterations_shared_out_over_ranks() -> None:
    alone = seconds(Layout(dp=1))
    # 7 billion weights of layers in blocks of 4096 x 4096, 15 products of 2 * 4096^3 FLOPs each, at 400 to 800 TFLOPS.
    flops = 15 * 6.98e9 * 2 * 4096
    assert flops / 800e12 < alone < flops / 400e12
    shared = seconds(Layout(dp=8))
    assert alone / 8 < shared < alone / 8 + 2 * 2 * 6.98e9 / 8 / 100e9
    assert seconds(Layout(dp=4, tp=2)) == pytest.approx(shared, rel=0.01)


@pytest.mark.parametrize(("optimizer", "saved"), [("lion", 8), ("adamw8bit", 12), ("adafactor", 0)])
def test_smaller_states_are_read_and_written_faster(optimizer: str, saved: int) -> None:
    exact, smaller = (optimizer_seconds(setup_of(Layout(dp=1), name)) for name in ("adamw", optimizer))
    # 8.03 billion parameters at 3.35 TB/s, of which 80 to 100 % are reached.
    assert saved * 8.03e9 / 3.35e12 <= exact - smaller <= saved * 8.03e9 / 3.35e12 / 0.8
