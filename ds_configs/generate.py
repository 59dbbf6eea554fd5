"""Write the DeepSpeed configs of this folder.

python ds_configs/generate.py [FOLDER]

Each is what `dstk config` prints for one layout: GPT-2 XL, bf16, 512 samples a step, 8 in a micro-batch, on 8 GPUs
(zeropp: on two nodes of 8). NAME_auto.json is the same with `--format hf-trainer`.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config import load_recipe
from toolkit.dsconfig.build import ConfigJob, shape_of
from toolkit.dsconfig.trainer import trainer_config

HERE = Path(__file__).parent
GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One file: overrides of recipes/gpt2/gpt2-xl-pretrain.yaml in z3-recompute."""

    overrides: tuple[str, ...]
    nodes: int = 1
    trainer: bool = True
    """Whether the Trainer can run it."""


_OFFLOAD = ("parallel.offload_optimizer=cpu",)
VARIANTS: Mapping[str, Variant] = {
    "zero0": Variant(overrides=("parallel.zero_stage=0",)),
    "zero1": Variant(overrides=("parallel.zero_stage=1",)),
    "zero2": Variant(overrides=("parallel.zero_stage=2",)),
    "zero3": Variant(overrides=("parallel.zero_stage=3",)),
    "zero2_offload_optimizer": Variant(overrides=("parallel.zero_stage=2", *_OFFLOAD)),
    "zero3_offload_all": Variant(overrides=("parallel.zero_stage=3", *_OFFLOAD, "parallel.offload_params=cpu")),
    "zero3_nvme": Variant(
        overrides=(
            "parallel.zero_stage=3",
            "parallel.offload_optimizer=nvme",
            "parallel.offload_params=nvme",
            "parallel.nvme_path=/local_nvme",
        ),
    ),
    "zeropp": Variant(
        overrides=(
            "parallel.zero_stage=3",
            f"parallel.hpz={GPUS_PER_NODE}",
            "parallel.quantized_weights=true",
            "parallel.quantized_gradients=true",
        ),
        nodes=2,
    ),
    "pipeline_zero1": Variant(overrides=("parallel.zero_stage=1", "parallel.pp=2"), trainer=False),
    "3d": Variant(
        overrides=(
            "model.name_or_path=gpt2-large",  # XL's 25 heads cannot be shared by two ranks
            "parallel.zero_stage=1",
            "parallel.tp=2",
            "parallel.pp=2",
            "parallel.sequence_parallel=true",
        ),
        trainer=False,
    ),
}


def configs() -> dict[str, dict[str, Any]]:
    """File name -> DeepSpeed config."""
    out = {}
    for name, variant in VARIANTS.items():
        job = _job(variant)
        out[f"{name}.json"] = job.config
        if variant.trainer:
            out[f"{name}_auto.json"] = trainer_config(job)
    return out


def main(folder: Path) -> None:
    """Write every file."""
    for name, config in configs().items():
        (folder / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _job(variant: Variant) -> ConfigJob:
    ranks = variant.nodes * GPUS_PER_NODE
    path = HERE.parent / "recipes" / "gpt2" / "gpt2-xl-pretrain.yaml"
    recipe = load_recipe(path, variant.overrides, world_size=ranks, layout="z3-recompute")
    shape = shape_of(recipe.model.name_or_path)
    layout = recipe.layout(ranks)
    return ConfigJob(
        recipe=recipe,
        layout=layout,
        batch=recipe.resolve_batch(layout),
        shape=shape,
        nodes=variant.nodes,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
