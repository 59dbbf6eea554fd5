"""Closed forms of other people against what was recorded, and what is refused."""

from typing import Any

import pytest
from training_setups import memory_request, rank_pass

from toolkit.config.layout import Layout
from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.recorded.activations import Activations
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.recorded.recordings import activations
from toolkit.estimate.states import TorchStates
from toolkit.models.support import all_families

S, B, H, A = 256, 2, 512, 8
# GPT-2 with a GELU that is one kernel is the layer that Korthikanti et al. 2022 look at.
GPT2 = {"model_type": "gpt2", "n_embd": H, "n_head": A, "n_layer": 6, "activation_function": "gelu"}
SBH, AS2B = S * B * H, A * S * S * B
STATISTICS = 2 * 2 * 4 * S * B
"""Mean and 1/deviation in fp32 of two norms: below the paper's notice."""
SEED = 24
"""State of the random numbers, as the flash kernel of PyTorch returns it."""


def estimate(config: dict[str, Any], **changes: Any) -> Activations:
    return activations(rank_pass(config_text(config), **{"attention": "eager"} | changes), B, S)


def layer(config: dict[str, Any], **changes: Any) -> int:
    """What one more layer keeps."""
    found = estimate(config, **changes)
    return found.kept(range(4)) - found.kept(range(3))


def test_a_layer_keeps_34_sbh_and_5_a_s_s_b() -> None:
    """Korthikanti et al. 2022, equation 1."""
    assert layer(GPT2) == 34 * SBH + 5 * AS2B + STATISTICS
    assert sum(estimate(GPT2).layer_kinds(range(1)).values()) == layer(GPT2)


def test_tensor_parallelism_divides_all_but_10_sbh() -> None:
    """Equation 2: sbh (10 + 24/t + 5as/ht)."""
    assert layer(GPT2, tp=4) == 10 * SBH + 24 * SBH // 4 + 5 * AS2B // 4 + STATISTICS


def test_sequence_parallelism_divides_all_but_gathered_inputs() -> None:
    """Equation 4 is sbh/t (34 + 5as/h): there the gathered inputs, 4sbh, are gathered again in the backward pass."""
    kept = layer(GPT2, tp=4, sequence_parallel=True)
    assert kept == 30 * SBH // 4 + 4 * SBH + 5 * AS2B // 4 + STATISTICS // 4


def test_selective_recomputation_removes_the_quadratic_term() -> None:
    """Equation 6 without sequence parallelism: 34sbh. The mask that attention needs again is one for all layers."""
    assert layer(GPT2, recompute="selective") == 34 * SBH + STATISTICS


def test_full_recomputation_keeps_the_layers_input() -> None:
    """Section 5: 2sbh a layer."""
    assert layer(GPT2, recompute="full") == 2 * SBH


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_a_flash_kernel_keeps_one_number_per_row_instead_of_scores(attention: str) -> None:
    """Dao et al. 2022: the log-sum-exp of each row, in fp32."""
    assert layer(GPT2, attention=attention) == 34 * SBH + 4 * A * S * B + STATISTICS + SEED


def test_llama_keeps_the_inputs_of_eager_norms_and_its_gate() -> None:
    """By hand, bf16, flash attention, no dropout; f = 2h, 2 key-value heads of 8.

    A norm: the input in fp32, the normalised state in bf16, 1/deviation: 6sbh + 4sb. Its output: 2sbh. Attention: q 2,
    k and v 1, result 2 sbh, and 4asb. MLP: gate, SiLU, up, product: 8sbf = 16sbh.
    """
    config = {"model_type": "llama", "hidden_size": H, "num_attention_heads": A, "num_key_value_heads": 2}
    config |= {"intermediate_size": 2 * H, "num_hidden_layers": 6}
    expected = 2 * (6 * SBH + 4 * S * B + 2 * SBH) + 5 * SBH + 4 * A * S * B + 16 * SBH
    assert layer(config, attention="flash") == expected + SEED


def at_loss(words: int, **changes: Any) -> int:
    """For so many more words."""
    few, many = (estimate(GPT2 | {"vocab_size": size}, **changes) for size in (40_000, 40_000 + words))
    return many.at_head(range(1)) - few.at_head(range(1))


def test_the_loss_needs_three_copies_of_the_logits_in_fp32() -> None:
    """When log_softmax's backward runs: its kept result and two gradients."""
    assert at_loss(8_000) == 3 * 4 * S * B * 8_000


def test_vocabulary_parallel_loss_needs_its_logits_twice_in_fp32_and_once_in_bf16() -> None:
    """When the toolkit's own loss returns its gradient: the softmax that was kept, the gradient, and its conversion."""
    assert at_loss(8_000, tp=4) == (4 + 4 + 2) * S * B * 2_000


def test_a_stage_counts_the_layers_that_it_has() -> None:
    """Gemma-3 looks through a window in all but every sixth layer, and only those keep a mask."""
    config = {"model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": S, "hidden_size": 256}
    a = estimate(config | {"intermediate_size": 512, "vocab_size": 99}, attention="sdpa")
    one, full = (sum(a.layer_kinds(range(k, k + 1)).values()) for k in (0, 5))
    assert one > full
    assert a.kept(range(3, 7)) - a.kept(range(3, 4)) == 2 * one + full


def test_a_window_shorter_than_the_sequence_costs_a_mask_in_each_layer() -> None:
    """The kernel wants the mask as numbers, and keeps its copy."""
    config = {"model_type": "mistral", "hidden_size": H, "num_attention_heads": A, "num_key_value_heads": A}
    config |= {"intermediate_size": 2 * H, "num_hidden_layers": 6}
    inside = layer(config | {"sliding_window": 2 * S}, attention="sdpa")
    assert layer(config | {"sliding_window": S}, attention="sdpa") - inside == 2 * S * S * B - 8  # of the SEED


@pytest.mark.parametrize(
    ("config", "work", "layout", "message"),
    [
        ({"model_type": "mamba"}, {}, {}, "model_type=mamba"),
        ({"model_type": "llama", "num_hidden_layers": 2, "hidden_act": "mish!"}, {}, {}, "does not know 'mish!'"),
        ({"model_type": "bloom"}, {}, {}, "only eager attention for bloom. Choose eager."),
        ({"model_type": "bloom"}, {"attention": "flash"}, {}, "flash: transformers has only eager attention for bloom"),
        ({"model_type": "gptj"}, {}, {}, "only eager and flash attention for gptj. Choose eager or flash."),
        ({"model_type": "llama"}, {"attention": "flash", "weight_bytes": 4}, {}, "fp32. Choose eager or sdpa, or"),
        ({"model_type": "llama"}, {}, {"tp": 3}, "tp=3"),
        ({"model_type": "llama"}, {"seq_len": 31}, {"tp": 2, "sequence_parallel": True}, "seq_len=31"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    config: dict[str, Any], work: dict[str, Any], layout: dict[str, Any], message: str
) -> None:
    work = {"micro_batch_size": 1, "seq_len": 32} | work
    states = TorchStates(weight_bytes=work.pop("weight_bytes", 2))
    with pytest.raises((ModelError, LayoutError), match=message) as refused:
        memory_request(ModelFacts.from_config(config), Layout(**layout), work, states).peak()
    assert "\n" not in str(refused.value)


def test_supported_attention_kernels_are_those_of_the_transformers_class() -> None:
    """Read from the class, whose `from_pretrained` refuses any other."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for family, support in all_families().items():
        model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
        declared = ("sdpa" in support.attention, "flash" in support.attention)
        assert declared == (model._supports_sdpa, model._supports_flash_attn), family
