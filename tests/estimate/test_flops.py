import pytest
import torch
from daily import daily
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.estimate.flops import mfu, train_flops_per_token, with_experts
from toolkit.estimate.recorded.recording import config_text
from toolkit.models.shape import ModelShape, find_config
from toolkit.parallel.tiny_model import tiny_config
from toolkit.recorder.parameters import record_parameters

SAMPLES, SEQ_LEN = 2, 16
TOKENS = SAMPLES * SEQ_LEN
TINY = ["gpt2-tiny", "llama-tiny", "qwen3-tiny"]


def counted_flops(name, *, recompute=False, use_reentrant=True):
    """What one forward and backward pass executes, counted operator by operator."""
    config = AutoConfig.for_model(**find_config(name), use_cache=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    tokens = torch.zeros(SAMPLES, SEQ_LEN, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", TINY)
def test_the_formula_counts_every_matmul_of_a_training_step(name):
    shape = ModelShape.from_config(find_config(name))
    assert TOKENS * train_flops_per_token(shape, SEQ_LEN) == counted_flops(name)


@pytest.mark.parametrize("name", TINY)
def test_recomputation_runs_the_layers_forward_once_more(name):
    shape = ModelShape.from_config(find_config(name))
    assert TOKENS * train_flops_per_token(shape, SEQ_LEN, recompute=True) == counted_flops(name, recompute=True)


@pytest.mark.parametrize("name", TINY)
def test_non_reentrant_recomputation_skips_the_last_product_of_each_layer(name):
    shape = ModelShape.from_config(find_config(name))
    formula = TOKENS * train_flops_per_token(shape, SEQ_LEN, recompute=True)
    saved = TOKENS * shape.layers * 2 * shape.hidden * shape.ffn
    assert formula - saved == counted_flops(name, recompute=True, use_reentrant=False)


MIXTURES = (
    "mixtral",
    "qwen2_moe",  # a shared expert beside those that are chosen, with a gate
    "gpt_oss",  # biases, transposed
    "deepseek_v3",  # latent attention, a dense layer in front, shared experts
)


@pytest.mark.parametrize("family", daily(MIXTURES, lambda _, family: family in ("mixtral", "gpt_oss")))
def test_of_experts_only_those_that_a_token_goes_through_count(family):
    config = tiny_config(family, use_cache=False).to_dict()
    text = config_text(config)
    parameters = record_parameters(text)
    shape = with_experts(ModelShape.from_facts(family, parameters.facts, config), parameters)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").train()
    model.set_experts_implementation("batched_mm")
    tokens = torch.zeros(SAMPLES, SEQ_LEN, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert shape.experts.per_token < shape.experts.count
    assert TOKENS * train_flops_per_token(shape, SEQ_LEN) == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_recomputed_flops_of_gpt3_are_those_of_narayanan_et_al():
    shape, s = ModelShape.from_config(find_config("gpt3-175b")), 2048
    h, layers, vocab = shape.hidden, shape.layers, shape.vocab
    published = 96 * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert train_flops_per_token(shape, s, recompute=True) == pytest.approx(published, rel=1e-12)


def test_mfu_of_palm_is_that_of_its_paper():
    # PaLM 540B, section 4.1: 238.3K tokens/s on 6144 chips of 275 TFLOP/s is 46.2 % MFU (multi-query, parallel layers)
    palm = ModelShape(
        family="palm",
        hidden=18432,
        layers=118,
        heads=48,
        kv_heads=1,
        head_dim=256,
        ffn=73728,
        gated=True,
        vocab=256000,
        positions=None,
        tied=True,
        learned_positions=False,
        embed_dim=18432,
    )
    assert mfu(238_300 / 6144, palm, 2048, 275e12) == pytest.approx(0.462, abs=0.0005)
