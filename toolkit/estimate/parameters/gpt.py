"""The decoder layers of GPT-2 and its kin: a plain MLP, LayerNorms with biases, often one projection of all heads."""

from collections.abc import Callable
from functools import partial

from toolkit.estimate.parameters.facts import Facts
from toolkit.estimate.parameters.linear import Tensors, column, norm, plain_mlp, queries_keys_values, row
from toolkit.estimate.parameters.tensor import Blocks

_CODEGEN_CHUNKS = 4


def _starcoder2(f: Facts) -> Tensors:
    s = f.shape
    bias = f.flag("use_bias", True)
    yield from queries_keys_values(f, "self_attn", bias=bias)
    yield from row("self_attn.o_proj", (s.hidden, s.attention_dim), bias=bias)
    yield from plain_mlp(f, "mlp.c_fc", "mlp.c_proj", bias=bias)
    yield from norm("input_layernorm", s.hidden, bias=True)
    yield from norm("post_attention_layernorm", s.hidden, bias=True)


def _phi(f: Facts) -> Tensors:
    s = f.shape
    yield from queries_keys_values(f, "self_attn", bias=True)
    yield from row("self_attn.dense", (s.hidden, s.attention_dim), bias=True)
    if f.flag("qk_layernorm"):
        yield from norm("self_attn.q_layernorm", s.head_dim, bias=True)
        yield from norm("self_attn.k_layernorm", s.head_dim, bias=True)
    yield from plain_mlp(f, "mlp.fc1", "mlp.fc2", bias=True)
    yield from norm("input_layernorm", s.hidden, bias=True)


def _gpt2(f: Facts, *, conv1d: bool = True) -> Tensors:
    s = f.shape
    single = (s.heads, s.head_dim), (s.kv_heads, s.head_dim), (s.kv_heads, s.head_dim)
    # Without a key-value head that all share, GPT-BigCode interleaves the three head by head.
    blocks = single if conv1d or s.kv_heads == 1 else ((s.heads, 3 * s.head_dim),)
    width = s.attention_dim + 2 * s.kv_dim
    yield from norm("ln_1", s.hidden, bias=True)
    yield from column("attn.c_attn", (width, s.hidden), bias=True, blocks=blocks, conv1d=conv1d)
    yield from row("attn.c_proj", (s.hidden, s.hidden), bias=True, conv1d=conv1d)
    yield from norm("ln_2", s.hidden, bias=True)
    yield from plain_mlp(f, "mlp.c_fc", "mlp.c_proj", bias=True, conv1d=conv1d)


def _gpt_neo(f: Facts) -> Tensors:
    s = f.shape
    yield from norm("ln_1", s.hidden, bias=True)
    yield from queries_keys_values(f, "attn.attention", bias=False, order="kvq")
    yield from row("attn.attention.out_proj", (s.hidden, s.hidden), bias=True)
    yield from norm("ln_2", s.hidden, bias=True)
    yield from plain_mlp(f, "mlp.c_fc", "mlp.c_proj", bias=True)


def _gptj(f: Facts) -> Tensors:
    s = f.shape
    yield from norm("ln_1", s.hidden, bias=True)
    yield from queries_keys_values(f, "attn", bias=False, order="kvq")
    yield from row("attn.out_proj", (s.hidden, s.hidden), bias=False)
    yield from plain_mlp(f, "mlp.fc_in", "mlp.fc_out", bias=True)


def _codegen(f: Facts) -> Tensors:
    s = f.shape
    block = (s.heads // _CODEGEN_CHUNKS, s.head_dim)
    yield from norm("ln_1", s.hidden, bias=True)
    yield from column(
        "attn.qkv_proj", (3 * s.hidden, s.hidden), bias=False, blocks=(block, block, block) * _CODEGEN_CHUNKS
    )
    yield from row("attn.out_proj", (s.hidden, s.hidden), bias=False)
    yield from plain_mlp(f, "mlp.fc_in", "mlp.fc_out", bias=True)


def _gpt_neox(f: Facts) -> Tensors:
    s = f.shape
    bias = f.flag("attention_bias", True)
    yield from norm("input_layernorm", s.hidden, bias=True)
    yield from norm("post_attention_layernorm", s.hidden, bias=True)
    blocks = ((s.heads, 3 * s.head_dim),)
    yield from column("attention.query_key_value", (3 * s.hidden, s.hidden), bias=bias, blocks=blocks)
    yield from row("attention.dense", (s.hidden, s.hidden), bias=bias)
    yield from plain_mlp(f, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=True)


def _opt(f: Facts) -> Tensors:
    s = f.shape
    bias, affine = f.flag("enable_bias", True), f.flag("layer_norm_elementwise_affine", True)
    yield from queries_keys_values(f, "self_attn", bias=bias, order="kvq")
    yield from row("self_attn.out_proj", (s.hidden, s.hidden), bias=bias)
    yield from norm("self_attn_layer_norm", s.hidden, weight=affine, bias=affine)
    yield from plain_mlp(f, "fc1", "fc2", bias=bias)
    yield from norm("final_layer_norm", s.hidden, weight=affine, bias=affine)


def _bloom(f: Facts) -> Tensors:
    s = f.shape
    yield from norm("input_layernorm", s.hidden, bias=True)
    blocks = ((s.heads, 3 * s.head_dim),)
    yield from column("self_attention.query_key_value", (3 * s.hidden, s.hidden), bias=True, blocks=blocks)
    yield from row("self_attention.dense", (s.hidden, s.hidden), bias=True)
    yield from norm("post_attention_layernorm", s.hidden, bias=True)
    yield from plain_mlp(f, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=True)


def _falcon(f: Facts) -> Tensors:
    s = f.shape
    bias, new = f.flag("bias"), f.flag("new_decoder_architecture")
    blocks: Blocks
    if new:
        blocks = ((s.kv_heads, (s.heads // s.kv_heads + 2) * s.head_dim),)
    elif f.flag("multi_query", True):
        blocks = (s.heads, s.head_dim), (1, s.head_dim), (1, s.head_dim)
    else:
        blocks = ((s.heads, 3 * s.head_dim),)
    outputs = sum(units * width for units, width in blocks)
    yield from column("self_attention.query_key_value", (outputs, s.hidden), bias=bias, blocks=blocks)
    yield from row("self_attention.dense", (s.hidden, s.hidden), bias=bias)
    yield from plain_mlp(f, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=bias)
    parallel_norms = f.config.get("num_ln_in_parallel_attn")
    if new and (2 if parallel_norms is None else parallel_norms) == 2:
        yield from norm("ln_attn", s.hidden, bias=True)
        yield from norm("ln_mlp", s.hidden, bias=True)
        return
    if not new and not f.flag("parallel_attn", True):
        yield from norm("post_attention_layernorm", s.hidden, bias=True)
    yield from norm("input_layernorm", s.hidden, bias=True)


def _mpt(f: Facts) -> Tensors:
    s = f.shape
    yield from norm("norm_1", s.hidden)
    yield from column("attn.Wqkv", (3 * s.hidden, s.hidden), bias=False, blocks=((s.heads, s.head_dim),) * 3)
    yield from row("attn.out_proj", (s.hidden, s.hidden), bias=False)
    yield from norm("norm_2", s.hidden)
    yield from plain_mlp(f, "ffn.up_proj", "ffn.down_proj", bias=False)


def _persimmon(f: Facts) -> Tensors:
    s = f.shape
    blocks = ((s.heads, 3 * s.head_dim),)
    yield from column("self_attn.query_key_value", (3 * s.hidden, s.hidden), bias=True, blocks=blocks)
    yield from row("self_attn.dense", (s.hidden, s.hidden), bias=True)
    if f.flag("qk_layernorm", True):
        yield from norm("self_attn.q_layernorm", s.head_dim, bias=True)
        yield from norm("self_attn.k_layernorm", s.head_dim, bias=True)
    yield from plain_mlp(f, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=True)
    yield from norm("input_layernorm", s.hidden, bias=True)
    yield from norm("post_attention_layernorm", s.hidden, bias=True)


def _openai(f: Facts) -> Tensors:
    s = f.shape
    blocks = ((s.heads, s.head_dim),) * 3
    yield from column("attn.c_attn", (3 * s.hidden, s.hidden), bias=True, blocks=blocks, conv1d=True)
    yield from row("attn.c_proj", (s.hidden, s.hidden), bias=True, conv1d=True)
    yield from norm("ln_1", s.hidden, bias=True)
    yield from plain_mlp(f, "mlp.c_fc", "mlp.c_proj", bias=True, conv1d=True)
    yield from norm("ln_2", s.hidden, bias=True)


GPT_LIKE: dict[str, Callable[[Facts], Tensors]] = {
    "gpt2": _gpt2,
    "gpt_bigcode": partial(_gpt2, conv1d=False),
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "codegen": _codegen,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
    "falcon": _falcon,
    "phi": _phi,
    "starcoder2": _starcoder2,
    "mpt": _mpt,
    "persimmon": _persimmon,
    "biogpt": _opt,
    "xglm": _opt,
    "openai-gpt": _openai,
}
