"""Activations in host memory: what leaves the device, when it comes back, and that it is the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from allocations import SavedForBackward
from transformers import AutoModelForCausalLM, PreTrainedModel

from toolkit.config.layout import Recompute
from toolkit.engines import compiled_layers
from toolkit.engines.compiled_layers import CompiledLayers
from toolkit.model_init import offload_activations
from toolkit.model_init.model_modules import decoder_layers
from toolkit.model_init.recompute import recompute
from toolkit.parallel.tiny_model import tiny_config

LAYERS = 5
SMALLEST_OF_ACTIVATIONS = 5057
"""Bytes: above a state of the random generator, which compiled layers save as well."""


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_activations, "SMALLEST_BYTES", 1)


def model_of(recomputed: Recompute = "none", *, offload: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=LAYERS)).train()
    recompute(model, recomputed)
    if offload:
        offload_activations.offload_activations(model)
    return model


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=torch.arange(64).view(4, 16), use_cache=False).logits.logsumexp(-1).sum()
    return loss


def gradients(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Of two micro-batches in flight at once, as in a pipeline."""
    first, second = loss_of(model), 2 * loss_of(model)
    first.backward()
    second.backward()
    yield from (p.grad for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("recomputed", ["none", "selective", "every_2", "full"])
def test_gradients_are_the_same_to_the_bit(recomputed: Recompute) -> None:
    offloaded, plain = (gradients(model_of(recomputed, offload=offload)) for offload in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(offloaded, plain, strict=True))


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_compiled_layers_share_a_graph_and_have_the_same_gradients(
    recomputed: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As layers that are compiled and not offloaded."""
    monkeypatch.setattr(compiled_layers, "_OPTIONS", {"backend": "aot_eager"})
    results = []
    for offload in (True, False):
        model = model_of(recomputed, offload=offload)
        compiled = CompiledLayers(model)
        results.append(list(gradients(model)))
        assert compiled.facts() == {"layers": LAYERS, "graphs": 1, "graph_breaks": {}}
    assert all(torch.equal(offloaded, plain) for offloaded, plain in zip(*results, strict=True))


def test_a_compiled_layer_sends_what_its_graph_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_activations, "SMALLEST_BYTES", SMALLEST_OF_ACTIVATIONS)
    monkeypatch.setattr(compiled_layers, "_OPTIONS", {"backend": "aot_eager"})
    model = model_of("full")
    CompiledLayers(model)
    assert sent_by(model) == (LAYERS - 1) * 4 * 16 * model.config.hidden_size * 4


def sent_by(model: PreTrainedModel) -> int:
    loss_of(model)
    transfers: offload_activations.HostTransfers = getattr(decoder_layers(model)[0], offload_activations.TRANSFERS)
    return transfers.bytes_sent


def test_each_storage_that_autograd_saves_is_sent_once_and_parameters_stay() -> None:
    """All but the last layer's and what is around the layers: rotary tables, final norm, head."""
    model = model_of(offload=False)
    per_layer = []
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(lambda *_: per_layer.append(SavedForBackward(model).__enter__()))
        layer.register_forward_hook(lambda *_: per_layer[-1].__exit__(None, None, None))
    loss_of(model)
    rotary = 2 * 16 * model.config.head_dim * 4
    assert sent_by(model_of()) == sum(saved.bytes - rotary for saved in per_layer[:-1])


def test_a_recomputed_layer_sends_its_input_alone() -> None:
    model = model_of("full")
    assert sent_by(model) == (LAYERS - 1) * 4 * 16 * model.config.hidden_size * 4


def test_layers_come_back_one_ahead_of_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []
    numbers: dict[Any, int] = {}
    init, fetch = offload_activations._LayerPass.__init__, offload_activations._LayerPass.fetch

    def numbered(one: Any, *arguments: Any, **keywords: Any) -> None:
        init(one, *arguments, **keywords)
        numbers[one] = len(numbers)

    def logged(one: Any) -> None:
        order.append(("fetched", numbers[one]))
        fetch(one)

    monkeypatch.setattr(offload_activations._LayerPass, "__init__", numbered)
    monkeypatch.setattr(offload_activations._LayerPass, "fetch", logged)
    model = model_of("full")
    for index, layer in enumerate(decoder_layers(model)):
        layer.mlp.register_full_backward_pre_hook(lambda *_, index=index: order.append(("backward", index)))
    loss_of(model).backward()
    assert order[::2] == [("backward", layer) for layer in (4, 3, 2, 1, 0)]
    assert order[1::2] == [("fetched", layer) for layer in (3, 2, 1, 0)]


def test_evaluation_sends_nothing() -> None:
    model = model_of()
    with torch.no_grad():
        assert sent_by(model) == 0
