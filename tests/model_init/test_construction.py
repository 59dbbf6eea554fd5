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
from daily import daily
from nonempty import nonempty
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.errors import ModelError

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
}
MIXED = {
    "tp2-pp2": LAYOUTS["tp2-pp2"],
    "pp3": (3, {"pp": 3}),
    "dp2-tp2-z3": (4, {"tp": 2, "zero_stage": 3}),
    "dp2-z3": LAYOUTS["dp2-z3"],
}
EXPERTS = {
    "dp4-ep4": (4, {"ep": 4}),
    "dp4-ep2-z3": (4, {"ep": 2, "zero_stage": 3}),
    "tp2-dp2-ep2": (4, {"tp": 2, "ep": 2}),
}
INITS = ("random", "pretrained")
ROWS = 4096
"""Rows of a vocabulary that are drawn or read at once."""


def build(recipe: Recipe, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, partition) of this rank, as the engines' factory builds them."""
    import torch.distributed as dist

    from toolkit.engines.deepspeed_engine import zero3_sharder
    from toolkit.model_init.build_model import build_model, load_config
    from toolkit.model_init.model_partition import ModelPartition
    from toolkit.parallel.groups import ParallelGroups
    from toolkit.training.preflight import deepspeed_config

    device = torch.device("cpu")
    job = Job.of(recipe, dist.get_world_size())
    layout = job.layout
    is_split = layout.tp * layout.pp * layout.ep > 1
    partition = ModelPartition(job, ParallelGroups.create(layout), device) if is_split else None
    sharder = None
    if layout.zero_stage == 3:
        config = deepspeed_config(job, load_config(recipe.model), device)
        assert config is not None
        sharder = zero3_sharder(config, partition)
    return build_model(recipe, dtype=dtype, partition=partition, on_layer=sharder), partition


@pytest.fixture(autouse=True, scope="module")
def imported(ranks: Ranks, make_recipe: Make) -> None:
    """What every rank would import anew, and count as memory, is here before they fork."""
    import toolkit.engines.deepspeed_engine
    import toolkit.model_init.model_partition
    import toolkit.training.preflight  # noqa: F401
    from toolkit.model_init.build_model import build_model

    for name in ("llama-tiny", "gpt2-tiny"):
        build_model(make_recipe(model={"name_or_path": name}))


# --- memory ---


class HostMemory(TorchDispatchMode):
    """Counts the bytes of CPU tensors while it is entered. What nobody has written to yet takes no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = tree_tensors((args, kwargs or {}))
        inputs = {value.untyped_storage()._cdata for value in read if not value.is_meta}
        result = func(*args, **(kwargs or {}))
        if read and not inputs:
            return result
        if func is torch.ops.aten.set_.source_Storage:  # a view of a file
            return result
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

    from toolkit.model_init.build_model import load_config
    from toolkit.model_init.model_modules import decoder_layers

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
    return Memory(peak=memory.peak_bytes, shard=shard, layer=layer, vocabulary=vocabulary, rows=rows, whole=whole)


def count_all(recipes: dict[str, Recipe]) -> dict[str, Memory]:
    return {init: counted(recipe, torch.float32) for init, recipe in recipes.items()}


def resident(warm: Recipe, recipe: Recipe) -> Memory:
    """The same by what the kernel says. `warm`: a small model, so that code is in memory before the count."""
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


# Many layers and a large vocabulary: a rank that holds either in full is far above the bound.
DEEP = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 6001,
    "tie_word_embeddings": False,
}
MIXTURE = DEEP | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 192, "num_local_experts": 8}
LARGE = DEEP | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "vocab_size": 16_001}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, make_recipe: Make) -> Callable[..., Path]:
    """A model saved by transformers, made once for each of its settings."""
    known: dict[str, Path] = {}

    def save(name: str, overrides: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        from toolkit.model_init.build_model import build_model

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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_holds_more_than_its_shard_and_one_layer(
    make_recipe: Make, ranks: Ranks, saved: Callable[..., Path], layout: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    recipes = {
        init: make_recipe(model=model_section(init, "llama-tiny", DEEP, saved), parallel=parallel) for init in INITS
    }
    for measured in nonempty(ranks(count_all, world_size, recipes)):
        for init, memory in nonempty(measured.items()):
            bound = 1.02 * memory.bound(zero3="z3" in layout)
            assert memory.shard <= memory.peak <= bound, (init, memory)
            assert bound < 0.85 * memory.whole


@pytest.mark.parametrize("layout", daily(EXPERTS, lambda i, layout: layout == "dp4-ep2-z3"))
def test_no_rank_holds_more_than_its_experts_and_one_layer(
    make_recipe: Make, ranks: Ranks, saved: Callable[..., Path], layout: str
) -> None:
    world_size, parallel = EXPERTS[layout]
    models = {init: model_section(init, "mixtral-8x7b", MIXTURE, saved) for init in INITS}
    recipes = {init: make_recipe(model=model, parallel=parallel) for init, model in models.items()}
    for measured in nonempty(ranks(count_all, world_size, recipes)):
        for init, memory in nonempty(measured.items()):
            bound = 1.02 * memory.bound(zero3="z3" in layout)
            assert memory.shard <= memory.peak <= bound, (init, memory)
            assert bound < 0.75 * memory.whole


def test_layers_are_cast_one_by_one(make_recipe: Make, ranks: Ranks) -> None:
    """Drawn in fp32, kept in bf16: only the layer in the making is there in both."""
    recipe = make_recipe(model={"name_or_path": "llama-tiny", "overrides": DEEP}, parallel={"tp": 2})
    for memory in nonempty(ranks(counted, 2, recipe, torch.bfloat16)):
        assert memory.peak <= 1.02 * (memory.bound(zero3=False) + memory.layer / 2), memory


@pytest.mark.parametrize(
    ("layout", "init"), [("tp4", "random"), ("tp4", "pretrained"), ("pp4", "random"), ("dp4-z3", "pretrained")]
)
def test_the_kernel_sees_no_more_than_shard_and_layer_either(
    make_recipe: Make, ranks: Ranks, saved: Callable[..., Path], layout: str, init: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    shallow = DEEP | {"num_hidden_layers": 4, "vocab_size": 3001}
    warm = make_recipe(model={"name_or_path": "llama-tiny", "overrides": shallow}, parallel=parallel)
    recipe = make_recipe(model=model_section(init, "llama-tiny", LARGE, saved), parallel=parallel)
    for memory in nonempty(ranks(resident, world_size, warm, recipe)):
        # 5 % and 8 MB for the allocator and for Python's own objects.
        bound = 1.05 * memory.bound(zero3="z3" in layout) + 8e6
        assert memory.peak <= bound, memory
        assert bound < 0.6 * memory.whole


def test_the_meter_sees_a_tensor_that_lives_too_long() -> None:
    with HostMemory() as memory:
        first = torch.zeros(1000)
        unused = torch.empty(10**9)
        torch.ones(1000).add_(first[:1])
        second = unused[:0].new_zeros(1000)
    assert memory.peak_bytes == 12_000 - 4_000
    assert memory.bytes == 4 * (first.numel() + second.numel())


# --- values ---


def compare(recipes: dict[str, Recipe]) -> dict[str, tuple[set[str], list[str]]]:
    """For each recipe: the parameters that this rank holds, and those of them that are not the plain model's."""
    import deepspeed

    from toolkit.model_init.build_model import build_model
    from toolkit.parallel.shard import shard_of

    found = {}
    for key, recipe in recipes.items():
        model, partition = build(recipe)
        plain = dict(build_model(recipe).named_parameters(remove_duplicate=False))
        held, wrong = set(), []
        for name, parameter in model.named_parameters():
            whole = plain[name].detach() if partition is None else plain[shard_of(parameter).name].detach()
            wanted = whole if partition is None else shard_of(parameter).take(whole)
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                if not torch.equal(parameter, wanted):
                    wrong.append(name)
            held.add(name if partition is None else shard_of(parameter).name)
        found[key] = (held, wrong)
    return found


GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 9001}
LLAMA = DEEP | {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 4, "vocab_size": 9001}
MODELS = {
    "gpt2 tied": ("gpt2-tiny", GPT2),
    "gpt2 untied": ("gpt2-tiny", GPT2 | {"tie_word_embeddings": False}),
    "llama tied": ("llama-tiny", LLAMA | {"tie_word_embeddings": True}),
    "llama untied": ("llama-tiny", LLAMA),
}


@pytest.mark.parametrize("layout", MIXED)
def test_every_layout_has_the_weights_of_the_plain_model(
    make_recipe: Make, ranks: Ranks, saved: Callable[..., Path], layout: str
) -> None:
    world_size, parallel = MIXED[layout]
    recipes = {
        f"{model}, {init}": make_recipe(model=model_section(init, *MODELS[model], saved), parallel=parallel)
        for model in MODELS
        for init in INITS
    }
    results = ranks(compare, world_size, recipes)
    for key, recipe in nonempty(recipes.items()):
        assert [wrong for _, wrong in (result[key] for result in results)] == [[]] * world_size, key
        assert set().union(*(result[key][0] for result in results)) == names(recipe), key


def names(recipe: Recipe) -> set[str]:
    from toolkit.model_init.build_model import build_model

    return {name for name, _ in build_model(recipe).named_parameters()}


def test_a_layout_reads_bf16_files_into_fp32(make_recipe: Make, ranks: Ranks, saved: Callable[..., Path]) -> None:
    folder = saved("llama-tiny", LLAMA, torch.bfloat16, max_shard_size="300KB")
    assert (folder / "model.safetensors.index.json").exists()
    recipe = make_recipe(model={"name_or_path": str(folder), "init": "pretrained"}, parallel={"tp": 2})
    assert [wrong for _, wrong in (result["it"] for result in ranks(compare, 2, {"it": recipe}))] == [[], []]


def count_bytes_read(recipe: Recipe) -> tuple[int, int]:
    """(bytes asked of files, bytes of this rank's parameters)."""
    from toolkit.model_init.pretrained_weights import StoredTensor

    asked = 0
    read = StoredTensor._read

    def count(stored: StoredTensor, ranges: tuple[slice, ...]) -> torch.Tensor:
        nonlocal asked
        values = read(stored, ranges)
        asked += values.numel() * values.element_size()
        return values

    StoredTensor._read = count  # type: ignore[method-assign]
    model, _ = build(recipe)
    return asked, sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2-pp2"])
def test_only_what_a_rank_keeps_is_read(
    make_recipe: Make, ranks: Ranks, saved: Callable[..., Path], layout: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    # An even vocabulary, for padding is kept and not read.
    section = model_section("pretrained", "llama-tiny", LLAMA | {"vocab_size": 9000}, saved)
    for asked, kept in nonempty(ranks(count_bytes_read, world_size, make_recipe(model=section, parallel=parallel))):
        assert asked == kept


def test_ranks_refuse_a_checkpoint_with_a_file_missing(
    make_recipe: Make, ranks: Ranks, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved("llama-tiny", LLAMA, torch.bfloat16, max_shard_size="300KB")
    for file in folder.iterdir():
        if not file.name.startswith("model-00002"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    recipe = make_recipe(model={"name_or_path": str(tmp_path), "init": "pretrained"}, parallel={"tp": 2})
    with pytest.raises(
        ModelError, match=r"model-00002-of-.*\.safetensors is missing, but its index names it"
    ) as caught:
        ranks(build_only, 2, recipe)
    assert "\n" not in str(caught.value)


def build_only(recipe: Recipe) -> None:
    build(recipe)
