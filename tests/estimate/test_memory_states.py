"""Model states to the byte: the estimate against every tensor that a live engine holds, on every rank.

A few cells run in every test run, chosen so that each formula is met; the others are marked `whole`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_memory import Cell, measure

from toolkit.config.recipe import Recipe
from toolkit.estimate.model_facts import ModelFacts
from toolkit.planner.run_memory import model_config

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Cell]]

_TINY: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 90,
    "vocab_size": 321,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _TINY | _GROUPED | {"model_type": "llama", "tie_word_embeddings": False},
    "tied llama": _TINY | _GROUPED | {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": _TINY | _GROUPED | {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16},
    "gemma2": _TINY | _GROUPED | {"model_type": "gemma2", "head_dim": 16},
    "gpt_neox": _TINY | {"model_type": "gpt_neox"},
    "phi": _TINY | {"model_type": "phi"},
    # A quarter of a head's features turn, and their number must be even.
    "stablelm": _TINY | _GROUPED | {"model_type": "stablelm", "hidden_size": 64},
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 48,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 321,
        "pad_token_id": 0,
    },
    "falcon": {
        "model_type": "falcon",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 321,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "ffn_dim": 90,
        "vocab_size": 321,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    },
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "n_embd": 48,
        "n_layer": 4,
        "n_head": 4,
        "n_inner": 90,
        "n_positions": 64,
        "vocab_size": 321,
    },
}
MODELS |= {
    "olmoe": _TINY
    | _GROUPED
    | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96},
    # Experts with biases.
    "gpt_oss": _TINY
    | _GROUPED
    | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    # Its first layer is dense, and the others have experts.
    "deepseek_v3": _TINY
    | {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 4}
    | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
}
LORA = {"lora": {"r": 3, "targets": ["all-linear"]}}
EAGER = ("bloom", "gemma2", "gpt_oss")
"""transformers has no other attention for them."""
OFFLOAD = {"offload_optimizer": "cpu"}
OFFLOAD_ALL = OFFLOAD | {"offload_params": "cpu"}


@dataclass(frozen=True)
class Setting:
    """One cell."""

    layout: str
    precision: str = "bf16"
    model: str = "gpt2"
    parallel: dict[str, Any] = field(default_factory=dict)
    """Beside the layout's axes."""
    accumulates_in: str | None = None
    """Instead of fp32."""
    zero: dict[str, Any] = field(default_factory=dict)
    """Other values of DeepSpeed's zero_optimization."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    trains: dict[str, Any] = field(default_factory=dict)
    """Of the recipe's model: which parameters train."""
    global_batch_size: int = 16
    in_every_run: bool = False

    def __str__(self) -> str:
        parts = [self.model, self.layout, self.precision, *(k.removeprefix("offload_") for k in self.parallel)]
        parts += [f"sums-{self.accumulates_in}"] if self.accumulates_in else []
        parts += [*self.zero, *self.optimizer.values(), *self.trains]
        parts += [f"batch{self.global_batch_size}"] if self.global_batch_size != 16 else []
        return "-".join(map(str, parts)).replace(" ", "-")


def settings() -> Iterator[Setting]:  # noqa: C901 - one case a line
    for stage in range(4):
        for precision in ("fp32", "bf16", "fp16"):
            for dp in (1, 2, 4):
                often = (stage, precision, dp) in {(0, "bf16", 2), (2, "fp32", 2), (1, "fp16", 2), (3, "bf16", 4)}
                yield Setting(f"dp{dp}-z{stage}", precision, in_every_run=often)
            if stage:
                yield Setting(
                    f"dp2-z{stage}", precision, parallel=OFFLOAD, in_every_run=(stage, precision) == (2, "fp32")
                )
        for precision in ("bf16", "fp16"):
            if stage:
                often = (stage, precision) == (2, "bf16")
                yield Setting(f"dp2-z{stage}", precision, accumulates_in=precision, in_every_run=often)
                yield Setting(f"dp2-z{stage}", precision, accumulates_in=precision, parallel=OFFLOAD)
        for precision in ("fp32", "bf16"):
            yield Setting(f"tp2-z{stage}", precision, "llama", in_every_run=(stage, precision) == (3, "fp32"))
            yield Setting(f"dp2-z{stage}", precision, "qwen3", global_batch_size=4)
    for dp in (1, 2):
        for precision in ("fp32", "bf16"):
            yield Setting(f"dp{dp}-z3", precision, parallel=OFFLOAD_ALL, in_every_run=(dp, precision) == (2, "bf16"))
            for model in ("llama", "tied llama"):
                for stage in (0, 1):
                    often = (dp, precision, model, stage) == (1, "bf16", "tied llama", 1)
                    yield Setting(f"dp{dp}-pp2-z{stage}", precision, model, in_every_run=often)
    yield Setting("tp2-pp2-z1", "bf16", "qwen3", parallel={"sequence_parallel": True}, in_every_run=True)
    yield Setting("dp2-tp2-pp2-z1", "bf16", "llama")
    yield Setting("dp2-tp2-z2", "bf16", "llama")
    yield Setting("pp3-z1", "fp32", "tied llama")
    yield Setting("pp2-z1", "bf16", "llama", accumulates_in="bf16")
    for model in ("gpt_neox", "phi", "stablelm", "bloom", "opt", "gemma2", "falcon", "gpt_bigcode"):
        yield Setting("tp2-z1", "fp32", model)
        yield Setting("pp2-z1", "bf16", model)
    for stage in range(4):
        yield Setting(f"dp2-z{stage}", "bf16", "olmoe", in_every_run=stage == 3)
        yield Setting(f"dp2-z{stage}", "bf16", "deepseek_v3", in_every_run=stage == 1)
    # Experts that replicas share out, and that tensor-parallel ranks do.
    for stage in range(4):
        yield Setting(f"dp2-ep2-z{stage}", "bf16", "olmoe", in_every_run=stage == 1)
        yield Setting(f"dp4-ep2-z{stage}", "fp32", "gpt_oss", in_every_run=stage == 3)
        yield Setting(f"dp4-ep2-z{stage}", "bf16", "olmoe")
    yield Setting("dp2-ep2-z1", "bf16", "olmoe", accumulates_in="bf16")
    for stage in (1, 3):
        yield Setting(f"dp2-ep2-tp2-z{stage}", "bf16", "olmoe")
        yield Setting(f"tp2-z{stage}", "bf16", "gpt_oss")
        yield Setting(f"tp2-z{stage}", "bf16", "gpt_oss", parallel={"experts": "inner"})
    yield Setting("dp2-ep2-pp2-z1", "bf16", "olmoe")
    # Not DeepSeek's: in a pipeline 4 bytes of its router's bias stay twice, for each expert of a layer.
    yield Setting("pp2-z1", "bf16", "olmoe")
    # One key-value head that both ranks hold makes two parameters of a fused projection, each with a step counter.
    yield Setting("tp2-z0", "fp32", "gpt_bigcode", in_every_run=True)
    for threshold in (0, 10**6):
        yield Setting("dp4-z3", "bf16", zero={"stage3_param_persistence_threshold": threshold})
    yield Setting("dp2-z3", "fp32", zero={"sub_group_size": 20_000})
    for dp, precision in ((4, "bf16"), (2, "fp32")):
        yield Setting(f"dp{dp}-z3", precision, parallel={"hpz": 2}, in_every_run=dp == 4)
    yield Setting("dp2-z3", "bf16", parallel={"hpz": 2}, trains=LORA)
    # What frozen parameters cost: nothing but themselves.
    for trains in (LORA, {"freeze": ["*.mlp.*"]}):
        for layout in ("dp2-z0", "dp2-z1", "dp2-z2", "dp2-z3", "pp2-z0", "pp2-z1"):
            for precision in ("fp32", "bf16"):
                often = (layout, precision, "lora" in trains) in {("dp2-z3", "bf16", True), ("pp2-z1", "fp32", False)}
                yield Setting(layout, precision, trains=trains, in_every_run=often)
        yield Setting("dp2-z2", "fp32", parallel=OFFLOAD, trains=trains)
    yield Setting("tp2-z1", "fp32", "llama", trains={"freeze": ["*.mlp.*"]})
    for layout, model in (("tp2-z1", "llama"), ("tp2-z3", "qwen3"), ("tp2-pp2-z1", "qwen3")):
        yield Setting(layout, "bf16", model, trains=LORA)
    for optimizer in ({"name": "sgd", "momentum": 0.9}, {"name": "sgd"}, {"name": "lion"}, {"name": "muon"}):
        for stage in (1, 3):
            yield Setting(f"dp2-z{stage}", "bf16", optimizer=optimizer)
    for layout in ("dp2-z0", "dp2-z2", "tp2-z1", "pp2-z1", "dp2-z3"):
        yield Setting(layout, "fp32", "qwen3", optimizer={"name": "muon"}, in_every_run=layout == "dp2-z2")
        yield Setting(layout, "fp32", "qwen3", optimizer={"name": "adafactor"}, in_every_run=layout == "tp2-z1")
    for optimizer in ({"name": "muon"}, {"name": "adafactor"}):
        yield Setting("dp4-ep2-z1", "bf16", "olmoe", optimizer=optimizer)
    for stage in (0, 1, 3):
        yield Setting(f"dp2-z{stage}", "bf16", optimizer={"name": "adafactor"})
        yield Setting(f"dp2-z{stage}", "bf16", optimizer={"name": "adamw8bit"})
    for layout in ("dp2-z0", "dp2-z2", "pp2-z1", "tp2-z0", "tp2-z1", "tp2-z3", "tp2-dp2-z1"):
        yield Setting(layout, "fp32", "llama", optimizer={"name": "adamw8bit"})


CELLS = [
    pytest.param(setting, id=str(setting), marks=() if setting.in_every_run else pytest.mark.whole)
    for setting in settings()
]


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories with a config.json each."""
    folders = {}
    for name, config in MODELS.items():
        folder: Path = tmp_path_factory.mktemp(name.replace(" ", "-"))
        (folder / "config.json").write_text(json.dumps(config))
        folders[name] = str(folder)
    return folders


def recipe_of(setting: Setting, make: Make, folders: dict[str, str]) -> tuple[Recipe, int]:
    """The recipe of a cell, and its number of ranks."""
    axes = {part.rstrip("0123456789"): int(part.lstrip("deptz")) for part in setting.layout.split("-")}
    stage = axes.pop("z")
    changes: dict[str, Any] = {
        "parallel": axes | {"zero_stage": stage} | setting.parallel,
        "precision": setting.precision,
        "batch": {"global_batch_size": setting.global_batch_size, "micro_batch_size": 2},
        # Odd sizes, so that flat buffers need padding.
        "overrides__vocab_size": 321,
        "overrides__n_embd": 45,
        "overrides__n_head": 3,
    }
    if setting.model != "gpt2":
        changes["model"] = {"name_or_path": folders[setting.model]}
        changes = {key: value for key, value in changes.items() if not key.startswith("overrides__")}
        if setting.model in EAGER:
            changes["model"]["attn_implementation"] = "eager"
    changes |= {f"model__{name}": value for name, value in setting.trains.items()}
    if setting.optimizer:
        changes["optimizer"] = {"lr": 1e-3} | setting.optimizer
    ranks = axes.get("dp", 1) * axes.get("tp", 1) * axes.get("pp", 1)
    return make(**changes), ranks


def change_of(setting: Setting) -> Callable[[dict[str, Any]], None]:
    """What a user's DeepSpeed config says otherwise."""

    def change(config: dict[str, Any]) -> None:
        if setting.accumulates_in is not None:
            config["data_types"] = {"grad_accum_dtype": setting.accumulates_in}
        config["zero_optimization"].update(setting.zero)

    return change


def _most_gathered(recipe: Recipe, max_live: int) -> tuple[int, int]:
    """On a rank: the most elements of weights that are whole at once, and all that are sharded."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    from toolkit.engines.deepspeed_engine import DeepSpeedEngine

    fetch, step = PartitionedParameterCoordinator._fetch_sub_module_impl, DeepSpeedEngine.train_step
    sharded: list[Any] = []
    found = 0

    def watched(self: Any, *arguments: Any) -> None:
        nonlocal found
        fetch(self, *arguments)
        whole = (one.ds_numel for one in sharded if one.ds_status != ZeroParamStatus.NOT_AVAILABLE)
        found = max(found, sum(whole))

    def train_step(self: Any, *arguments: Any, **options: Any) -> Any:
        sharded[:] = (one for one in self.model.parameters() if not one.ds_persist)
        return step(self, *arguments, **options)

    PartitionedParameterCoordinator._fetch_sub_module_impl = watched
    DeepSpeedEngine.train_step = train_step  # type: ignore[method-assign]
    limits = {"stage3_max_live_parameters": max_live, "stage3_max_reuse_distance": max_live}
    measure(recipe, lambda config: config["zero_optimization"].update(limits))
    return found, sum(one.ds_numel for one in sharded)


@pytest.mark.whole
@pytest.mark.parametrize("max_live", [2_000_000, 1_000_000_000])
def test_zero_3_gathers_ahead_until_max_live_parameters_are_whole(
    make_recipe: Make, ranks: Callable[..., list[Any]], max_live: int
) -> None:
    # A module's fetch prefetches a bucket of 2^20 elements, and so does the next one: no bucket is a bound.
    small = {"overrides__n_embd": 256, "overrides__n_layer": 6, "overrides__vocab_size": 320}
    recipe = make_recipe(parallel={"dp": 2, "zero_stage": 3}, **small)
    for most, sharded in ranks(_most_gathered, 2, recipe, max_live):
        allowed = min(max_live, sharded)
        assert allowed <= most <= allowed + 4 * 256**2


@pytest.mark.parametrize("setting", CELLS)
def test_every_rank_has_the_estimated_bytes_exactly(
    setting: Setting, make_recipe: Make, ranks: Ranks, model_folders: dict[str, str]
) -> None:
    if setting.optimizer.get("name") == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    recipe, size = recipe_of(setting, make_recipe, model_folders)
    ModelFacts.from_config(model_config(recipe))  # recorded once, before all ranks ask
    cells = ranks(measure, size, recipe, change_of(setting))
    assert [cell.measured for cell in cells] == [cell.estimated for cell in cells]
    assert [cell.measured_at_update for cell in cells] == [cell.estimated_at_update for cell in cells]
