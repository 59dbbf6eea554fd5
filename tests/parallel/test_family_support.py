"""Supported families are partitioned exactly, others are rejected with a reason, and support.json agrees."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from refusals import refused

from toolkit.errors import ModelError
from toolkit.models.support import all_families, checked_version

DAILY = (
    "gpt2",  # Conv1D, learned positions, tied head
    "bloom",  # ALiBi, a norm behind the embedding
    "falcon",  # one key-value head
    "opt",  # a decoder inside the model inside the model
    "llama",
    "gemma3_text",  # two rotary tables, two masks
    "openai-gpt",  # layers return lists
    "bitnet",  # norms over all heads inside the blocks
    "mixtral",  # experts
)


@pytest.fixture(scope="module")
def generator(ranks: Callable[..., list[Any]]) -> ModuleType:
    """docs/generate_families.py, in the process that has imported all that ranks need."""
    path = Path(__file__).parents[2] / "docs" / "generate_families.py"
    spec = importlib.util.spec_from_file_location("generate_families", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", DAILY)
def test_the_stored_support_is_what_the_check_says(generator: ModuleType, name: str) -> None:
    assert generator.check(name) == all_families()[name]


_FALCON_RW = {"multi_query": False, "num_kv_heads": 4, "alibi": True, "parallel_attn": False, "bias": True}
_FALCON_40B = {"new_decoder_architecture": True, "num_attention_heads": 8, "num_kv_heads": 4}
DAILY_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("falcon", _FALCON_40B),
    ("gpt_bigcode", {}),
    ("phi3", {}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),  # the one of 350 million parameters
    ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),  # the one of 12 billion
    ("cohere", {"use_qk_norm": True}),  # the one of 104 billion
    ("minicpm3", {}),  # latent attention
    ("mimo_v2_flash", {}),  # attention sinks; layers differ in their key-value heads
)
OTHER_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("falcon", {}),
    ("bloom", {}),
    ("olmo2", {}),
    ("codegen", {}),
    ("falcon", _FALCON_RW),
    ("falcon", _FALCON_40B | {"num_ln_in_parallel_attn": 1}),
    ("gpt_bigcode", {"multi_query": False}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("mpt", {}),
    ("glm", {}),
    ("opt", {}),
    ("stablelm", {"use_parallel_residual": True}),
    ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    ("youtu", {"q_lora_rank": None}),
    ("persimmon", {"qk_layernorm": False}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("diffllama", {}),
    ("doge", {}),
    ("inkling_text", {}),  # attention and convolutions that stay whole; a norm inside the embedding
    ("gpt_oss", {}),
    ("granitemoeshared", {"shared_intermediate_size": 32}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("deepseek_v2", {"q_lora_rank": 16, "first_k_dense_replace": 2}),
    ("lfm2_moe", {"conv_bias": True}),
    # Layers with another number of heads than the config's, and than each other.
    ("laguna", {"num_attention_heads": 12, "num_attention_heads_per_layer": (4, 8, 4, 8)}),
)


def _split_in_every_way(name: str, changes: dict[str, Any]) -> None:
    """Over 4 ranks, over pairs of them, and both with the sequence split too."""
    from family_check import check_tensor
    from torch import distributed as dist

    pair, _ = dist.new_subgroups(2)
    for group in (pair, dist.group.WORLD):
        assert group is not None
        for sequence_parallel in (False, True):
            check_tensor(name, group, sequence_parallel=sequence_parallel, changes=changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [*DAILY_VARIANTS, *(pytest.param(*variant, marks=pytest.mark.whole) for variant in OTHER_VARIANTS)],
)
def test_every_layout_of_a_familys_projections_is_split_exactly(
    ranks: Callable[..., list[Any]], name: str, changes: dict[str, Any]
) -> None:
    ranks(_split_in_every_way, 4, name, changes)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("doge", {"is_moe": True}, "its experts do not use transformers' experts interface"),
        ("llama4_text", {}, "its experts do not use transformers' experts interface"),
        ("falcon", {"new_decoder_architecture": True}, "its 2 groups of heads do not split"),
    ],
)
def test_what_cannot_be_split_is_refused_in_plain_words(
    ranks: Callable[..., list[Any]], name: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=f"^{reason}$"):
        ranks(_split_in_every_way, 4, name, changes)


@pytest.mark.whole
@pytest.mark.timeout(3600)
def test_the_stored_support_of_every_family_is_what_the_check_says(generator: ModuleType) -> None:
    assert generator.check_all() == all_families()


def test_every_causal_lm_of_transformers_was_checked() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if transformers.__version__ != checked_version():
        pytest.skip(f"support.json is of transformers {checked_version()}: run make families")
    assert set(all_families()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bart", "encoder-decoder"),
        ("musicgen", "encoder-decoder"),
        ("rwkv", "recurrent: a state runs along the sequence"),
        ("zamba2", "recurrent: a state runs along the sequence"),
        ("cpmant", "layer 0 receives more than the hidden state"),  # a trained position bias
        ("gemma3n_text", "layer 0 receives more than the hidden state"),  # keys and values of earlier layers
        ("glm_moe_dsa", "layer 1 receives more than the hidden state"),  # positions that an earlier layer chose
        ("xlm", "layer 1 does not take what layer 0 returned"),
        ("mllama", "its layers do not run once each in their order"),
        ("blt", "it has no list of decoder layers"),
    ],
)
def test_what_is_no_chain_of_layers_is_refused_by_name(name: str, reason: str) -> None:
    from family_check import check_pipeline

    from toolkit.parallel.model_structure import UnsupportedPipelineError

    with pytest.raises(UnsupportedPipelineError) as caught:
        check_pipeline(name)
    assert caught.value.reason == reason
    assert (caught.value.refusal.field, caught.value.refusal.remedy) == ("parallel.pp", (("parallel.pp", 1),))


def test_a_type_that_transformers_does_not_know_is_refused() -> None:
    from toolkit.parallel.tiny_model import tiny_config

    with refused(ModelError, "model_type"):
        tiny_config("no-such-type")


def test_examining_leaves_the_model_as_it_was() -> None:
    from family_check import tiny_model

    from toolkit.parallel.model_structure import analyze_model

    model = tiny_model("mixtral")
    model.train()
    model.model.embed_tokens.eval()
    before = {name: module.training for name, module in model.named_modules()}, model.get_experts_implementation()
    analyze_model(model)
    after = {name: module.training for name, module in model.named_modules()}, model.get_experts_implementation()
    assert after == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


Alter = Callable[[torch.Tensor, list[torch.Tensor]], tuple[torch.Tensor, list[torch.Tensor]]]


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.001


@pytest.mark.parametrize(
    ("alter", "complaint"),
    [
        (lambda hidden, rest: (hidden * 1.001, rest), "the loss is"),
        (lambda hidden, rest: (_WrongGradient.apply(hidden), rest), "the gradient of .* is off by [12]e-03"),
        (lambda hidden, rest: (hidden.detach().requires_grad_(), rest), "gets no gradient"),
        (lambda hidden, rest: (hidden, []), "with packed documents the loss is"),
    ],
)
def test_the_check_sees_a_wrong_stage(monkeypatch: pytest.MonkeyPatch, alter: Alter, complaint: str) -> None:
    from family_check import InexactError, check_pipeline

    from toolkit.parallel.pipeline.stage import PipelineStage

    whole = PipelineStage.forward

    def forward(stage: PipelineStage, inputs: Any) -> Any:
        result = whole(stage, inputs)
        if not isinstance(result, tuple):
            return result
        hidden, rest = alter(result[0], list(result[1:]))
        return (hidden, *rest)

    monkeypatch.setattr(PipelineStage, "forward", forward)
    with pytest.raises(InexactError, match=complaint):
        check_pipeline("llama")


def _without_sum_of_router_weights(name: str) -> str:
    """Each tensor-parallel rank then has the gradient of the router's weights for its own experts alone."""
    from collections import ChainMap
    from types import SimpleNamespace

    from family_check import InexactError, check_tensor
    from torch import distributed as dist

    from toolkit.parallel.experts import dispatch

    unsummed = {"copy_to_tensor_ranks": lambda x, group: x}
    vars(dispatch)["c"] = SimpleNamespace(**ChainMap(unsummed, vars(dispatch.c)))
    with pytest.raises(InexactError) as caught:
        check_tensor(name, dist.group.WORLD)
    return str(caught.value)


def test_the_check_sees_a_wrong_gradient_of_a_router(ranks: Callable[..., list[Any]]) -> None:
    for complaint in ranks(_without_sum_of_router_weights, 2, "mixtral"):
        assert "the gradient of" in complaint
