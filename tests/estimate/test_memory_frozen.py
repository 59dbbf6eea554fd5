"""Model states where few parameters train, to the byte: the estimate against live engines of DeepSpeed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_memory import Cell
from frozen_engines import CONFIG, measure
from transformers import AutoModelForCausalLM

from toolkit.errors import ConfigError, ModelError
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.recorded.recordings import parameters
from toolkit.estimate.states import TorchStates
from toolkit.estimate.trainable import Trainable
from toolkit.parallel.tiny_model import tiny_config
from toolkit.recorder.frozen import freeze

Ranks = Callable[..., list[Cell]]
LORA = "lora:r=3,targets=all-linear"


def config_of(stage: int, precision: str, **zero: Any) -> dict[str, Any]:
    """A user's own, with buckets that are small enough to be made."""
    sizes = {"reduce_bucket_size": 5000, "stage3_prefetch_bucket_size": 1000, "stage3_param_persistence_threshold": 100}
    config: dict[str, Any] = {"zero_optimization": {"stage": stage, **sizes, **zero}}
    if precision == "fp16":
        config["fp16"] = {"enabled": True}
    elif precision != "fp32":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32" if precision == "bf16, sums in fp32" else "bf16"}
    return config


OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
OFFLOAD_ALL = OFFLOAD | {"offload_param": {"device": "cpu"}}
OFTEN = {(0, "fp32", 1), (1, "bf16, sums in fp32", 2), (2, "bf16", 2), (3, "bf16", 2), (3, "fp32", 1)}
PLAIN: list[tuple[int, str, int, dict[str, Any]]] = [
    (stage, precision, dp, {})
    for stage in range(4)
    for precision in ("fp32", "bf16", "bf16, sums in fp32", "fp16")
    for dp in (1, 2)
    if stage or precision != "bf16, sums in fp32"
]
OFFLOADED: list[tuple[int, str, int, dict[str, Any]]] = [
    *((stage, precision, 2, OFFLOAD) for stage in (1, 2, 3) for precision in ("fp32", "bf16")),
    (3, "bf16, sums in fp32", 2, OFFLOAD_ALL),
    (3, "fp32", 2, {"sub_group_size": 3000}),
]


def cells() -> list[Any]:
    return [
        pytest.param(*cell, id=f"z{cell[0]}-{cell[1]}-dp{cell[2]}{''.join(f'-{key}' for key in cell[3])}",
                     marks=() if cell[:3] in OFTEN and not cell[3] else pytest.mark.whole)
        for cell in (*PLAIN, *OFFLOADED)
    ]  # fmt: skip


@pytest.mark.parametrize("trainable", [LORA, "*norm*,*embed*"])
@pytest.mark.parametrize(("stage", "precision", "dp", "zero"), cells())
def test_frozen_parameters_are_weights_and_nothing_else(
    stage: int, precision: str, dp: int, zero: dict[str, Any], trainable: str, ranks: Ranks
) -> None:
    if trainable == LORA:
        pytest.importorskip("peft")
    found = ranks(measure, dp, trainable, config_of(stage, precision, **zero))
    assert [cell.measured for cell in found] == [cell.estimated for cell in found]
    assert [cell.measured_at_update for cell in found] == [cell.estimated_at_update for cell in found]


def test_peft_keeps_adapters_in_fp32_beside_weights_in_bf16() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16), lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [v for state in optimizer.state.values() for v in state.values() if v.numel() > 1]
    params = parameters(config_text(CONFIG.to_dict()), LORA).rank_parameters()
    found = TorchStates(weight_bytes=2, trained_bytes=4, has_buckets=True).states(params, shards=1)
    assert found.resident.parameters == sum(p.nbytes for p in model.parameters())
    assert found.resident.optimizer == sum(value.nbytes for value in moments)
    assert found.complete == found.resident.buckets == sum(p.grad.nbytes for p in trained if p.grad is not None)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("all", ""),
        ("lora", "lora:r=8,targets=all-linear"),
        ("lora:targets=v_proj+q_proj,alpha=32", "lora:r=8,targets=q_proj+v_proj"),
        ("lora:r=16,dropout=0.1", "lora:r=16,targets=all-linear,dropout=0.1"),
        ("*norm*,lm_head.weight", "*norm*,lm_head.weight"),
    ],
)
def test_what_trains_is_spelled_in_one_way(text: str, same: str) -> None:
    assert Trainable.parse(text).text == same
    assert Trainable.parse(Trainable.parse(text).text or "all") == Trainable.parse(text)


@pytest.mark.parametrize("text", ["lora:r=0", "lora:r=x", "lora:rank=8", "lora:dropout=1", "lora:targets=", "", ","])
def test_what_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Trainable.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lora:targets=q_proj+foo",
            r"^--trainable or model\.lora: no layer of this model is called foo\. Choose",
        ),
        ("lora:targets=q_proj+lm_head", "lm_head is no part of a decoder layer"),
        ("*.mlp.*,nothing.*", r"--trainable, or the recipe: no parameter's name matches nothing\.\*"),
        ("freeze:*.mlp.*,nothing.*", r"no parameter's name matches nothing\.\*"),
    ],
)
def test_every_name_of_what_trains_must_be_in_the_model(text: str, message: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(ModelError, match=message):
        freeze(model, Trainable.parse(text))


def test_adapters_of_experts_are_refused_by_the_name_of_their_module() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("mixtral", num_hidden_layers=1))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts"):
        freeze(model, Trainable.parse("lora:r=4,targets=all-linear"))
