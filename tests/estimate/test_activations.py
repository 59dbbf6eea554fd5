"""Closed forms of other people against the walk through a layer's operations, and what is refused."""

from typing import Any

import pytest

from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.activations import ActivationBreakdown, activations, in_flight_micro_batches
from toolkit.estimate.decoder.context import WalkSettings
from toolkit.estimate.sizes.tape import Tape
from toolkit.estimate.style import LayerStyle
from toolkit.models.families.registry import CONFIG_SCHEMAS, find_spec
from toolkit.models.shape import ModelShape, families

S, B, H, A = 256, 1, 512, 8
# GPT-2 with a GELU that is one kernel is the layer that Korthikanti et al. 2022 look at.
GPT2 = {"model_type": "gpt2", "n_embd": H, "n_head": A, "n_layer": 6, "activation_function": "gelu"}
SBH, AS2B = S * B * H, A * S * S * B
STATISTICS = 2 * 2 * 4 * S * B
"""Mean and 1/deviation in fp32 of two norms: below the paper's notice."""


def estimate(config: dict[str, Any], **changes: Any) -> ActivationBreakdown:
    options = {name: changes.pop(name) for name in ("recompute", "loss") if name in changes}
    return activations(_settings(config, **{"b": B, "s": S, "attention": "eager"} | changes), **options)


def _settings(config: dict[str, Any], **settings: Any) -> WalkSettings:
    return WalkSettings(shape=ModelShape.from_config(config), style=LayerStyle.from_config(config), **settings)


def test_a_layer_keeps_34_sbh_and_5_a_s_s_b() -> None:
    """Korthikanti et al. 2022, equation 1."""
    assert estimate(GPT2).layer == 34 * SBH + 5 * AS2B + STATISTICS


def test_tensor_parallelism_divides_all_but_10_sbh() -> None:
    """Equation 2: sbh (10 + 24/t + 5as/ht)."""
    assert estimate(GPT2, tp=4).layer == 10 * SBH + 24 * SBH // 4 + 5 * AS2B // 4 + STATISTICS


def test_sequence_parallelism_divides_all_but_gathered_inputs() -> None:
    """Equation 4 is sbh/t (34 + 5as/h): there the gathered inputs, 4sbh, are gathered again in the backward pass."""
    kept = estimate(GPT2, tp=4, sequence_parallel=True).layer
    assert kept == 30 * SBH // 4 + 4 * SBH + 5 * AS2B // 4 + STATISTICS // 4


def test_selective_recomputation_removes_the_quadratic_term() -> None:
    """Equation 6 without sequence parallelism: 34sbh. The mask that attention needs again is one for all layers."""
    assert estimate(GPT2, recompute="selective").layer == 34 * SBH + STATISTICS


def test_full_recomputation_keeps_the_layers_input() -> None:
    """Section 5: 2sbh a layer."""
    assert estimate(GPT2, recompute="full").layer == 2 * SBH


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_a_flash_kernel_keeps_one_number_per_row_instead_of_scores(attention: str) -> None:
    """Dao et al. 2022: the log-sum-exp of each row, in fp32."""
    assert estimate(GPT2, attention=attention).layer == 34 * SBH + 4 * A * S * B + STATISTICS


def test_llama_keeps_the_inputs_of_eager_norms_and_its_gate() -> None:
    """By hand, bf16, flash attention, no dropout; f = 2h, 2 key-value heads of 8.

    A norm: the input in fp32, the normalised state in bf16, 1/deviation: 6sbh + 4sb. Its output: 2sbh. Attention: q 2,
    k and v 1, result 2 sbh, and 4asb. MLP: gate, SiLU, up, product: 8sbf = 16sbh.
    """
    config = {"model_type": "llama", "hidden_size": H, "num_attention_heads": A, "num_key_value_heads": 2}
    config |= {"intermediate_size": 2 * H, "num_hidden_layers": 6}
    expected = 2 * (6 * SBH + 4 * S * B + 2 * SBH) + 5 * SBH + 4 * A * S * B + 16 * SBH
    assert estimate(config, attention="flash").layer == expected


def test_the_loss_needs_three_copies_of_the_logits_in_fp32() -> None:
    """When log_softmax's backward runs: its kept result and two gradients. Beside them the head's input."""
    a = estimate(GPT2 | {"vocab_size": 50_000})
    assert a.logits == pytest.approx(3 * 4 * S * B * 50_000 + 2 * SBH, rel=1e-6)


def test_transformers_output_object_keeps_the_logits() -> None:
    config = GPT2 | {"vocab_size": 50_000}
    more = estimate(config, loss="stock").head_extra - estimate(config).head_extra
    assert more == 2 * S * B * 50_000


def test_vocabulary_parallel_loss_needs_its_logits_twice_in_fp32_and_once_in_bf16() -> None:
    """When the toolkit's own loss returns its gradient: the softmax that was kept, the gradient, and its conversion."""
    a = estimate(GPT2 | {"vocab_size": 64_000}, tp=4)
    assert a.logits == pytest.approx((4 + 4 + 2) * S * B * 16_000 + 2 * SBH, rel=1e-3)


def test_a_stage_counts_the_layers_that_it_has() -> None:
    """Gemma-3 looks through a window in all but every sixth layer, and only those keep a mask."""
    config = {"model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": S}
    a = estimate(config, attention="sdpa")
    assert a.pattern[0] > a.pattern[5]
    assert a.kept(layers=range(4, 7)) - a.kept(layers=0) == 2 * a.pattern[0] + a.pattern[5]


def test_a_window_shorter_than_the_sequence_costs_a_mask_in_each_layer() -> None:
    """The kernel wants the mask as numbers, and keeps its copy."""
    config = {"model_type": "mistral", "hidden_size": H, "num_attention_heads": A, "num_key_value_heads": A}
    config |= {"intermediate_size": 2 * H}
    inside = estimate(config | {"sliding_window": S + 1}, attention="sdpa").layer
    assert estimate(config | {"sliding_window": S}, attention="sdpa").layer - inside == 2 * S * S * B


def test_every_family_that_has_a_shape_has_a_style() -> None:
    assert len(families()) > 50
    for family in families():
        config = {"model_type": family}
        style = LayerStyle.from_config(config)
        a = estimate(config, s=64)
        assert a.layer > 0, family
        assert len(style.kinds) in (1, ModelShape.from_config(config).layers), family


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"model_type": "bert"}, {}, "model_type=bert"),
        ({"model_type": "llama", "hidden_act": "mish"}, {}, "hidden_act=mish"),
        ({"model_type": "bloom"}, {"attention": "sdpa"}, "only eager attention for bloom"),
        ({"model_type": "llama"}, {"tp": 3}, "tp=3"),
        ({"model_type": "llama"}, {"tp": 2, "sequence_parallel": True, "s": 31}, "seq_len=31"),
    ],
)
def test_what_is_not_modeled_is_refused(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelError, LayoutError), match=message):
        activations(_settings(config, **{"b": 1, "s": 32} | changes))


def test_micro_batches_in_flight_follow_1f1b() -> None:
    assert [in_flight_micro_batches(4, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight_micro_batches(4, 0, 2) == 2


def test_the_first_stage_keeps_more_activations_than_the_next() -> None:
    a = estimate(GPT2, loss="stock")
    first, _ = a.worst_moment(layers=2, last=False, in_flight=in_flight_micro_batches(3, 0, 6))
    second, _ = a.worst_moment(layers=2, first=False, last=False, in_flight=in_flight_micro_batches(3, 1, 6))
    assert first > second


def test_kinds_have_the_same_order_in_every_family() -> None:
    """So that tables of different models and processes can be compared row by row."""
    order = ["input", "norm", "attention", "mlp", "residual"]
    assert len(families()) > 50
    for family in families():
        for recompute in ("none", "selective"):
            found = list(estimate({"model_type": family}, s=8, recompute=recompute).layer_kinds)
            assert found == [kind for kind in order if kind in found], family
            assert {"norm", "attention", "mlp"} <= {*found}, family


def test_kept_storages_follow_the_order_of_operations() -> None:
    tape = Tape()
    x = tape.leaf((8, 8), 2)
    kept = [tape.new((8, size), 2) for size in range(1, 200)]
    for tensor in kept:
        with tape.part(str(tensor.shape)):
            tape.record(tape.new((8, 8), 2), [x], [tensor], lambda g, kept: [None])
    assert list(tape.kept_storages()) == [tensor.storage for tensor in kept]
    assert list(tape.kept_bytes()) == [str(tensor.shape) for tensor in kept]


def test_supported_attention_kernels_are_those_of_the_transformers_class() -> None:
    """Read from the class, whose `from_pretrained` refuses any other."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    assert len(CONFIG_SCHEMAS) > 50
    for family in CONFIG_SCHEMAS:
        rules = find_spec(family).layer
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(family))]
        assert (rules.sdpa, rules.flash) == (model._supports_sdpa, model._supports_flash_attn), family


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bloom", {"attention": "flash"}, "flash: transformers has only eager attention for bloom. Choose eager."),
        ("codegen", {"attention": "flash"}, "only eager attention for codegen"),
        ("gptj", {"attention": "sdpa"}, "only eager and flash attention for gptj. Choose eager or flash."),
        ("llama", {"attention": "flash", "itemsize": 4}, "16 bits, and this model in fp32. Choose sdpa or eager"),
        ("gemma2", {"attention": "flash", "itemsize": 4}, "Choose eager, or"),
    ],
)
def test_an_unsupported_kernel_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        estimate({"model_type": family}, **changes)


def test_flash_attention_runs_where_autocast_computes_in_16_bits() -> None:
    fp32 = {"itemsize": 4, "autocast": True, "attention": "flash"}
    assert estimate({"model_type": "llama"}, **fp32).layer > estimate({"model_type": "llama"}, attention="flash").layer
