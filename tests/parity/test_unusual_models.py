"""What few families have: parameters that no loss depends on, other heads and layers, in layouts that stumbled on them.

BigBird's pooler is one: matrices that are trained, decay, and never get a gradient.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BigBirdConfig, ModernBertDecoderConfig, PreTrainedConfig, RobertaConfig

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity import ParityResult
from toolkit.parity.run.train_in_memory import train_in_memory

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 321,
    "max_position_embeddings": 80,
}
UNTIED = {"tie_word_embeddings": False}
CONFIGS: dict[str, PreTrainedConfig] = {
    "unused matrices": BigBirdConfig(**SHAPE, is_decoder=True, attention_type="original_full"),
    "unused bias": RobertaConfig(**SHAPE, **UNTIED, is_decoder=True),
    "head initialized by its parent": ModernBertDecoderConfig(
        **SHAPE, **UNTIED, layer_types=["full_attention"] * 2, pad_token_id=0
    ),
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
CONFIGS["reversible layers"] = tiny_config("reformer", **NO_DROPOUT, axial_pos_embds=False, vocab_size=321)
CONFIGS["an MLP's output changed in place"] = tiny_config("falcon", **NO_DROPOUT, vocab_size=321)
CONFIGS["embeddings changed in place"] = tiny_config(
    "git", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, vocab_size=321
)
CONFIGS["attention and MLP side by side"] = tiny_config("cohere2", vocab_size=321)
MANY_EXPERTS = tiny_config("dbrx", vocab_size=321)
MANY_EXPERTS.ffn_config.moe_num_experts = 32  # ranks have tokens for other experts
MANY_EXPERTS.ffn_config.moe_top_k = 1
CONFIGS["a module called for each expert"] = MANY_EXPERTS
# Its experts call an activation, or an identity, each time that one of them has tokens.
CONFIGS["an activation called for each expert"] = tiny_config(
    "longcat_flash", vocab_size=321, n_routed_experts=32, zero_expert_num=8, moe_topk=2
)
MakeRecipe = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("unused matrices", "ddp-dp1"),
        ("unused matrices", "ddp-dp2"),
        ("unused matrices", "dp2-z2"),
        pytest.param("unused matrices", "dp2-z0", marks=pytest.mark.whole),
        pytest.param("unused matrices", "dp2-z3", marks=pytest.mark.whole),
        pytest.param("unused bias", "ddp-dp2", marks=pytest.mark.whole),
        ("unused bias", "fsdp-dp2"),
        ("head initialized by its parent", "pp2-z0"),
        ("reversible layers", "dp2-z1"),
        ("an MLP's output changed in place", "dp2-z3-tiled"),
        ("embeddings changed in place", "pp2-z0-recompute"),
        ("a module called for each expert", "dp2-z3"),
        pytest.param("an activation called for each expert", "dp2-z3", marks=pytest.mark.whole),
    ],
)
def test_every_layout_trains_what_one_process_trains(
    model: str, layout: str, make_recipe: MakeRecipe, ranks: Ranks, tmp_path: Path
) -> None:
    CONFIGS[model].save_pretrained(tmp_path)
    recipe = make_recipe(model={"name_or_path": str(tmp_path)}, train__steps=4)
    assert recipe.optimizer.weight_decay > 0
    baseline = ranks(train_in_memory, 1, Strategy.parse("reference").apply(recipe, 1))[0]
    strategy = Strategy.parse(layout)
    run = ranks(train_in_memory, strategy.world_size(2), strategy.apply(recipe, 2))[0]
    result = ParityResult.of(run, baseline)
    assert result.passed, str(result)


def test_tiles_of_a_first_layer_whose_input_has_no_gradient(
    make_recipe: MakeRecipe, ranks: Ranks, tmp_path: Path
) -> None:
    """Beside adapters nothing trains before the first MLP; DeepSpeed released its weights before its backward pass."""
    CONFIGS["attention and MLP side by side"].save_pretrained(tmp_path)
    lora = {"r": 4, "alpha": 8, "targets": ["all-linear"]}
    recipe = make_recipe(model={"name_or_path": str(tmp_path), "lora": lora}, train__steps=4)
    baseline = ranks(train_in_memory, 1, Strategy.parse("reference").apply(recipe, 1))[0]
    run = ranks(train_in_memory, 2, Strategy.parse("dp2-z3-tiled").apply(recipe, 2))[0]
    result = ParityResult.of(run, baseline)
    assert result.passed, str(result)
