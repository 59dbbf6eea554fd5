"""Write the DeepSpeed configs of this folder.

python ds_configs/generate.py [FOLDER]

Each is what `dstk config` prints for one layout on 8 GPUs: GPT-2 XL, bf16, 512 samples a step, 8 in a micro-batch.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit import recipe_file
from toolkit.dsconfig import build
from toolkit.shape import ModelShape, find_config

HERE = Path(__file__).parent
WORLD_SIZE = 8
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "zero0": ("parallel.zero_stage=0",),
    "zero1": ("parallel.zero_stage=1",),
    "zero2": ("parallel.zero_stage=2",),
    "zero3": ("parallel.zero_stage=3",),
    "zero2_offload_optimizer": ("parallel.zero_stage=2", "parallel.offload_optimizer=cpu"),
    "zero3_offload_all": ("parallel.zero_stage=3", "parallel.offload_optimizer=cpu", "parallel.offload_params=cpu"),
    "pipeline_zero1": ("parallel.zero_stage=1", "parallel.pp=2"),
    "3d": (
        "model.name_or_path=gpt2-large",  # XL's 25 heads cannot be shared by two ranks
        "parallel.zero_stage=1",
        "parallel.tp=2",
        "parallel.pp=2",
        "parallel.sequence_parallel=true",
    ),
}


def configs() -> dict[str, dict[str, Any]]:
    """File name -> DeepSpeed config."""
    out = {}
    for name, overrides in VARIANTS.items():
        recipe = recipe_file.load(HERE.parent / "recipes" / "gpt2" / "z3.yaml", overrides, world_size=WORLD_SIZE)
        facts = find_config(recipe.model.name_or_path)
        assert facts is not None
        layout = recipe.layout(WORLD_SIZE)
        out[f"{name}.json"] = build(
            recipe, layout, recipe.resolve_batch(layout), hidden_size=ModelShape.from_config(facts).hidden
        )
    return out


def main(folder: Path) -> None:
    """Write every file."""
    for name, config in configs().items():
        (folder / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
