"""The peak of a step at full size, under fake tensors: every shape of the real pass, and no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocations import LiveBytes, SavedForBackward
from torch._subclasses.fake_tensor import FakeTensorMode
from training_setups import rank_pass
from transformers import AutoModelForCausalLM, PreTrainedModel, masking_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from toolkit.estimate.recorded.activations import Activations
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.recorded.recordings import activations
from toolkit.models.shape import ModelShape
from toolkit.parallel.loss import token_loss_sum

LLAMA_2_7B = {"model_type": "llama"}
LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
}
NEOX_20B = {"model_type": "gpt_neox"}
GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "attn_pdrop": 0.0}
GEMMA_7B = {"model_type": "gemma"}
OPT_6B = {
    "model_type": "opt",
    "hidden_size": 4096,
    "ffn_dim": 16384,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
PHI_2 = {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32}
MODELS = {
    "llama-2-7b": LLAMA_2_7B,
    "llama-3-8b": LLAMA_3_8B,
    "qwen3-8b": QWEN3_8B,
    "neox-20b": NEOX_20B,
    "gpt2-xl": GPT2_XL,
    "gemma-7b": GEMMA_7B,
    "opt-6.7b": OPT_6B,
    "phi-2": PHI_2,
}
DAILY = (("llama-3-8b", "sdpa", "none", 1), ("gpt2-xl", "eager", "full", 2))
_FEW_LAYERS = 6
"""Widths are those of the full model; its layers are alike."""


def measure(fields: dict[str, Any], attention: str, recompute: str, samples: int, seq_len: int) -> int:
    """The most that lives at once beside parameters and their gradients, in bf16, on the device that has no memory."""
    with FakeTensorMode():
        model = _model(fields, attention)
        if recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids, labels = (torch.zeros(samples, seq_len, dtype=torch.long) for _ in range(2))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with LiveBytes() as live, _not_packed():
            token_loss_sum(model(input_ids=ids, use_cache=False).logits, labels).backward()
    return live.peak_bytes + ids.nbytes + labels.nbytes


def _model(fields: dict[str, Any], attention: str) -> PreTrainedModel:
    fields = dict(fields)
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.bfloat16
    )
    return model.train()


@contextmanager
def _not_packed() -> Iterator[None]:
    """transformers looks at the values of the positions to see whether a sample holds one document; here it does."""
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda positions: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


def predict(
    fields: dict[str, Any], attention: str, recompute: str, samples: int, seq_len: int, device: str = "cpu"
) -> Activations:
    """What the toolkit says."""
    asked = rank_pass(
        config_text(fields),
        recompute=recompute,  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
        device=device,  # type: ignore[arg-type]
        samples="one" if samples == 1 else "many",
    )
    return activations(asked, samples, seq_len)


def _check(fields: dict[str, Any], attention: str, recompute: str, samples: int, seq_len: int) -> None:
    measured = measure(fields, attention, recompute, samples, seq_len)
    estimate = predict(fields, attention, recompute, samples, seq_len)
    predicted = estimate.worst_moment(range(ModelShape.from_config(fields).layers)).total
    error = f"{predicted / measured - 1:+.2%} of {measured / 2**30:.2f} GiB"
    assert predicted == pytest.approx(measured, rel=0.03), error


def _with_few_layers(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"n_layer" if fields["model_type"] == "gpt2" else "num_hidden_layers": _FEW_LAYERS}


@pytest.mark.parametrize(("name", "attention", "recompute", "samples"), DAILY)
def test_the_peak_of_a_step_at_full_width_is_known_within_three_percent(
    name: str, attention: str, recompute: str, samples: int
) -> None:
    _check(_with_few_layers(MODELS[name]), attention, recompute, samples, 1024)


@contextmanager
def _kernels_of_a_gpu() -> Iterator[None]:
    """Flash attention and fused dropout as a GPU has them: autograd knows what they keep, and here nothing runs."""
    plain = F.scaled_dot_product_attention, F.dropout

    def flash(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any) -> torch.Tensor:
        assert attn_mask is None
        operation = torch.ops.aten._scaled_dot_product_flash_attention
        result: torch.Tensor = operation(q, k, v, dropout_p, options["is_causal"], scale=options.get("scale"))[0]
        return result

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(x, p, True)[0] if p and training else x

    F.scaled_dot_product_attention, F.dropout = flash, dropout  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.dropout = plain  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "dropouts"),
    [
        ("llama-3-8b", {"attention_dropout": 0.1}),
        ("neox-20b", {"attention_dropout": 0.1, "hidden_dropout": 0.1}),
        ("gpt2-xl", {"attn_pdrop": 0.1}),
    ],
)
def test_what_the_kernels_of_a_gpu_keep_is_known_within_a_percent(name: str, dropouts: dict[str, float]) -> None:
    fields = _with_few_layers(MODELS[name]) | dropouts
    with FakeTensorMode():
        model = _model(fields, "sdpa")
        ids = torch.zeros(2, 1024, dtype=torch.long)
        with SavedForBackward(model) as saved, _not_packed(), _kernels_of_a_gpu():
            loss = token_loss_sum(model(input_ids=ids, use_cache=False).logits, ids)
        del loss
    predicted = predict(fields, "sdpa", "none", 2, 1024, device="cuda").kept(range(_FEW_LAYERS))
    assert predicted == pytest.approx(saved.bytes, rel=0.01)


@pytest.mark.whole
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("samples", "seq_len"), [(1, 2048), (2, 1024)])
def test_the_peak_of_any_step_at_full_size_is_known_within_three_percent(
    name: str, attention: str, recompute: str, samples: int, seq_len: int
) -> None:
    _check(MODELS[name], attention, recompute, samples, seq_len)
