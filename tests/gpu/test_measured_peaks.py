"""Estimated peaks against what PyTorch's allocator counted on an H200: benchmarks/results/gpu.md. No GPU is needed."""

import json
from pathlib import Path

import pytest
from gpu_cells import MEMORY_CELLS, base

from toolkit.config import load_recipe
from toolkit.hardware import gpu
from toolkit.planner.run_memory import memory_request

MEASURED = {
    "gpt2 ZeRO-0 fp32": 6_996_082_688,
    "gpt2 ZeRO-0 bf16": 6_410_523_648,
    "gpt2 ZeRO-1 bf16": 5_556_481_536,
    "gpt2 ZeRO-2 bf16": 5_297_842_688,
    "gpt2 ZeRO-3 bf16": 5_324_864_000,
    "gpt2 ZeRO-1 fp32": 7_537_781_248,
    "gpt2-medium ZeRO-2 bf16, full recompute": 7_511_753_216,
    "gpt2-medium ZeRO-2 bf16, selective": 13_149_422_080,
    "gpt2 ZeRO-1 bf16, eager": 8_570_705_408,
    "gpt2 ZeRO-2 bf16, chunked loss": 5_297_842_688,
    "gpt2-medium ZeRO-2 bf16, activations on the host": 7_552_999_936,
    "smollm2-360m ZeRO-2 bf16, 2048 tokens": 18_284_922_368,
}
"""Bytes: torch.cuda.max_memory_allocated of steps 2 and 3, with torch 2.11 and DeepSpeed 0.19.8."""
CELLS = {cell.name: cell for cell in MEMORY_CELLS}


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimated_peak_is_what_a_gpu_counted(name: str, corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(json.dumps(base(corpus, tmp_path / "cache")))
    recipe = load_recipe(path, CELLS[name].overrides, world_size=1)
    layout = recipe.layout(1)
    (stage,) = memory_request(recipe, layout, recipe.resolve_batch(layout), gpu=gpu("H200")).stages()
    assert stage.allocated == pytest.approx(MEASURED[name], rel=0.02)
