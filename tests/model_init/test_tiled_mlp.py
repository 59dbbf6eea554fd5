"""MLPs in tiles: the same gradients, no wide tensor of a whole sequence, and refusals."""

from typing import Any

import pytest
import torch
from allocations import SavedForBackward
from refusals import refused
from transformers import AutoModelForCausalLM, PreTrainedModel

from toolkit.errors import ModelError
from toolkit.model_init.model_modules import decoder_layers
from toolkit.model_init.tiled_mlp import tile_mlps
from toolkit.parallel.tiny_model import tiny_config

SHAPE = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 256}


def model_of(family: str = "llama", *, tiled: bool, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).train()
    if tiled:
        tile_mlps(model)
    return model


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=torch.arange(64).view(4, 16), use_cache=False).logits.logsumexp(-1).sum()
    return loss


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
def test_gradients_are_the_same_and_hooks_on_weights_run_once(family: str) -> None:
    found, calls = [], list[int]()
    for tiled in (False, True):
        model = model_of(family, tiled=tiled)
        weights = [p for layer in decoder_layers(model) for p in layer.get_submodule("mlp").parameters()]
        for weight in weights:
            weight.register_hook(lambda gradient: calls.append(1))
        loss_of(model).backward()
        found.append([p.grad for p in model.parameters()])
    assert len(calls) == 2 * len(weights)
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_no_wide_tensor_is_saved_or_made_of_all_tokens() -> None:
    model = model_of(tiled=True, **SHAPE)
    widths: list[int] = []
    for layer in decoder_layers(model):
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].numel()))
    with SavedForBackward(model) as saved:
        loss = loss_of(model)
    assert all(tensor.shape[-1] != 256 for tensor in saved.tensors)
    loss.backward()
    # 64 tokens in tiles of 16, forward and again backward.
    assert widths == [16 * 256] * 4 * 2 * len(decoder_layers(model))


def test_frozen_weights_beside_trained_ones_get_no_gradient() -> None:
    model = model_of(tiled=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    loss_of(model).backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("family", "changes"), [("gpt2", {"resid_pdrop": 0.1}), ("mixtral", {}), ("opt", {}), ("bloom", {})]
)
def test_what_would_differ_is_refused(family: str, changes: dict[str, Any]) -> None:
    model = model_of(family, tiled=False, **changes)
    with refused(ModelError, "parallel.tiled_mlp", "model_type", remedy=("parallel.tiled_mlp", False)):
        tile_mlps(model)
