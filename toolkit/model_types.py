"""Model types: how the config classes of transformers 5.23 spell what defines a GPT, and their defaults.

One entry of MODEL_TYPES for each family of dense decoders that `toolkit.shape` reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# What each fact is called across families. The first spelling is Hugging Face's standard one.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "tied": ("tie_word_embeddings",),
    "embed_dim": ("word_embed_proj_dim",),
}
FACT_OF = {spelling: fact for fact, spellings in SPELLINGS.items() for spelling in spellings}

MAPPED_BY_ALL = ("hidden", "layers", "heads", "positions")
"""Every Hugging Face config class maps these standard names to its own (its `attribute_map`)."""

SAME_CODE = {"gpt-sw3": "gpt2", "internlm3": "llama", "iquestcoder": "llama"}
"""Families that have a config class alone, and run another family's code."""

_LLAMA = {fact: SPELLINGS[fact][0] for fact in SPELLINGS if fact != "embed_dim"}
_NEOX = {fact: _LLAMA[fact] for fact in ("hidden", "layers", "heads", "ffn", "vocab", "positions", "tied")}
_GPT2 = _NEOX | {"hidden": "n_embd", "ffn": "n_inner", "layers": "n_layer", "heads": "n_head"}
_GPT2 |= {"positions": "n_positions"}
_NEO = _NEOX | {"layers": "num_layers", "heads": "num_heads"}
_OPT = _NEOX | {"ffn": "ffn_dim", "embed_dim": "word_embed_proj_dim"}
_BLOOM = {fact: _NEOX[fact] for fact in ("hidden", "vocab", "tied")}
_BLOOM |= {"layers": "n_layer", "heads": "n_head", "positions": "seq_length"}
_STABLELM = _NEOX | {"kv_heads": "num_key_value_heads"}
_OPENAI = {fact: _GPT2[fact] for fact in _GPT2 if fact != "ffn"}
_MPT = {"hidden": "d_model", "layers": "n_layers", "heads": "n_heads", "vocab": "vocab_size"}
_MPT |= {"positions": "max_seq_len", "tied": "tie_word_embeddings"}
_XGLM = _NEOX | {"hidden": "d_model", "layers": "num_layers", "heads": "attention_heads", "ffn": "ffn_dim"}
_FALCON = _NEOX | {"ffn": "ffn_hidden_size", "kv_heads": "num_kv_heads"}


@dataclass(frozen=True)
class ModelType:
    """One model_type: its spelling of each fact, and its config class's defaults in that order."""

    spelling: Mapping[str, str]
    defaults: tuple[int | bool | None, ...]
    gated: bool = False
    learned_positions: bool = False
    multi_query: bool = False
    """The config has a flag `multi_query`, on by default: one key-value head whatever num_kv_heads says."""
    latent: Mapping[str, int | None] | None = None
    """Latent attention: the config class's defaults of its dims."""
    heads_fill_hidden: bool = False
    """Its code has room for heads that are together as wide as the hidden state, and for no others."""

    def default(self, fact: str) -> int | bool | None:
        """What the config class says of a fact that its family spells; None where the file must say it."""
        return self.defaults[list(self.spelling).index(fact)]


def _llama(*defaults: int | bool | None, gated: bool = True, heads_fill_hidden: bool = False) -> ModelType:
    return ModelType(_LLAMA, defaults, gated=gated, heads_fill_hidden=heads_fill_hidden)


LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _latent(*defaults: int | None) -> dict[str, int | None]:
    return dict(zip(LATENT_FIELDS, defaults, strict=True))


# Defaults of transformers 5.23. Llama's order: hidden, layers, heads, kv_heads, head_dim, ffn, vocab, positions, tied.
MODEL_TYPES = {
    "gpt2": ModelType(_GPT2, (768, 12, 12, None, 50257, 1024, True), learned_positions=True),
    "gpt-sw3": ModelType(_GPT2, (768, 12, 12, None, 50257, 1024, True), learned_positions=True),
    "gpt_bigcode": ModelType(_GPT2, (768, 12, 12, None, 50257, 1024, True), learned_positions=True, multi_query=True),
    "gpt_neo": ModelType(_NEO, (2048, 24, 16, None, 50257, 2048, True), learned_positions=True),
    "gptj": ModelType(_GPT2, (4096, 28, 16, None, 50400, 2048, False)),
    "codegen": ModelType(_GPT2, (4096, 28, 16, None, 50400, 2048, False)),
    "gpt_neox": ModelType(_NEOX, (6144, 44, 64, 24576, 50432, 2048, False)),
    "opt": ModelType(_OPT, (768, 12, 12, 3072, 50272, 2048, True, None), learned_positions=True),
    "bloom": ModelType(_BLOOM, (64, 250880, True, 2, 8, None)),
    "falcon": ModelType(_FALCON, (4544, 32, 71, None, 65024, 2048, True, None), multi_query=True),
    "mpt": ModelType(_MPT, (2048, 24, 16, 50368, 2048, True)),
    "persimmon": ModelType(_NEOX, (4096, 36, 64, 16384, 262144, 16384, False)),
    "biogpt": ModelType(_NEOX, (1024, 24, 16, 4096, 42384, 1024, True), learned_positions=True),
    "xglm": ModelType(_XGLM, (1024, 24, 16, 4096, 256008, 2048, True)),
    "openai-gpt": ModelType(_OPENAI, (768, 12, 12, 40478, 512, True), learned_positions=True),
    "phi": _llama(2048, 24, 32, None, None, 8192, 51200, 2048, False, gated=False),
    "starcoder2": _llama(3072, 30, 24, 2, None, 12288, 49152, 4096, True, gated=False),
    "llama": _llama(4096, 32, 32, None, None, 11008, 32000, 2048, False),
    "mistral": _llama(4096, 32, 32, 8, None, 14336, 32000, 131072, False),
    "qwen2": _llama(4096, 32, 32, 32, None, 22016, 151936, 32768, False),
    "qwen3": _llama(4096, 32, 32, 32, 128, 22016, 151936, 32768, False),
    "gemma": _llama(3072, 28, 16, 16, 256, 24576, 256000, 8192, True),
    "gemma2": _llama(2304, 26, 8, 4, 256, 9216, 256000, 8192, True),
    "gemma3_text": _llama(2304, 26, 8, 4, 256, 9216, 262208, 131072, True),
    "vaultgemma": _llama(2304, 26, 8, 4, 256, 9216, 256000, 8192, True),
    "phi3": _llama(3072, 32, 32, None, None, 8192, 32064, 4096, False),
    "olmo": _llama(4096, 32, 32, None, None, 11008, 50304, 2048, False),
    "olmo2": _llama(4096, 32, 32, None, None, 11008, 50304, 2048, False),
    "olmo3": _llama(4096, 32, 32, None, None, 11008, 50304, 2048, False),
    "stablelm": ModelType(_STABLELM, (2560, 32, 32, 6912, 50304, 4096, False, 32), gated=True),
    "granite": _llama(4096, 32, 32, None, None, 11008, 32000, 2048, False),
    "cohere": _llama(8192, 40, 64, None, None, 22528, 256000, 8192, True),
    "cohere2": _llama(8192, 40, 64, None, None, 22528, 256000, 8192, True),
    "smollm3": _llama(2048, 36, 16, 4, None, 11008, 128256, 32768, True),
    "ministral": _llama(4096, 32, 32, 8, None, 14336, 32000, 131072, False),
    "ministral3": _llama(4096, 34, 32, 8, 128, 14336, 131072, 262144, False),
    "glm": _llama(4096, 40, 32, 2, 128, 13696, 151552, 131072, False),
    "glm4": _llama(4096, 40, 32, 2, 128, 13696, 151552, 131072, False),
    "nemotron": _llama(6144, 32, 48, None, None, 24576, 256000, 4096, False, gated=False),
    "seed_oss": _llama(4096, 64, 80, 8, 128, 27648, 155136, 524288, False),
    "exaone4": _llama(4096, 32, 32, 32, None, 16384, 102400, 2048, False),
    "ernie4_5": _llama(1024, 18, 16, 2, 128, 3072, 103424, 131072, True),
    "hunyuan_v1_dense": _llama(4096, 32, 32, None, None, 11008, 290943, 2048, False),
    "apertus": _llama(4096, 32, 32, None, None, 14336, 131072, 65536, False, gated=False),
    "arcee": _llama(2560, 32, 32, None, None, 18432, 32000, 4096, False, gated=False),
    "nanochat": _llama(768, 12, 6, None, None, 8192, 50304, 2048, False, gated=False),
    "internlm3": _llama(4096, 48, 32, 2, 128, 10240, 128512, 32768, False),
    "helium": _llama(2560, 24, 20, 20, 128, 7040, 48000, 4096, False, heads_fill_hidden=True),
    "cwm": _llama(6144, 64, 48, 8, 128, 21504, 128256, 131072, False),
    "jais2": _llama(3328, 32, 26, None, None, 26624, 150272, 8192, False, gated=False),
    "iquestcoder": _llama(5120, 80, 40, 8, 128, 27648, 76800, 131072, False),
    "hyperclovax": _llama(4096, 32, 32, None, None, 11008, 32000, 2048, False),
    "diffllama": _llama(2048, 16, 32, None, None, 8192, 32000, 2048, False),
    "minicpm3": ModelType(
        _NEOX, (2560, 62, 40, 6400, 73448, 32768, True), gated=True, latent=_latent(768, 256, 64, 32, None)
    ),
    "youtu": ModelType(
        _NEOX, (2048, 32, 16, 6144, 128256, 131072, True), gated=True, latent=_latent(1536, 512, 128, 64, 128)
    ),
    "bitnet": _llama(2560, 30, 20, 5, None, 6912, 128256, 2048, False, heads_fill_hidden=True),
}

_UNLIKE = "its layers differ in their parameters"
REFUSED = {
    "cohere_compass_text": "its rope_parameters, which say which layers have a rotary embedding, are not read",
    "ctrl": "its layers are not known",
    "doge": "its attention masks what it has learned to mask, which is not followed",
    "gemma3n_text": "its layers pass several hidden states on, which are not followed",
    "gemma4_text": _UNLIKE,
    "gemma4_unified_text": _UNLIKE,
    "gpt_neox_japanese": _UNLIKE,
    "granite_swa": "its attention sinks are not followed",
    "modernbert-decoder": _UNLIKE,
    "phi4_multimodal": "its encoders of images and sound, which train with it, are not known; its text model is a phi3",
}
"""Dense decoders that are not read, and why: what is not counted right is not counted."""

_WITH_EXPERTS = """
afmoe aria aria_text axk1 axk2 beam cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1 dots3_note
dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granitemoe
granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling2_text inkling_text jetmoe kolibri1 laguna llama4
llama4_text longcat_flash mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe qwen3_moe
solar_open zaya
"""
_WITH_A_STATE = """
bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax
nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text
recurrent_gemma rwkv xlstm zamba zamba2
"""
NOT_DENSE = {
    **dict.fromkeys(_WITH_EXPERTS.split(), "its layers have experts, of which a token sees a few"),
    **dict.fromkeys(
        _WITH_A_STATE.split(), "it carries a state along the sequence in place of attention, in all or some layers"
    ),
}
"""Decoders that are no dense ones, and why: another family's name near theirs would be no answer."""
