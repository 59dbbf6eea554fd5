"""Every rank builds its own shard and no more: the same weights in every layout, read or drawn, in bounded memory."""

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.errors import ModelError
from toolkit.recipe import Recipe

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]

LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "dp2-z3": (2, {"zero_stage": 3}),
    "dp4-z3": (4, {"zero_stage": 3}),
    "dp2-tp2-z3": (4, {"tp": 2, "zero_stage": 3}),
}
ROWS = 4096
"""Rows of a vocabulary that are drawn or read at once."""


def build(recipe: Recipe, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, cut) of this rank, as the engines' factory builds them."""
    import torch.distributed as dist

    from toolkit.parallel.groups import ParallelGroups
    from toolkit.train.cut import ModelCut
    from toolkit.train.engines.deepspeed_engine import zero3_sharder
    from toolkit.train.model import build_model, load_config
    from toolkit.train.preflight import deepspeed_config

    device = torch.device("cpu")
    layout = recipe.layout(dist.get_world_size())
    cut = ModelCut(recipe, ParallelGroups.create(layout), device) if layout.tp > 1 or layout.pp > 1 else None
    sharder = None
    if layout.zero_stage == 3:
        config = deepspeed_config(recipe, layout, recipe.resolve_batch(layout), load_config(recipe.model), device)
        assert config is not None
        sharder = zero3_sharder(config, dtype, cut)
    return build_model(recipe, dtype=dtype, part=cut, on_layer=sharder), cut


# --- memory ---


class HostMemory(TorchDispatchMode):
    """Counts the bytes of CPU tensors while it is entered. What nobody has written to yet takes no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [value for value in tree_tensors((args, kwargs)) if not value.is_meta]
        inputs = {value.untyped_storage()._cdata for value in read}
        result = func(*args, **kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._count(value)
        if "empty" not in func.__name__:
            for value in tree_tensors(result):
                if value.device.type == "cpu" and value.untyped_storage()._cdata not in inputs:
                    self._count(value)
        return result

    def _count(self, values: Any) -> None:
        for value in tree_tensors(values):
            if value.device.type != "cpu":
                continue
            storage = value.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._known:
                continue

            def freed(_: object, key: int = key, size: int = size) -> None:
                del self._known[key]
                self.bytes -= size

            self._known[key] = weakref.ref(storage, freed)
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)


def tree_tensors(values: Any) -> list[torch.Tensor]:
    from torch.utils._pytree import tree_leaves

    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one rank needed. All in bytes."""

    peak: int
    shard: int
    """Parameters and buffers of the finished model."""
    layer: int
    """A whole decoder layer in fp32."""
    vocabulary: int
    """A whole embedding."""
    rows: int
    whole: int

    def bound(self, *, zero3: bool) -> int:
        """DeepSpeed shards a parameter that is there, so ZeRO-3 needs the embedding whole once; nothing else does."""
        at_once = max(self.layer, self.vocabulary) if zero3 else self.layer
        return self.shard + at_once + self.rows


def shard_bytes(model: torch.nn.Module) -> int:
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]
    return sum(value.numel() * value.element_size() for value in [*held, *model.buffers()])


def sizes(recipe: Recipe) -> tuple[int, int, int, int]:
    """(a layer, an embedding, a block of its rows, the whole model) in bytes of fp32."""
    from transformers import AutoModelForCausalLM

    from toolkit.train.model import load_config
    from toolkit.train.weights.part import decoder_layers

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(recipe.model))
    model.tie_weights()
    embedding = model.get_input_embeddings().weight
    layer, whole = (sum(p.numel() for p in module.parameters()) for module in (decoder_layers(model)[0], model))
    return 4 * layer, 4 * embedding.numel(), 4 * ROWS * embedding.shape[1], 4 * whole


def counted(recipe: Recipe, dtype: torch.dtype) -> Memory:
    layer, vocabulary, rows, whole = sizes(recipe)
    with HostMemory() as memory:
        model, _ = build(recipe, dtype)
    shard = shard_bytes(model)
    return Memory(
        peak=memory.peak_bytes, shard=shard, layer=layer, vocabulary=vocabulary, rows=rows, whole=whole
    )


def resident(warm: Recipe, recipe: Recipe) -> Memory:
    """The same by what the kernel says. `warm`: a small model, so that code is in memory before the count."""
    import ctypes

    # Each tensor a mapping of its own, which goes when the tensor goes: malloc.h, M_MMAP_THRESHOLD and M_MMAP_MAX.
    libc = ctypes.CDLL(None)
    assert libc.mallopt(-3, 1 << 16)
    assert libc.mallopt(-4, 1 << 16)
    layer, vocabulary, rows, whole = sizes(recipe)
    build(warm)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    before = status("VmRSS")
    model, _ = build(recipe)
    peak = status("VmHWM") - before
    return Memory(peak=peak, shard=shard_bytes(model), layer=layer, vocabulary=vocabulary, rows=rows, whole=whole)


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


# Many layers and a large vocabulary: whoever holds either whole is far above the bound.
DEEP = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 12_001,
    "tie_word_embeddings": False,
}
LARGE = DEEP | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24, "vocab_size": 24_001}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, make_recipe: Make) -> Callable[..., Path]:
    """A model saved by transformers, made once for each of its settings."""
    known: dict[str, Path] = {}

    def save(name: str, overrides: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        from toolkit.train.model import build_model

        key = json.dumps([name, overrides, str(dtype), options])
        if key not in known:
            folder = known[key] = tmp_path_factory.mktemp("model")
            recipe = make_recipe(model={"name_or_path": name, "overrides": overrides}, train__seed=5)
            build_model(recipe, dtype=dtype).save_pretrained(folder, **options)
        return known[key]

    return save


def model_section(init: str, name: str, overrides: dict[str, Any], saved: Callable[..., Path]) -> dict[str, Any]:
    if init == "random":
        return {"name_or_path": name, "overrides": overrides}
    return {"name_or_path": str(saved(name, overrides)), "init": "pretrained"}


@pytest.mark.parametrize("init", ["random", "pretrained"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_holds_more_than_its_shard_and_one_layer(
    make_recipe: Make, ranks: Ranks, saved: Callable[..., Path], layout: str, init: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    recipe = make_recipe(model=model_section(init, "llama-tiny", DEEP, saved), parallel=parallel)
    for memory in ranks(counted, world_size, recipe, torch.float32):
        bound = 1.02 * memory.bound(zero3="z3" in layout)
        assert memory.shard < memory.peak <= bound, memory
        assert bound < 0.85 * memory.whole


def test_layers_are_cast_one_by_one(make_recipe: Make, ranks: Ranks) -> None:
    """Drawn in fp32, kept in bf16: only the layer in the making is there in both."""
    recipe = make_recipe(model={"name_or_path": "llama-tiny", "overrides": DEEP}, parallel={"tp": 2})
    for memory in ranks(counted, 2, recipe, torch.bfloat16):
        assert memory.peak <= 1.02 * (memory.bound(zero3=False) + memory.layer / 2), memory


@pytest.mark.parametrize("init", ["random", "pretrained"])
@pytest.mark.parametrize("layout", ["tp4", "pp4", "dp4-z3"])
def test_the_kernel_sees_no_more_than_shard_and_layer_either(
    make_recipe: Make, ranks: Ranks, saved: Callable[..., Path], layout: str, init: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    warm = make_recipe(model=model_section(init, "llama-tiny", DEEP | {"num_hidden_layers": 4}, saved), parallel=parallel)
    recipe = make_recipe(model=model_section(init, "llama-tiny", LARGE, saved), parallel=parallel)
    for memory in ranks(resident, world_size, warm, recipe):
        # 5 % and 8 MB for what an allocator keeps.
        bound = 1.05 * memory.bound(zero3="z3" in layout) + 8e6
        assert memory.peak <= bound, memory
        assert bound < 0.85 * memory.whole


def test_the_meter_sees_a_tensor_that_lives_too_long() -> None:
    with HostMemory() as memory:
        first = torch.zeros(1000)
        unused = torch.empty(10**9)
        torch.ones(1000).add_(first[:1])
        second = unused[:0].new_zeros(1000)
    assert memory.peak_bytes == 12_000 - 4_000
    assert memory.bytes == 4 * (first.numel() + second.numel())
