"""What is trained on a GPU for its speed: the models, the layouts, and how much of an 8B model fits."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from measure.our_run import make_recipe

from toolkit.config.recipe import Recipe
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.hardware import Gpu
from toolkit.planner.run_memory import memory_request

WARMUP = 3
FEWEST_LAYERS = 2
CUT_SHARE = 0.9
"""Of the GPU, for the layers of a model that does not fit as a whole: others take more than the toolkit's estimate."""
MFU_TARGET = 0.55
TRAINER_TARGET = 1.10
ESTIMATE_TARGET = 0.05
TOOLKIT, COMPILED, TRAINER, TORCH = "toolkit", "toolkit, compiled", "Trainer", "torch, compiled"
LIGER = "toolkit, Liger's kernels"
OURS = (TOOLKIT, COMPILED, LIGER)
SIDES = (*OURS, TRAINER, TORCH)
FIELDS: dict[str, dict[str, dict[str, Any]]] = {
    TOOLKIT: {},
    COMPILED: {"train": {"compile": True}, "model": {"loss": "auto"}},
    LIGER: {"model": {"kernels": "liger", "loss": "auto"}},
}
"""What makes the toolkit's step fast: compiled decoder layers or Liger's kernels, and a loss without full logits."""
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model on a number of GPUs."""

    name: str
    model: str
    overrides: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    """What of the model is trained, where it is not all of it."""
    seq_len: int
    micro_batch_size: int
    accumulation: int
    parallel: dict[str, Any] = field(default_factory=lambda: {"zero_stage": 2})
    more: dict[str, Any] = field(default_factory=dict)
    """Other fields of the recipe's model."""
    ranks: int = 1
    sides: tuple[str, ...] = (TOOLKIT, COMPILED, TRAINER, TORCH)
    traced: tuple[str, ...] = ()
    """The sides of which one step is traced."""
    has_target: bool = False
    layer_field: str = ""
    """The field of the config with the number of layers, where some may be left out so that it fits."""
    layers: int = 0
    """All of them."""
    steps: int = WARMUP + 8

    @property
    def label(self) -> str:
        return f"{self.name}, {self.note}" if self.note else self.name

    @property
    def replicas(self) -> int:
        sizes = (self.parallel.get(axis, 1) for axis in ("tp", "pp", "ulysses"))
        shared = 1
        for size in sizes:
            shared *= size
        return self.ranks // shared

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.micro_batch_size * self.accumulation * self.replicas * self.seq_len

    def recipe(self, folder: Path) -> Recipe:
        """Its recipe, in bf16, with AdamW."""
        size = self.micro_batch_size
        batch = {"micro_batch_size": size, "global_batch_size": size * self.accumulation * self.replicas}
        return make_recipe(
            folder,
            model={"name_or_path": self.model, "overrides": self.overrides, **self.more},
            seq_len=self.seq_len,
            batch=batch,
            precision="bf16",
            parallel=self.parallel,
            train={"steps": self.steps},
            log={"level": "warning"},
        )


def estimate(recipe: Recipe, ranks: int, gpu: Gpu) -> MemoryBreakdown:
    """What a rank takes at its peak: of the stage that takes most."""
    layout = recipe.layout(ranks)
    stages = memory_request(recipe, layout, recipe.resolve_batch(layout), gpu=gpu).stages()
    return max(stages, key=lambda stage: stage.allocated).replayed()


def fitted(setup: Setup, folder: Path, gpu: Gpu) -> Setup:
    """The setup with as many layers as fit on the GPU, and then as few samples at a time as it takes.

    The estimate is linear in the layers, so that two of them tell how many there is room for.
    """
    whole = estimate(setup.recipe(folder), setup.ranks, gpu)
    if whole.fits:
        return setup
    if setup.layers:
        few = estimate(with_layers(setup, FEWEST_LAYERS).recipe(folder), setup.ranks, gpu)
        each = (whole.total - few.total) / (setup.layers - FEWEST_LAYERS)
        room = CUT_SHARE * gpu.memory_bytes - few.total
        if room >= 0:
            return with_layers(setup, FEWEST_LAYERS + int(room / each) // 2 * 2)
    if setup.micro_batch_size > 1:
        half = setup.micro_batch_size // 2
        return fitted(replace(setup, micro_batch_size=half, accumulation=2 * setup.accumulation), folder, gpu)
    needed, there = (f"{size / 2**30:.1f} GiB" for size in (whole.total, gpu.memory_bytes))
    raise MemoryError(f"needs {needed} by the estimate, and the GPU has {there}")


def with_layers(setup: Setup, layers: int) -> Setup:
    """The first layers of a model: their sizes are the model's, so that its MFU is that of the whole, nearly."""
    overrides = setup.overrides | {setup.layer_field: layers}
    return replace(setup, overrides=overrides, note=f"{layers} of {setup.layers} layers")


LORA = {"lora": {"r": 16, "alpha": 32, "targets": ["all-linear"]}}
ONE_GPU = [
    Setup(
        name="Llama-3.2-1B",
        model="llama-3.2-1b",
        seq_len=4096,
        micro_batch_size=2,
        accumulation=4,
        has_target=True,
        sides=(TOOLKIT, COMPILED, LIGER, TRAINER, TORCH),
        traced=(TOOLKIT, COMPILED),
    ),
    Setup(
        name="GPT-2 124M",
        model="gpt2",
        overrides=NO_DROPOUT,
        seq_len=1024,
        micro_batch_size=16,
        accumulation=4,
        traced=(TOOLKIT,),
    ),
    Setup(
        name="Llama-3.1-8B",
        model="llama-3.1-8b",
        seq_len=4096,
        micro_batch_size=1,
        accumulation=8,
        has_target=True,
        layer_field="num_hidden_layers",
        layers=32,
    ),
    Setup(
        name="Llama-3.1-8B",
        note="LoRA",
        model="llama-3.1-8b",
        seq_len=4096,
        micro_batch_size=1,
        accumulation=4,
        more=LORA,
        parallel={"zero_stage": 2, "recompute": "full"},
        sides=(TOOLKIT, TRAINER),
    ),
]
TINY = [
    Setup(
        name="llama-tiny",
        model="llama-tiny",
        seq_len=64,
        micro_batch_size=2,
        accumulation=2,
        has_target=True,
        traced=(TOOLKIT, COMPILED),
    ),
    Setup(name="gpt2-tiny", model="gpt2-tiny", overrides=NO_DROPOUT, seq_len=64, micro_batch_size=4, accumulation=1),
    Setup(
        name="llama-tiny",
        note="LoRA",
        model="llama-tiny",
        seq_len=64,
        micro_batch_size=2,
        accumulation=2,
        more=LORA,
        sides=(TOOLKIT, TRAINER),
    ),
]


def layouts(ranks: int, *, tiny: bool) -> list[Setup]:
    """One model in several layouts of `ranks` GPUs, the same tokens in each step."""
    model = "llama-tiny" if tiny else "llama-3.1-8b"
    grids: Sequence[dict[str, Any]] = (
        {"zero_stage": 3},
        {"zero_stage": 1, "tp": 2, "sequence_parallel": True},
        {"zero_stage": 1, "pp": 2},
        {"zero_stage": 1, "tp": 2, "pp": 2, "sequence_parallel": True},
    )
    setups: list[Setup] = []
    for grid in grids:
        size = int(grid.get("tp", 1)) * int(grid.get("pp", 1))
        if ranks % size:
            continue
        one = Setup(
            name="Llama-3.1-8B" if not tiny else model,
            model=model,
            seq_len=64 if tiny else 4096,
            micro_batch_size=1,
            accumulation=4 * size if ranks > 1 else 4,
            parallel=grid | {"recompute": "full"},
            ranks=ranks,
            sides=(TOOLKIT,),
            traced=() if tiny and setups else (TOOLKIT,),  # of a rehearsal, one layout shows that it runs
        )
        setups.append(one)
    return setups


def describe(setup: Setup) -> str:
    """What a step is, in a few words."""
    batch = f"{setup.micro_batch_size} x {setup.seq_len} tokens, accumulation {setup.accumulation}"
    return f"{setup.label}: {batch}, {json.dumps(setup.parallel)}"
