"""The parameters of one decoder layer, from the roles that a family's spec gives to the layer's modules.

A column-parallel layer is sharded over its outputs, a row-parallel one over its inputs.
"""

from collections.abc import Callable, Iterator

from toolkit.estimate.parameters.model_config import ModelConfig
from toolkit.estimate.parameters.parameter import Parameter
from toolkit.models.families.layer_rules import Flag
from toolkit.models.families.registry import FAMILIES
from toolkit.models.tensor_plan import Blocks

Parameters = Iterator[Parameter]


def layer_parameters(m: ModelConfig) -> Parameters:
    """List the parameters of a decoder layer in the order of Hugging Face's modules."""
    for path, role in m.parameter_rules.modules.items():
        yield from _ROLES[role](m, path)


def norm(m: ModelConfig, name: str, *shape: int, bias: bool | None = None) -> Parameters:
    """List a norm's parameters, which are replicated. `bias`: as the family's norms unless given."""
    if not m.flag(m.parameter_rules.affine):
        return
    yield Parameter(name=f"{name}.weight", shape=shape)
    if m.rules.norm in ("layer", "layer_1p") if bias is None else bias:
        yield Parameter(name=f"{name}.bias", shape=shape)


def _column(
    m: ModelConfig, name: str, outputs: int, bias: Flag | bool, blocks: Blocks = (), inputs: int = 0
) -> Parameters:
    """A linear layer sharded over its outputs. Conv1D is [inputs, outputs]."""
    inputs = inputs or m.shape.hidden
    transposed = m.parameter_rules.conv1d
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    yield Parameter(name=f"{name}.weight", shape=shape, dim=1 if transposed else 0, blocks=blocks)
    if bias if isinstance(bias, bool) else m.flag(bias):
        yield Parameter(name=f"{name}.bias", shape=(outputs,), dim=0, blocks=blocks)


def _row(m: ModelConfig, name: str, inputs: int, bias: Flag) -> Parameters:
    """A linear layer sharded over its inputs, with a replicated bias."""
    transposed, outputs = m.parameter_rules.conv1d, m.shape.hidden
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    yield Parameter(name=f"{name}.weight", shape=shape, dim=0 if transposed else 1)
    if m.flag(bias):
        yield Parameter(name=f"{name}.bias", shape=(outputs,))


def _replicated(name: str, outputs: int, inputs: int, *, bias: bool) -> Parameters:
    """A replicated linear layer."""
    yield Parameter(name=f"{name}.weight", shape=(outputs, inputs))
    if bias:
        yield Parameter(name=f"{name}.bias", shape=(outputs,))


def _projection(m: ModelConfig, name: str, heads: int) -> Parameters:
    """Queries, keys or values. Where attention gathers its columns, they are not sharded by heads."""
    d = m.shape.head_dim
    blocks = () if "attention" in m.gathers else ((heads, d),)
    return _column(m, name, heads * d, m.parameter_rules.qkv_bias, blocks)


def _fused_projection(m: ModelConfig, name: str) -> Parameters:
    """Queries, keys and values in one matrix, laid out as the tensor-parallel plan says; else head by head."""
    s, plan = m.shape, FAMILIES[m.shape.family].tensor_plan
    if plan is not None and name in plan.fused:
        blocks = plan.fused[name](m.as_attributes())
    else:
        blocks = () if "attention" in m.gathers else ((s.heads, 3 * s.head_dim),)
    outputs = sum(units * width for units, width in blocks) or s.attention_dim + 2 * s.kv_dim
    return _column(m, name, outputs, m.parameter_rules.qkv_bias, blocks)


def _latent(m: ModelConfig, block: str) -> Parameters:
    """Latent attention: projections to the latents are replicated, those from the latents to heads are sharded."""
    s, latent, bias = m.shape, m.shape.latent, m.flag(m.parameter_rules.qkv_bias)
    assert latent is not None
    queries, blocks = s.heads * s.head_dim, ((s.heads, s.head_dim),)
    if latent.query_rank is None:
        yield from _column(m, f"{block}.q_proj", queries, False, blocks)
    else:
        yield from _replicated(f"{block}.q_a_proj", latent.query_rank, s.hidden, bias=bias)
        yield from norm(m, f"{block}.q_a_layernorm", latent.query_rank)
        yield from _column(m, f"{block}.q_b_proj", queries, False, blocks, latent.query_rank)
    rank, width = latent.key_value_rank, latent.plain_dim + latent.value_dim
    yield from _replicated(f"{block}.kv_a_proj_with_mqa", rank + latent.rotary_dim, s.hidden, bias=bias)
    yield from norm(m, f"{block}.kv_a_layernorm", rank)
    yield from _column(m, f"{block}.kv_b_proj", s.heads * width, False, ((s.heads, width),), rank)
    yield from _row(m, f"{block}.o_proj", s.heads * latent.value_dim, m.parameter_rules.out_bias)


def _head_norm(m: ModelConfig, name: str, heads: int) -> Parameters:
    """The norm of queries or keys, in the form that the family has."""
    d = m.shape.head_dim
    if m.head_norm is None:
        return
    match m.rules.head_norm_form:
        case "all_heads":
            yield from norm(m, name, heads * d)
        case "weight_per_head":
            yield from norm(m, name, heads, d)
        case "module_per_head":
            for head in range(heads):
                yield from norm(m, f"{name}.{head}", d, bias=False)
        case _:
            yield from norm(m, name, d)


def _falcon_norms(m: ModelConfig, name: str) -> Parameters:
    new, count = m.flag(("new_decoder_architecture", False)), m.config.get("num_ln_in_parallel_attn")
    if new and (2 if count is None else count) == 2:
        names = ["ln_attn", "ln_mlp"]
    elif new or m.flag(("parallel_attn", True)):
        names = ["input_layernorm"]
    else:
        names = ["post_attention_layernorm", "input_layernorm"]
    for each in names:
        yield from norm(m, each, m.shape.hidden)


def _norm_if(m: ModelConfig, name: str, wanted: bool) -> Parameters:
    return norm(m, name, m.shape.hidden) if wanted else iter(())


def _xielu_slope(m: ModelConfig, name: str) -> Parameters:
    if m.config.get("hidden_act", "xielu") == "xielu":
        yield Parameter(name=name, shape=(1,))


_ROLES: dict[str, Callable[[ModelConfig, str], Parameters]] = {
    "q": lambda m, name: _projection(m, name, m.shape.heads),
    "k": lambda m, name: _projection(m, name, m.shape.kv_heads),
    "v": lambda m, name: _projection(m, name, m.shape.kv_heads),
    "qkv": _fused_projection,
    "latent": _latent,
    "out": lambda m, name: _row(m, name, m.shape.attention_dim, m.parameter_rules.out_bias),
    "gate": lambda m, name: _column(m, name, m.shape.ffn, m.rules.mlp_bias),
    "up": lambda m, name: _column(m, name, m.shape.ffn, m.rules.mlp_bias),
    "gate_up": lambda m, name: _column(m, name, 2 * m.shape.ffn, m.rules.mlp_bias),
    "down": lambda m, name: _row(m, name, m.shape.ffn, m.rules.mlp_bias),
    "norm": lambda m, name: norm(m, name, m.shape.hidden),
    "post_norm": lambda m, name: _norm_if(m, name, m.flag(("use_post_norm", True))),
    "sequential_norm": lambda m, name: _norm_if(m, name, not m.flag(("use_parallel_residual", False))),
    "falcon_norms": _falcon_norms,
    "ffn_norm": lambda m, name: norm(m, name, m.shape.ffn),
    "head_norm": lambda m, name: _head_norm(m, name, m.shape.heads),
    "query_norm": lambda m, name: _head_norm(m, name, m.shape.heads),
    "key_norm": lambda m, name: _head_norm(m, name, m.shape.kv_heads),
    "head_vector": lambda m, name: iter([Parameter(name=name, shape=(m.shape.head_dim,))]),
    "xielu_slope": _xielu_slope,
}
