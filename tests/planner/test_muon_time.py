"""What Muon adds to a step."""

import pytest

from toolkit.config.layout import Batch, Layout
from toolkit.hardware import gpu
from toolkit.planner.data_time import muon_seconds
from toolkit.planner.request import request_for
from toolkit.planner.run_memory import recipe_of


def seconds(layout: Layout, optimizer: str = "muon") -> float:
    sizes = {"micro_batch_size": 1, "seq_len": 2048, "accumulation": 1}
    recipe = recipe_of("llama-3.1-8b", layout, **sizes, precision="bf16", optimizer=optimizer)  # type: ignore[arg-type]
    request = request_for(recipe, gpu("H100"), layout.world_size)
    setup = request.setup(layout, Batch(global_batch_size=layout.dp, micro_batch_size=1, dp=layout.dp))
    assert setup.muon == (optimizer == "muon")
    return muon_seconds(setup)


def test_the_products_are_those_of_five_iterations_shared_out_over_ranks() -> None:
    alone = seconds(Layout(dp=1))
    # 7 billion weights of layers in blocks of 4096 x 4096, 15 products of 2 * 4096^3 FLOPs each, at 400 to 800 TFLOPS.
    flops = 15 * 6.98e9 * 2 * 4096
    assert flops / 800e12 < alone < flops / 400e12
    shared = seconds(Layout(dp=8))
    assert alone / 8 < shared < alone / 8 + 2 * 2 * 6.98e9 / 8 / 100e9
    assert seconds(Layout(dp=4, tp=2)) == pytest.approx(shared, rel=0.01)
