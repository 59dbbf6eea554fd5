"""model.load_in_4bit: the layers that transformers loads in 4 bits, with peft's adapters; and a CPU is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from toolkit.config.recipe import Recipe
from toolkit.errors import RunError
from toolkit.estimate.parameters import Parameter
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.recorded.recordings import parameters
from toolkit.estimate.trainable import in_4_bits
from toolkit.model_init.build_model import build_model
from toolkit.model_init.four_bit import check_four_bit, quantize_layer


@pytest.fixture
def published(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def quantized(make_recipe: Callable[..., Recipe], published: Path) -> Recipe:
    section = {"name_or_path": str(published), "init": "pretrained", "load_in_4bit": True}

    return make_recipe(model=section | {"lora": {"r": 4, "targets": ["all-linear"]}})


def test_the_first_step_is_that_of_transformers_and_peft(quantized: Recipe, published: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    ours = build_model(quantized)
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)
    base = AutoModelForCausalLM.from_pretrained(
        published, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    theirs: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    theirs.train()  # in evaluation bitsandbytes has another kernel on CPUs
    values = {name: value for name, value in ours.named_parameters() if value.requires_grad}
    copied = {name.removeprefix("base_model.model."): value for name, value in theirs.named_parameters()}
    trained = {name: value for name, value in copied.items() if value.requires_grad}
    assert values.keys() == trained.keys()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in values.items():
            value.copy_(torch.randn(value.shape, generator=generator) / 10)
            trained[name].copy_(value)
    tokens = torch.arange(64).reshape(2, 32) % 96
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (ours, theirs)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for name, value in values.items():
        assert value.grad is not None
        torch.testing.assert_close(value.grad, trained[name].grad, rtol=1e-5, atol=1e-7)
    packed = [value for value in ours.parameters() if value.dtype == torch.uint8]
    assert len(packed) == 14
    whole = AutoModelForCausalLM.from_pretrained(published)(input_ids=tokens, labels=tokens).loss.item()
    assert abs(losses[0].item() - whole) > 1e-4, "nothing was quantized"


def test_the_estimate_has_the_bytes_that_bitsandbytes_keeps(published: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = LlamaForCausalLM.from_pretrained(published, dtype=torch.bfloat16)
    for layer in model.model.layers:
        quantize_layer(layer, torch.bfloat16)
    packed = [p for p in model.parameters() if p.dtype == torch.uint8]
    states = [p.quant_state for p in packed]
    scales = [tensor for s in states for tensor in (s.absmax, s.code, s.state2.absmax, s.state2.code, s.offset)]
    frozen = parameters(config_text(model.config.to_dict()), "lora:r=4,fp32=no")
    stored, largest = in_4_bits(frozen, 2)
    kept = sum(p.numel for p in stored.parameters() if len(p.shape) == 1 and "norm" not in p.name)
    assert 2 * kept == sum(tensor.nbytes for tensor in [*packed, *scales])
    assert largest == 128 * 256


def test_a_parameter_takes_the_bits_that_the_paper_says() -> None:
    # Dettmers et al. 2023, section 3: 4 bits, and with double quantization 0.127 for scales.
    weights = (
        Parameter(name="up.weight", shape=(8192, 28672), trainable=False),
        Parameter(name="up.lora_A", shape=(16, 8192)),
    )
    model = replace(parameters(config_text({"model_type": "gpt2"})), kinds=(weights,))
    stored, _ = in_4_bits(model, 1)
    assert 8 * stored.kinds[0][0].numel / weights[0].numel == pytest.approx(4.127, abs=1e-3)
    assert stored.kinds[0][1] is weights[1]


def test_a_cpu_is_refused() -> None:
    with pytest.raises(RunError) as error:
        check_four_bit(torch.device("cpu"))
    assert error.value.refusals[0].field == "model.load_in_4bit"
