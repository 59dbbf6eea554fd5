"""Multi-head latent attention up to the scores: two latents, what comes out of them, and one rotary key for all heads.

Dims: b samples, s positions, a query heads of this rank, r rotary features, n the others of a query or key head.
"""

from collections.abc import Sequence

from toolkit.estimate.decoder.context import Context
from toolkit.estimate.decoder.norm import norm
from toolkit.estimate.decoder.rotary import Tables, rotate_latent
from toolkit.estimate.sizes.operations import Gradients, Kept, linear
from toolkit.estimate.sizes.tape import Tensor
from toolkit.estimate.sizes.views import cat, clone, expand, narrow, split, transpose, view


def latent_heads(c: Context, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [b, a, s, n + r] and value [b, a, s, v] of x [b, s, h]."""
    latent = c.shape.latent
    assert latent is not None
    q = x if latent.query_rank is None else norm(c, linear(x, latent.query_rank, bias=False), "rms")
    q = linear(q, c.heads * latent.head_dim, bias=False)
    q = transpose(view(q, c.b, c.s, c.heads, latent.head_dim), 1, 2)
    q_plain, q_rotary = split(q, [latent.plain_dim, latent.rotary_dim])
    both = linear(x, latent.key_value_rank + latent.rotary_dim, bias=False)
    kv, k_rotary = split(both, [latent.key_value_rank, latent.rotary_dim])
    del both, q
    kv = view(norm(c, kv, "rms"), c.b, 1, c.s, latent.key_value_rank)
    k_rotary = view(k_rotary, c.b, 1, c.s, latent.rotary_dim)
    q_rotary, k_rotary = rotate_latent(c, q_rotary, k_rotary, tables)
    query = cat([q_plain, q_rotary])
    del q_plain, q_rotary
    width = latent.plain_dim + latent.value_dim
    kv = transpose(view(linear(kv, c.heads * width, bias=False), c.b, c.s, c.heads, width), 1, 2)
    k_plain, value = split(kv, [latent.plain_dim, latent.value_dim])
    return query, _written([k_plain, expand(k_rotary, c.b, c.heads, c.s, latent.rotary_dim)]), value


def _written(parts: Sequence[Tensor]) -> Tensor:
    """An empty tensor into which the parts are copied side by side. Each copy's backward pass copies the whole."""
    shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    sizes = [part.shape[-1] for part in parts]
    y = parts[0].tape.new(shape, parts[0].itemsize)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        found: list[Tensor | None] = []
        for size in sizes:
            whole = clone(g[0])
            found.append(clone(narrow(whole, -1, size)))
            del whole
        return found

    y.tape.record([y], parts, [], backward)
    return y
