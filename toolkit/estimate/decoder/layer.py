"""One decoder layer: norms, attention, MLP, dropout and residual sums, in the orders that the families have."""

from toolkit.estimate.decoder.attention import attention
from toolkit.estimate.decoder.context import Context
from toolkit.estimate.decoder.mlp import mlp, norm
from toolkit.estimate.decoder.rotary import Tables
from toolkit.estimate.sizes.operations import add, add_, dropout, times
from toolkit.estimate.sizes.tape import Tensor
from toolkit.models.families.layer_rules import LayerKind


def layer(c: Context, x: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    """x [b, s, h] -> [b, s, h]; with sequence parallelism [b, s/t, h]."""
    x = _parallel(c, x, tables, kind) if c.style.parallel else _sequential(c, x, tables, kind)
    c.returned.clear()
    return x


def _sequential(c: Context, x: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    x = _residual(c, x, _attention(c, _before(c, x), tables, kind), c.style.first_dropout)
    if not c.style.pre_norms and not c.style.post_norms:
        x = _norm(c, x)
    x = _residual(c, x, _mlp(c, _before(c, x)), c.style.hidden_dropout)
    return x if c.style.pre_norms or c.style.post_norms else _norm(c, x)


def _before(c: Context, x: Tensor) -> Tensor:
    return _norm(c, x) if c.style.pre_norms else x


def _norm(c: Context, x: Tensor) -> Tensor:
    with c.tape.part("norm"):
        return norm(c, x)


def _attention(c: Context, x: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    with c.tape.part("attention"):
        x = attention(c, x, tables, kind)
    return _norm(c, x) if c.style.post_norms else x


def _mlp(c: Context, x: Tensor) -> Tensor:
    with c.tape.part("mlp"):
        x = mlp(c, x)
    return _norm(c, x) if c.style.post_norms else x


def _residual(c: Context, x: Tensor, branch: Tensor, probability: float) -> Tensor:
    with c.tape.part("residual"):
        if "residual" in c.style.scales:
            branch = times(branch)
        return add(x, dropout(branch, probability))


def _parallel(c: Context, x: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    """Attention and MLP side by side, behind one norm or one each."""
    style = c.style
    normed = _norm(c, x)
    second = normed if style.norms_when_parallel == 1 else None
    if second is None and style.rules.sums_branches:
        second = _norm(c, x)  # before attention runs
    attended = _attention(c, normed, tables, kind)
    del normed
    if not style.rules.sums_branches:
        with c.tape.part("residual"):
            attended = dropout(attended, style.first_dropout)
    if second is None:
        second = _norm(c, x)
    widened = _mlp(c, second)
    del second
    with c.tape.part("residual"):
        if style.rules.sums_branches:
            return add(x, dropout(add_(widened, attended), style.hidden_dropout))
        return add(add(dropout(widened, style.hidden_dropout), attended), x)
