"""The estimate of activations against Hugging Face's models on this CPU: kept for backward, and the peak of a pass."""

from itertools import product

import pytest
import torch
from daily import daily
from measured_activations import EAGER_ONLY, NEVER_RECOMPUTED, Case, kept_bytes, peak_bytes

from toolkit.model_init import offload_activations
from toolkit.model_init.model_modules import decoder_layers
from toolkit.models.families.registry import find_spec
from toolkit.models.shape import families

FP32, BF16 = torch.float32, torch.bfloat16
_FALCON_RW = {"multi_query": False, "num_kv_heads": 4, "alibi": True, "parallel_attn": False}
_FALCON_40B = {"new_decoder_architecture": True, "num_attention_heads": 8, "num_kv_heads": 4}
VARIANTS = (
    ("falcon", _FALCON_RW),
    ("falcon", _FALCON_40B),
    ("falcon", _FALCON_40B | {"num_ln_in_parallel_attn": 1}),
    ("gpt_bigcode", {"multi_query": False}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    ("stablelm", {"use_parallel_residual": True}),
    ("stablelm", {"qk_layernorm": True}),
    ("cohere", {"use_qk_norm": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("phi", {"qk_layernorm": True}),
    ("olmo", {"clip_qkv": 1.0}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("llama", {"hidden_act": "gelu_new"}),
    ("llama", {"hidden_act": "relu"}),
    ("llama", {"hidden_act": "quick_gelu"}),
    ("llama", {"hidden_act": "gelu_fast"}),
    ("mpt", {"attn_config": {"clip_qkv": 6.0}}),
    ("persimmon", {"qk_layernorm": False}),
    ("openai-gpt", {"afn": "silu"}),
    ("hyperclovax", {"use_post_norm": False}),
    ("ministral3", {"sliding_window": 8}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    ("minicpm3", {"q_lora_rank": None, "v_head_dim": 8}),
    ("youtu", {"rope_interleave": False}),
)
"""Fields of a config that change which operations run."""
DAILY = (
    "gpt2",
    "gpt_neox",
    "falcon",
    "llama",
    "gemma3_text",
    "phi3",
    "cohere",
)
_PEAKS = ("gpt2", "llama", "gemma3_text")
_FUSED = tuple(family for family in families() if family not in EAGER_ONLY)


def _whole() -> list[Case]:
    return [
        Case(family=family, attention=attention, dtype=dtype, samples=samples, recompute=recompute)
        for family in families()
        for attention in ("eager", "sdpa")
        for dtype in (FP32, BF16)
        for samples in (1, 2)
        for recompute in ("none", "selective", "full")
        if (attention == "eager" or family in _FUSED)
        and (recompute != "selective" or find_spec(family).attention != "own")
        if recompute == "none" or family not in NEVER_RECOMPUTED
    ]


def _daily() -> list[Case]:
    """Some families in both kinds of attention, a sixth of the others in one; the other settings by turns."""
    cases = [
        Case(
            family=family,
            attention=attention,
            dtype=(BF16, FP32)[(i + j) % 2],
            samples=1 + (i // 2) % 2,
            recompute=("none", "full")[(i // 2 + j) % 2],
        )
        for i, family in enumerate(DAILY)
        for j, attention in enumerate(("eager", "sdpa"))
        if attention == "eager" or family in _FUSED
    ]
    others = [family for family in families() if family not in DAILY]
    return [*cases, *(_one(i, family) for i, family in enumerate(others) if i % 6 == 1)]


def _one(i: int, family: str) -> Case:
    """In bf16 and with every layer's own, where a norm or a mask too many shows."""
    return Case(family=family, attention="eager" if family in EAGER_ONLY else ("eager", "sdpa")[i % 2])


def _check(case: Case, measured: int, predicted: int, tolerance: float) -> None:
    assert predicted == pytest.approx(measured, rel=tolerance), f"{case}: {predicted / measured - 1:+.2%}"


def _check_kept(case: Case) -> None:
    _check(case, kept_bytes(case, case.model()), case.predicted_kept(), 0.01)


@pytest.mark.parametrize("case", _daily(), ids=str)
def test_what_a_forward_pass_keeps_is_known_within_a_percent(case: Case) -> None:
    _check_kept(case)


@pytest.mark.whole
@pytest.mark.parametrize("case", _whole(), ids=str)
def test_what_any_familys_forward_pass_keeps_is_known_within_a_percent(case: Case) -> None:
    _check_kept(case)


@pytest.mark.parametrize("variant", daily(VARIANTS, lambda i, _: i % 3 == 0))
@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.whole)])
def test_fields_that_change_a_layers_operations_are_read(
    variant: tuple[str, dict[str, object]], attention: str
) -> None:
    family, changes = variant
    if attention == "sdpa" and family in EAGER_ONLY:
        pytest.skip("eager only")
    _check_kept(Case(family=family, attention=attention, changes=changes))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_selective_recomputation_keeps_the_inputs_of_attention(family: str, attention: str) -> None:
    _check_kept(Case(family=family, attention=attention, recompute="selective"))


@pytest.mark.parametrize("recompute", ["every_2", "every_3"])
@pytest.mark.parametrize(
    ("family", "layers"), [("gpt2", {}), pytest.param("llama", {"num_hidden_layers": 12}, marks=pytest.mark.whole)]
)
def test_a_part_of_the_layers_is_recomputed(family: str, layers: dict[str, int], recompute: str) -> None:
    """Where the kinds meet, one hidden state is counted to the wrong layer."""
    case = Case(family=family, recompute=recompute, changes={"vocab_size": 99} | layers)
    _check_kept(case)
    _check(case, peak_bytes(case, case.model()), case.predicted_peak(), 0.01)


@pytest.mark.parametrize("vocabulary", [99, pytest.param(2000, marks=pytest.mark.whole)])
@pytest.mark.parametrize("recompute", ["none", "every_2", "full"])
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.whole)])
def test_what_is_offloaded_is_not_on_the_device(
    family: str, recompute: str, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for two layers: one that computes, and one whose tensors are on their way."""
    monkeypatch.setattr(offload_activations, "SMALLEST_BYTES", 1)
    case = Case(family=family, recompute=recompute, offload=True, changes={"vocab_size": vocabulary})
    model = case.model()
    _check(case, peak_bytes(case, model), case.predicted_peak(), 0.03)
    transfers: offload_activations.HostTransfers = getattr(decoder_layers(model)[0], offload_activations.TRANSFERS)
    _check(case, transfers.bytes_sent, max(case.estimate().offloaded(range(case.layers()))), 0.03)


@pytest.mark.whole
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_the_peak_of_tiled_mlps_is_known_within_ten_percent(family: str, recompute: str, dtype: torch.dtype) -> None:
    """From above: a tile is counted beside the worst moment of the rest of its layer."""
    changes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 256}
    case = Case(family=family, dtype=dtype, recompute=recompute, tiled=True, changes=changes)
    assert 0.99 < case.predicted_peak() / peak_bytes(case, case.model()) < 1.1


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", pytest.param("llama", marks=pytest.mark.whole)])
def test_document_masking_costs_a_mask(family: str, attention: str, recompute: str) -> None:
    _check_kept(Case(family=family, attention=attention, recompute=recompute, documents=3))


def _check_peak(case: Case) -> None:
    _check(case, peak_bytes(case, case.model()), case.predicted_peak(), 0.03)


@pytest.mark.parametrize(
    "case",
    daily(
        product(_PEAKS, ("eager", "sdpa"), ("none", "selective", "full"), (99, 2000)),
        lambda i, _: (i // 2 + i // 6) % 2 == i % 2,
    ),
)
def test_the_peak_of_a_pass_is_known_within_three_percent(case: tuple[str, str, str, int]) -> None:
    """With few words the worst moment lies in a layer's backward pass, with many in the loss's."""
    family, attention, recompute, vocabulary = case
    _check_peak(Case(family=family, attention=attention, recompute=recompute, changes={"vocab_size": vocabulary}))


@pytest.mark.whole
@pytest.mark.parametrize("case", _whole(), ids=str)
def test_the_peak_of_any_familys_pass_is_known_within_three_percent(case: Case) -> None:
    _check_peak(case)
