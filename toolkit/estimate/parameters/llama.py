"""The decoder layers of Llama and its kin: separate projections, mostly a gated MLP and norms without biases."""

from collections.abc import Callable
from functools import partial

from toolkit.estimate.parameters.facts import Facts
from toolkit.estimate.parameters.linear import Tensors, column, norm, plain_mlp, queries_keys_values, row, whole
from toolkit.estimate.parameters.tensor import Tensor

Flag = tuple[str, bool]
"""A field of the config, and its default."""
NEVER: Flag = ("", False)
ALWAYS: Flag = ("", True)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("q_norm", "k_norm")


def _gated_mlp(f: Facts, bias: bool = False) -> Tensors:
    """Three matrices."""
    s = f.shape
    yield from column("mlp.gate_proj", (s.ffn, s.hidden), bias=bias)
    yield from column("mlp.up_proj", (s.ffn, s.hidden), bias=bias)
    yield from row("mlp.down_proj", (s.hidden, s.ffn), bias=bias)


def _fused_gate(f: Facts, bias: bool = False) -> Tensors:
    """Gate and up-projection in one matrix."""
    s = f.shape
    yield from column("mlp.gate_up_proj", (2 * s.ffn, s.hidden), bias=bias)
    yield from row("mlp.down_proj", (s.hidden, s.ffn), bias=bias)


def _ungated_mlp(f: Facts, bias: bool = False, up: str = "up_proj", down: str = "down_proj") -> Tensors:
    """Two matrices."""
    return plain_mlp(f, f"mlp.{up}", f"mlp.{down}", bias=bias)


def _xielu_mlp(f: Facts, bias: bool = False) -> Tensors:
    """Apertus: two matrices, and an activation function with two slopes that are learned."""
    yield from _ungated_mlp(f, bias)
    if f.config.get("hidden_act", "xielu") == "xielu":
        yield Tensor(name="mlp.act_fn.alpha_p", shape=(1,))
        yield Tensor(name="mlp.act_fn.alpha_n", shape=(1,))


def _llama(
    f: Facts,
    *,
    qkv_bias: Flag = ("attention_bias", False),
    out_bias: Flag = ("attention_bias", False),
    mlp_bias: Flag = ("mlp_bias", False),
    head_norms: tuple[str, ...] = (),
    full_norms: bool = False,
    inner_norms: bool = False,
    gathers: bool = False,
    mlp: Callable[[Facts, bool], Tensors] = _gated_mlp,
    norms: tuple[str, ...] = _NORMS,
    norm_bias: bool = False,
) -> Tensors:
    """Llama and the many that share its projections.

    `head_norms`: of queries and keys, one for all heads; `full_norms`: over all heads together. `inner_norms`: in front
    of both row-parallel layers. `gathers`: every rank computes all heads, for another reason.
    """
    s = f.shape
    yield from queries_keys_values(f, "self_attn", bias=f.flag(*qkv_bias), gathers=gathers or full_norms or inner_norms)
    yield from row("self_attn.o_proj", (s.hidden, s.attention_dim), bias=f.flag(*out_bias))
    for name in head_norms:
        yield from norm(f"self_attn.{name}", s.head_dim)
    if full_norms:
        yield from norm("self_attn.q_norm", s.attention_dim)
        yield from norm("self_attn.k_norm", s.kv_dim)
    if inner_norms:
        yield from norm("self_attn.attn_sub_norm", s.hidden)
    yield from mlp(f, f.flag(*mlp_bias))
    if inner_norms:
        yield from norm("mlp.ffn_sub_norm", s.ffn)
    for name in norms:
        yield from norm(name, s.hidden, bias=norm_bias)


def _latent(f: Facts, *, mlp_bias: Flag = NEVER) -> Tensors:
    """Latent attention: what leads to the latents is whole on every rank, heads are split where they leave them."""
    s, latent, bias = f.shape, f.shape.latent, f.flag("attention_bias")
    assert latent is not None
    queries, blocks = s.heads * s.head_dim, ((s.heads, s.head_dim),)
    if latent.query_rank is None:
        yield from column("self_attn.q_proj", (queries, s.hidden), bias=False, blocks=blocks)
    else:
        yield from whole("self_attn.q_a_proj", (latent.query_rank, s.hidden), bias=bias)
        yield from norm("self_attn.q_a_layernorm", latent.query_rank)
        yield from column("self_attn.q_b_proj", (queries, latent.query_rank), bias=False, blocks=blocks)
    rank, width = latent.key_value_rank, latent.plain_dim + latent.value_dim
    yield from whole("self_attn.kv_a_proj_with_mqa", (rank + latent.rotary_dim, s.hidden), bias=bias)
    yield from norm("self_attn.kv_a_layernorm", rank)
    yield from column("self_attn.kv_b_proj", (s.heads * width, rank), bias=False, blocks=((s.heads, width),))
    yield from row("self_attn.o_proj", (s.hidden, s.heads * latent.value_dim), bias=bias)
    yield from _gated_mlp(f, f.flag(*mlp_bias))
    for name in _NORMS:
        yield from norm(name, s.hidden)


def _diffllama(f: Facts) -> Tensors:
    """Llama's layer, and four vectors from which attention learns how much of its second half it takes away."""
    for name in ("q1", "k1", "q2", "k2"):
        yield Tensor(name=f"self_attn.lambda_{name}", shape=(f.shape.head_dim,))
    yield from _llama(f, mlp_bias=NEVER, gathers=True)


def _hyperclovax(f: Facts) -> Tensors:
    """Granite's layer; by default with norms behind attention and MLP."""
    return _llama(f, norms=(*_NORMS, "post_norm1", "post_norm2") if f.flag("use_post_norm", True) else _NORMS)


def _cohere(f: Facts) -> Tensors:
    s = f.shape
    bias = f.flag("attention_bias")
    head_norms = f.flag("use_qk_norm")
    yield from queries_keys_values(f, "self_attn", bias=bias, gathers=head_norms)
    yield from row("self_attn.o_proj", (s.hidden, s.attention_dim), bias=bias)
    if head_norms:
        yield from norm("self_attn.q_norm", s.heads, s.head_dim)
        yield from norm("self_attn.k_norm", s.kv_heads, s.head_dim)
    yield from _gated_mlp(f, bias=False)
    yield from norm("input_layernorm", s.hidden)


def _stablelm(f: Facts) -> Tensors:
    s = f.shape
    head_norms = f.flag("qk_layernorm")
    yield from queries_keys_values(f, "self_attn", bias=f.flag("use_qkv_bias"), gathers=head_norms)
    yield from row("self_attn.o_proj", (s.hidden, s.attention_dim), bias=False)
    if head_norms:
        for name, heads in (("q", s.heads), ("k", s.kv_heads)):
            for head in range(heads):
                yield from norm(f"self_attn.{name}_layernorm.norms.{head}", s.head_dim)
    yield from _gated_mlp(f, bias=False)
    yield from norm("input_layernorm", s.hidden, bias=True)
    if not f.flag("use_parallel_residual"):
        yield from norm("post_attention_layernorm", s.hidden, bias=True)


def _phi3(f: Facts) -> Tensors:
    s = f.shape
    yield from row("self_attn.o_proj", (s.hidden, s.attention_dim), bias=False)
    yield from column("self_attn.qkv_proj", (s.attention_dim + 2 * s.kv_dim, s.hidden), bias=False)
    yield from column("mlp.gate_up_proj", (2 * s.ffn, s.hidden), bias=False)
    yield from row("mlp.down_proj", (s.hidden, s.ffn), bias=False)
    yield from norm("input_layernorm", s.hidden)
    yield from norm("post_attention_layernorm", s.hidden)


_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_no_biases = partial(_llama, qkv_bias=NEVER, out_bias=NEVER, mlp_bias=NEVER)
_no_mlp_bias = partial(_llama, mlp_bias=NEVER)
_USE_BIAS: Flag = ("use_bias", False)
_glm = partial(_llama, qkv_bias=("attention_bias", True), out_bias=NEVER, mlp_bias=NEVER, mlp=_fused_gate)

LLAMA_LIKE: dict[str, Callable[[Facts], Tensors]] = {
    "llama": _llama,
    "mistral": _no_biases,
    "qwen2": partial(_llama, qkv_bias=ALWAYS, out_bias=NEVER, mlp_bias=NEVER),
    "qwen3": partial(_no_mlp_bias, head_norms=_HEAD_NORMS),
    "gemma": _no_mlp_bias,
    "gemma2": partial(_no_mlp_bias, norms=_GEMMA_NORMS),
    "gemma3_text": partial(_no_mlp_bias, head_norms=_HEAD_NORMS, norms=_GEMMA_NORMS),
    "vaultgemma": partial(_no_mlp_bias, norms=("input_layernorm", "pre_feedforward_layernorm")),
    "phi3": _phi3,
    "olmo": partial(_no_mlp_bias, norms=()),
    "olmo2": partial(_no_mlp_bias, full_norms=True, norms=_POST_NORMS),
    "olmo3": partial(_no_mlp_bias, full_norms=True, norms=_POST_NORMS),
    "stablelm": _stablelm,
    "granite": _llama,
    "cohere": _cohere,
    "cohere2": partial(_no_mlp_bias, norms=("input_layernorm",)),
    "smollm3": _llama,
    "ministral": _no_biases,
    "ministral3": _no_biases,
    "glm": _glm,
    "glm4": partial(_glm, norms=(*_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")),
    "nemotron": partial(_llama, mlp=_ungated_mlp, norm_bias=True),
    "seed_oss": partial(_llama, qkv_bias=("attention_bias", True), out_bias=("attention_out_bias", False)),
    "exaone4": partial(_no_biases, head_norms=_HEAD_NORMS, norms=_POST_NORMS),
    "ernie4_5": partial(_llama, qkv_bias=_USE_BIAS, out_bias=_USE_BIAS, mlp_bias=_USE_BIAS),
    "hunyuan_v1_dense": partial(_no_mlp_bias, head_norms=("query_layernorm", "key_layernorm")),
    "apertus": partial(
        _no_mlp_bias, head_norms=_HEAD_NORMS, mlp=_xielu_mlp, norms=("attention_layernorm", "feedforward_layernorm")
    ),
    "arcee": partial(_llama, mlp=_ungated_mlp),
    "nanochat": partial(_no_mlp_bias, mlp=partial(_ungated_mlp, up="fc1", down="fc2"), norms=()),
    "helium": partial(_llama, out_bias=NEVER),
    "cwm": partial(_llama, qkv_bias=NEVER, out_bias=NEVER),
    "jais2": partial(
        _llama,
        qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True),
        mlp_bias=("mlp_bias", True),
        mlp=_ungated_mlp,
        norm_bias=True,
    ),
    "hyperclovax": _hyperclovax,
    "minicpm3": partial(_latent, mlp_bias=("mlp_bias", False)),
    "youtu": _latent,
    "diffllama": _diffllama,
    "bitnet": partial(_no_mlp_bias, inner_norms=True),
}
