"""Selective recomputation while training: bit for bit what training without it computes, in every engine and layout."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.config.recipe import Recipe
from toolkit.parity import LossCurve
from toolkit.parity.run.train_in_memory import train_in_memory

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]
_OVER_SCORES = (
    torch.ops.aten._softmax.default,
    torch.ops.aten._safe_softmax.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_STEPS, _LAYERS, _MICRO_BATCHES = 3, 2, 4
"""Micro-batches of a global batch."""
DROPOUT = {"overrides__resid_pdrop": 0.1, "overrides__embd_pdrop": 0.1, "overrides__attn_pdrop": 0.1}
LLAMA: dict[str, Any] = {
    "model": {
        "name_or_path": "llama-tiny",
        "overrides": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 320},
    }
}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "reference": (1, {"train__engine": "reference"}),
    "ddp": (2, {"train__engine": "ddp"}),
    "fsdp": (2, {"train__engine": "fsdp"}),
    **{f"z{stage}": (2, {"parallel": {"zero_stage": stage}}) for stage in range(4)},
    **{f"tp2-z{stage}": (2, {"parallel": {"tp": 2, "zero_stage": stage}}) for stage in range(4)},
    "tp2-z1-sp": (2, {"parallel": {"tp": 2, "zero_stage": 1, "sequence_parallel": True}}),
    "dp2-tp2-z3-sp": (4, {"parallel": {"tp": 2, "zero_stage": 3, "sequence_parallel": True}}),
    "pp2-z0": (2, {"parallel": {"pp": 2, "zero_stage": 0}}),
    "pp2-tp2-z1-sp": (4, {"parallel": {"pp": 2, "tp": 2, "zero_stage": 1, "sequence_parallel": True}}),
    "u2-z1": (2, {"parallel": {"ulysses": 2, "zero_stage": 1}}),
    "u2-z3": (2, {"parallel": {"ulysses": 2, "zero_stage": 3}}),
}
DAILY = ("fsdp", "z3", "pp2-tp2-z1-sp", "u2-z1")


class _Softmaxes(TorchDispatchMode):
    """Counts the softmaxes over scores, alone or in a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _OVER_SCORES
        return func(*args, **(kwargs or {}))


def _train(recipe: Recipe) -> tuple[LossCurve, int]:
    """On a rank: what it trained, and how often it computed attention."""
    with _Softmaxes() as softmaxes:
        curve = train_in_memory(recipe).curve
    return curve, softmaxes.count


def _check(make_recipe: Make, ranks: Ranks, name: str, **changes: Any) -> None:
    world_size, layout = LAYOUTS[name]
    parallel = layout.get("parallel", {})
    common = {"train__steps": _STEPS, **changes, **layout}
    plain, once = ranks(_train, world_size, make_recipe(**common))[0]
    selective = make_recipe(**common | {"parallel": parallel | {"recompute": "selective"}})
    recomputed, again = ranks(_train, world_size, selective)[0]
    assert (recomputed.losses, recomputed.grad_norms) == (plain.losses, plain.grad_norms)
    replicas = world_size // math.prod(parallel.get(axis, 1) for axis in ("tp", "pp", "ulysses"))
    assert again - once == _LAYERS // parallel.get("pp", 1) * _STEPS * _MICRO_BATCHES // replicas


@pytest.mark.parametrize("name", DAILY)
def test_attention_runs_again_and_training_is_the_same_bit_for_bit(make_recipe: Make, ranks: Ranks, name: str) -> None:
    _check(make_recipe, ranks, name, **DROPOUT)


@pytest.mark.whole
@pytest.mark.parametrize("drops", [True, False], ids=["dropout", "no-dropout"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_is_the_same_bit_for_bit_everywhere(
    make_recipe: Make, ranks: Ranks, name: str, attention: str, drops: bool
) -> None:
    if name.startswith("u") and attention == "eager":
        pytest.skip("DeepSpeed-Ulysses has no eager attention")
    _check(make_recipe, ranks, name, model__attn_implementation=attention, **(DROPOUT if drops else {}))


@pytest.mark.whole
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "reference"])
def test_training_in_bf16_is_the_same_bit_for_bit_everywhere(make_recipe: Make, ranks: Ranks, name: str) -> None:
    zero_stage = LAYOUTS[name][1].get("parallel", {}).get("zero_stage")
    if zero_stage == 0 and name != "z0":
        pytest.skip("a partitioned model needs ZeRO in 16 bits")
    _check(make_recipe, ranks, name, **LLAMA, precision="bf16")
