"""A tiny model of any family: small enough to run whole on a CPU, with every part that a full-size one has.

Sizes go by the names that configs give them. What is not a size stays as the family's own default, so that its rotary
embedding, window, norm, gates and biases are exercised. `_FIELDS` holds what no general rule finds.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

from toolkit.errors import ModelError

LAYERS = 4
VOCABULARY = 99  # odd on purpose: it divides by no number of ranks

_NAMES = (
    (LAYERS, "num_hidden_layers n_layer num_layers n_layers decoder_layers num_attention_layers"),
    (
        4,
        """num_attention_heads n_head num_heads n_heads decoder_attention_heads attention_heads swa_num_attention_heads
        index_n_heads num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num o_groups""",
    ),
    (
        2,
        """num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads index_topk
        num_experts_per_tok num_experts_per_token moe_k moe_top_k moe_topk""",
    ),
    (1, "first_k_dense_replace num_dense_layers n_group topk_group num_expert_group n_shared_experts"),
    (
        8,
        """rotary_dim qk_rope_head_dim qk_nope_head_dim
        sliding_window sliding_window_size window_size attention_chunk_size keep_window_size local_attention""",
    ),
    (
        16,
        """head_dim global_head_dim attention_head_dim dim_head kv_channels v_head_dim swa_head_dim index_head_dim
        d_head hidden_size_per_layer_input laurel_rank""",
    ),
    (
        32,
        """max_position_embeddings n_positions n_ctx max_seq_len original_max_position_embeddings max_target_positions
        q_lora_rank kv_lora_rank o_lora_rank moe_intermediate_size shared_expert_intermediate_size
        shared_experts_intermediate_size expert_ffn_hidden_size shared_intermediate_size router_hidden_size
        moe_shared_expert_intermediate_size pronunciation_embed_dim shape_embed_dim""",
    ),
    (
        64,
        """hidden_size n_embd d_model embed_dim emb_dim word_embed_proj_dim embedding_size input_embedding_size
        output_embedding_size""",
    ),
    (
        96,
        """intermediate_size n_inner ffn_dim ffn_hidden_size decoder_ffn_dim d_ff d_inner dff dim_ff feed_forward_size
        intermediate_size_mlp dense_intermediate_size""",
    ),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
)
_SIZES = {name: size for size, names in _NAMES for name in names.split()}
_UNSET_BY_DEFAULT = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
_TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}

# What a family wants beyond its sizes.
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_DOTS3 = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16,
}
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "codegen": {"n_head": 16, "n_embd": 128},  # its heads lie in 4 chunks, each of which is split over up to 4 ranks
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "cohere_compass_text": {"rope_parameters": {"full_attention": None, "sliding_attention": _ROPE}},
    "dbrx.attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0},
    "dots3_note.text_config": _DOTS3,
    "dots3_note.vision_config": {"num_hidden_layers": 42, "adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots3_note.audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_text": _DOTS3,
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (4, 8), "attn_layers": ["local", "lsh"] * 2},
    "xmod": {"default_language": "en_XX"},
}


def default_config(model_type: str) -> Any:
    """The config that transformers builds when it is told nothing. Raises ModelError."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"{model_type} is not a model type of transformers. Take one of `dstk families`.")
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise _no_tiny(error) from error


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The config of a model of this type with 4 layers, 4 heads and 99 words, then `changes`. Raises ModelError."""
    default = default_config(model_type)
    try:
        return type(default)(**_fields(default, model_type) | changes)
    except Exception as error:
        raise _no_tiny(error) from error


def other_choices(model_type: str) -> dict[str, Any]:
    """Changes to a tiny config: the embedding tied if it is not, or untied, and all biases that are off."""
    given = default_config(model_type).to_dict()
    biases = {name: True for name, value in given.items() if "bias" in name and value is False}
    tied = {"tie_word_embeddings": not given["tie_word_embeddings"]} if "tie_word_embeddings" in given else {}
    return biases | tied


def _no_tiny(error: Exception) -> ModelError:
    return ModelError(f"no tiny config: {brief(error)}")


def brief(error: Exception) -> str:
    """The line of an error that says what is wrong: the last where a validator reports, else the first."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    line = (
        lines[-1].strip().removeprefix("ValueError: ")
        if "alidation" in type(error).__name__
        else lines[0].split(". ")[0]
    )
    return textwrap.shorten(line, 90, placeholder=" …")


def _fields(default: Any, model_type: str, *, layers: int = LAYERS) -> dict[str, Any]:
    """The arguments of a tiny config: sizes by name, parts by recursion, then the family's own.

    A part that is not the language model has fewer layers, so that nobody takes them for the decoder's.
    """
    given = default.to_dict()
    fields: dict[str, Any] = {name: size for name, size in _SIZES.items() if given.get(name)}
    fields |= {name: _SIZES[name] for name in _UNSET_BY_DEFAULT if name in given}
    if "num_hidden_layers" in fields:
        fields["num_hidden_layers"] = layers
    kinds = list(dict.fromkeys(given.get("layer_types") or ()))
    if len(kinds) > len(set(given["layer_types"][:layers] if kinds else ())):
        # The kind of layer that a pattern brings only later shall be among the few.
        fields["layer_types"] = (kinds * layers)[:layers]
    if "qk_rope_head_dim" in fields:
        # Latent attention: head_dim often is another name of the rotary part, and every head has its own key.
        if given.get("head_dim") == given["qk_rope_head_dim"]:
            fields["head_dim"] = fields["qk_rope_head_dim"]
        fields["num_key_value_heads"] = _SIZES["num_attention_heads"]
    for name, token in _TOKENS.items():
        if isinstance(given.get(name), int):
            fields[name] = token
    if "is_decoder" in given:
        fields["is_decoder"] = True
    for part in default.sub_configs:
        value = getattr(default, part, None)
        if value is not None:
            is_text = type(value) is type(default.get_text_config(decoder=True))
            fields[part] = _fields(value, f"{model_type}.{part}", layers=LAYERS if is_text else LAYERS // 2)
    return fields | dict(_FIELDS.get(model_type, {}))
