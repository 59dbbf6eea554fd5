"""The parameters of one decoder layer, family by family, in the order in which Hugging Face's modules name them.

What a family's code fixes stands here; what its config says is asked of `Facts`. A column-parallel layer is split over
its outputs, a row-parallel one over its inputs, as `toolkit.families` has it.
"""

from collections.abc import Callable, Iterator
from functools import partial

from toolkit.estimate.parameters.facts import Facts
from toolkit.estimate.parameters.tensor import Blocks, Tensor

Tensors = Iterator[Tensor]
_CODEGEN_CHUNKS = 4


def column(name: str, features: tuple[int, int], *, bias: bool, blocks: Blocks = (), conv1d: bool = False) -> Tensors:
    """A linear layer split over its outputs; `features` are (outputs, inputs). Conv1D is [inputs, outputs]."""
    outputs, inputs = features
    if conv1d:
        yield Tensor(name=f"{name}.weight", shape=(inputs, outputs), dim=1, blocks=blocks)
    else:
        yield Tensor(name=f"{name}.weight", shape=(outputs, inputs), dim=0, blocks=blocks)
    if bias:
        yield Tensor(name=f"{name}.bias", shape=(outputs,), dim=0, blocks=blocks)


def row(name: str, features: tuple[int, int], *, bias: bool, conv1d: bool = False) -> Tensors:
    """A linear layer split over its inputs; the bias is whole on every rank."""
    outputs, inputs = features
    if conv1d:
        yield Tensor(name=f"{name}.weight", shape=(inputs, outputs), dim=0)
    else:
        yield Tensor(name=f"{name}.weight", shape=(outputs, inputs), dim=1)
    if bias:
        yield Tensor(name=f"{name}.bias", shape=(outputs,))


def norm(name: str, *shape: int, weight: bool = True, bias: bool = False) -> Tensors:
    """A norm's parameters, whole on every rank."""
    if weight:
        yield Tensor(name=f"{name}.weight", shape=shape)
    if bias:
        yield Tensor(name=f"{name}.bias", shape=shape)


def _queries_keys_values(f: Facts, block: str, *, bias: bool, order: str = "qkv", gathers: bool = False) -> Tensors:
    """Three projections. `gathers`: heads are gathered behind them, so columns may lie anywhere."""
    s = f.shape
    for letter in order:
        heads = s.heads if letter == "q" else s.kv_heads
        blocks = () if gathers else ((heads, s.head_dim),)
        yield from column(f"{block}.{letter}_proj", (heads * s.head_dim, s.hidden), bias=bias, blocks=blocks)


def _gated(f: Facts, bias: bool) -> Tensors:
    s = f.shape
    yield from column("mlp.gate_proj", (s.ffn, s.hidden), bias=bias)
    yield from column("mlp.up_proj", (s.ffn, s.hidden), bias=bias)
    yield from row("mlp.down_proj", (s.hidden, s.ffn), bias=bias)


def _plain(f: Facts, up: str, down: str, *, bias: bool, conv1d: bool = False) -> Tensors:
    s = f.shape
    yield from column(up, (s.ffn, s.hidden), bias=bias, conv1d=conv1d)
    yield from row(down, (s.hidden, s.ffn), bias=bias, conv1d=conv1d)


def _llama(
    f: Facts,
    *,
    qkv_bias: tuple[str, bool] = ("attention_bias", False),
    out_bias: tuple[str, bool] = ("attention_bias", False),
    mlp_bias: tuple[str, bool] = ("mlp_bias", False),
    head_norms: bool = False,
    full_norms: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
) -> Tensors:
    """Llama and the many that share its projections. Flags are (field of the config, its default)."""
    s = f.shape
    yield from _queries_keys_values(f, "self_attn", bias=f.flag(*qkv_bias), gathers=full_norms)
    yield from row("self_attn.o_proj", (s.hidden, s.attention_dim), bias=f.flag(*out_bias))
    if head_norms or full_norms:
        yield from norm("self_attn.q_norm", s.head_dim if head_norms else s.attention_dim)
        yield from norm("self_attn.k_norm", s.head_dim if head_norms else s.kv_dim)
    yield from _gated(f, f.flag(*mlp_bias))
    for name in norms:
        yield from norm(name, s.hidden)


_NEVER = ("", False)
_ALWAYS = ("", True)
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _cohere(f: Facts) -> Tensors:
    s = f.shape
    bias = f.flag("attention_bias")
    head_norms = f.flag("use_qk_norm")
    yield from _queries_keys_values(f, "self_attn", bias=bias, gathers=head_norms)
    yield from row("self_attn.o_proj", (s.hidden, s.attention_dim), bias=bias)
    if head_norms:
        yield from norm("self_attn.q_norm", s.heads, s.head_dim)
        yield from norm("self_attn.k_norm", s.kv_heads, s.head_dim)
    yield from _gated(f, bias=False)
    yield from norm("input_layernorm", s.hidden)


def _stablelm(f: Facts) -> Tensors:
    s = f.shape
    head_norms = f.flag("qk_layernorm")
    yield from _queries_keys_values(f, "self_attn", bias=f.flag("use_qkv_bias"), gathers=head_norms)
    yield from row("self_attn.o_proj", (s.hidden, s.attention_dim), bias=False)
    if head_norms:
        for name, heads in (("q", s.heads), ("k", s.kv_heads)):
            for head in range(heads):
                yield from norm(f"self_attn.{name}_layernorm.norms.{head}", s.head_dim)
    yield from _gated(f, bias=False)
    yield from norm("input_layernorm", s.hidden, bias=True)
    if not f.flag("use_parallel_residual"):
        yield from norm("post_attention_layernorm", s.hidden, bias=True)


def _starcoder2(f: Facts) -> Tensors:
    s = f.shape
    bias = f.flag("use_bias", True)
    yield from _queries_keys_values(f, "self_attn", bias=bias)
    yield from row("self_attn.o_proj", (s.hidden, s.attention_dim), bias=bias)
    yield from _plain(f, "mlp.c_fc", "mlp.c_proj", bias=bias)
    yield from norm("input_layernorm", s.hidden, bias=True)
    yield from norm("post_attention_layernorm", s.hidden, bias=True)


def _phi(f: Facts) -> Tensors:
    s = f.shape
    yield from _queries_keys_values(f, "self_attn", bias=True)
    yield from row("self_attn.dense", (s.hidden, s.attention_dim), bias=True)
    if f.flag("qk_layernorm"):
        yield from norm("self_attn.q_layernorm", s.head_dim, bias=True)
        yield from norm("self_attn.k_layernorm", s.head_dim, bias=True)
    yield from _plain(f, "mlp.fc1", "mlp.fc2", bias=True)
    yield from norm("input_layernorm", s.hidden, bias=True)


def _phi3(f: Facts) -> Tensors:
    s = f.shape
    yield from row("self_attn.o_proj", (s.hidden, s.attention_dim), bias=False)
    yield from column("self_attn.qkv_proj", (s.attention_dim + 2 * s.kv_dim, s.hidden), bias=False)
    yield from column("mlp.gate_up_proj", (2 * s.ffn, s.hidden), bias=False)
    yield from row("mlp.down_proj", (s.hidden, s.ffn), bias=False)
    yield from norm("input_layernorm", s.hidden)
    yield from norm("post_attention_layernorm", s.hidden)


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
    yield from _plain(f, "mlp.c_fc", "mlp.c_proj", bias=True, conv1d=conv1d)


def _gpt_neo(f: Facts) -> Tensors:
    s = f.shape
    yield from norm("ln_1", s.hidden, bias=True)
    yield from _queries_keys_values(f, "attn.attention", bias=False, order="kvq")
    yield from row("attn.attention.out_proj", (s.hidden, s.hidden), bias=True)
    yield from norm("ln_2", s.hidden, bias=True)
    yield from _plain(f, "mlp.c_fc", "mlp.c_proj", bias=True)


def _gptj(f: Facts) -> Tensors:
    s = f.shape
    yield from norm("ln_1", s.hidden, bias=True)
    yield from _queries_keys_values(f, "attn", bias=False, order="kvq")
    yield from row("attn.out_proj", (s.hidden, s.hidden), bias=False)
    yield from _plain(f, "mlp.fc_in", "mlp.fc_out", bias=True)


def _codegen(f: Facts) -> Tensors:
    s = f.shape
    block = (s.heads // _CODEGEN_CHUNKS, s.head_dim)
    yield from norm("ln_1", s.hidden, bias=True)
    yield from column(
        "attn.qkv_proj", (3 * s.hidden, s.hidden), bias=False, blocks=(block, block, block) * _CODEGEN_CHUNKS
    )
    yield from row("attn.out_proj", (s.hidden, s.hidden), bias=False)
    yield from _plain(f, "mlp.fc_in", "mlp.fc_out", bias=True)


def _gpt_neox(f: Facts) -> Tensors:
    s = f.shape
    bias = f.flag("attention_bias", True)
    yield from norm("input_layernorm", s.hidden, bias=True)
    yield from norm("post_attention_layernorm", s.hidden, bias=True)
    blocks = ((s.heads, 3 * s.head_dim),)
    yield from column("attention.query_key_value", (3 * s.hidden, s.hidden), bias=bias, blocks=blocks)
    yield from row("attention.dense", (s.hidden, s.hidden), bias=bias)
    yield from _plain(f, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=True)


def _opt(f: Facts) -> Tensors:
    s = f.shape
    bias, affine = f.flag("enable_bias", True), f.flag("layer_norm_elementwise_affine", True)
    yield from _queries_keys_values(f, "self_attn", bias=bias, order="kvq")
    yield from row("self_attn.out_proj", (s.hidden, s.hidden), bias=bias)
    yield from norm("self_attn_layer_norm", s.hidden, weight=affine, bias=affine)
    yield from _plain(f, "fc1", "fc2", bias=bias)
    yield from norm("final_layer_norm", s.hidden, weight=affine, bias=affine)


def _bloom(f: Facts) -> Tensors:
    s = f.shape
    yield from norm("input_layernorm", s.hidden, bias=True)
    blocks = ((s.heads, 3 * s.head_dim),)
    yield from column("self_attention.query_key_value", (3 * s.hidden, s.hidden), bias=True, blocks=blocks)
    yield from row("self_attention.dense", (s.hidden, s.hidden), bias=True)
    yield from norm("post_attention_layernorm", s.hidden, bias=True)
    yield from _plain(f, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=True)


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
    yield from _plain(f, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=bias)
    parallel_norms = f.config.get("num_ln_in_parallel_attn")
    if new and (2 if parallel_norms is None else parallel_norms) == 2:
        yield from norm("ln_attn", s.hidden, bias=True)
        yield from norm("ln_mlp", s.hidden, bias=True)
        return
    if not new and not f.flag("parallel_attn", True):
        yield from norm("post_attention_layernorm", s.hidden, bias=True)
    yield from norm("input_layernorm", s.hidden, bias=True)


LAYERS: dict[str, Callable[[Facts], Tensors]] = {
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
    "llama": _llama,
    "mistral": partial(_llama, qkv_bias=_NEVER, out_bias=_NEVER, mlp_bias=_NEVER),
    "qwen2": partial(_llama, qkv_bias=_ALWAYS, out_bias=_NEVER, mlp_bias=_NEVER),
    "qwen3": partial(_llama, mlp_bias=_NEVER, head_norms=True),
    "gemma": partial(_llama, mlp_bias=_NEVER),
    "gemma2": partial(_llama, mlp_bias=_NEVER, norms=_GEMMA_NORMS),
    "gemma3_text": partial(_llama, mlp_bias=_NEVER, head_norms=True, norms=_GEMMA_NORMS),
    "phi3": _phi3,
    "olmo": partial(_llama, mlp_bias=_NEVER, norms=()),
    "olmo2": partial(
        _llama, mlp_bias=_NEVER, full_norms=True, norms=("post_attention_layernorm", "post_feedforward_layernorm")
    ),
    "stablelm": _stablelm,
    "granite": _llama,
    "cohere": _cohere,
    "smollm3": _llama,
}
"""The families of `toolkit.shape`."""
