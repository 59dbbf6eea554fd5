"""Attention of a tile with the logarithms of its softmax sums, by which tiles merge; and its gradients.

A tile's gradients follow from the merged output and the merged log-sum-exp alone (Dao 2023, FlashAttention-2, section
3.1.2; Liu et al. 2023, Ring Attention): kernels get these, and return exact parts of the sums.

Dims: b samples, h heads, g key-value heads, each for r = h/g heads, q queries, k keys, d size of a head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

MOST_SCORES = 1 << 24
"""Scores that exist at a time where no kernel of PyTorch computes them piece by piece."""
_aten = torch.ops.aten
Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How scores follow from products of queries and keys. `softcap`: a bound that tanh keeps them in, or None."""

    scale: float
    softcap: float | None = None


def exact(tensor: Tensor) -> torch.dtype:
    """The dtype of sums over numbers of this tensor: fp32, or fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: "TileMask") -> tuple[Tensor, Tensor]:
    """Return the output [b, h, q, d] and the log-sum-exp [b, h, q] of a tile. Heads of queries share keys, in order."""
    if scores.softcap is None and query.device.type == "cpu":
        output, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask.is_causal, attn_mask=mask.bias(query), scale=scores.scale
        )
        return output, sums
    if _has_flash(query, scores, mask):
        computed = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, mask.is_causal, False, scale=scores.scale
        )
        return computed[0], computed[1]
    output = query.new_empty((*query.shape[:3], value.shape[-1]))
    sums = torch.empty(query.shape[:3], dtype=exact(query), device=query.device)
    for part in _parts(query, key):
        output[:, :, part], sums[:, :, part] = _attend_part(query[:, :, part], key, value, scores, mask, part)
    return output, sums


def _attend_part(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: "TileMask", part: slice
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of a part of the queries of a tile."""
    values, _ = _scores(query, key, scores, mask, part)
    sums = values.logsumexp(dim=-1)
    weights = values.sub_(sums[..., None]).exp_().to(value.dtype)
    return (_by_group(weights, value) @ value[:, :, None]).flatten(1, 2), sums


class QueryRows(NamedTuple):
    """What a backward pass has of some queries: these, the merged output and its gradient, all [b, h, q, d]."""

    query: Tensor
    gradient: Tensor
    output: Tensor
    sums: Tensor
    """The merged log-sum-exp [b, h, q]."""

    def rows(self, part: slice) -> "QueryRows":
        """Return those of a part of the queries."""
        return QueryRows(*(each[:, :, part] for each in self))


def gradients(
    queries: QueryRows, key: Tensor, value: Tensor, scores: Scores, mask: "TileMask"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tile's part of the gradients of queries, keys and values."""
    query, gradient, output, sums = queries
    if scores.softcap is None and query.device.type == "cpu":
        computed = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient,
            query,
            key,
            value,
            output,
            sums,
            0.0,
            mask.is_causal,
            attn_mask=mask.bias(query),
            scale=scores.scale,
        )
        return computed[0], computed[1], computed[2]
    if _has_flash(query, scores, mask):
        # Bounds of sequences that are defined, even without elements, would choose the kernel for varlen inputs.
        dense = None
        unused_seed = torch.empty(0, dtype=torch.int64, device=query.device)
        computed = _aten._scaled_dot_product_flash_attention_backward(
            gradient,
            query,
            key,
            value,
            output,
            sums.contiguous(),  # the kernel does not look at its strides
            cum_seq_q=dense,
            cum_seq_k=dense,
            max_q=query.shape[2],
            max_k=key.shape[2],
            dropout_p=0.0,
            is_causal=mask.is_causal,
            philox_seed=unused_seed,
            philox_offset=unused_seed,
            scale=scores.scale,
        )
        return computed[0], computed[1], computed[2]
    of_query = torch.empty_like(query)
    of_key = torch.zeros(key.shape, dtype=exact(key), device=key.device)
    of_value = torch.zeros(value.shape, dtype=exact(value), device=value.device)
    for part in _parts(query, key):
        rows = queries.rows(part)
        weights, changes = _weights_and_changes(rows, key, value, scores, mask, part)
        received = _by_group(rows.gradient, value)
        of_value += (_by_group(weights, value).mT @ received).sum(dim=2, dtype=of_value.dtype)
        shared = _by_group(changes, key)
        of_query[:, :, part] = (shared @ key[:, :, None]).flatten(1, 2)
        of_key += (shared.mT @ _by_group(rows.query, key)).sum(dim=2, dtype=of_key.dtype)
        del weights, changes, shared  # the scores of one part live at a time
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)


def _weights_and_changes(
    rows: QueryRows, key: Tensor, value: Tensor, scores: Scores, mask: "TileMask", part: slice
) -> tuple[Tensor, Tensor]:
    """Return the softmax's weights of a part of the queries, and the gradients of the products of queries and keys.

    Both are [b, h, q, k], in the dtype of the queries.
    """
    values, slope = _scores(rows.query, key, scores, mask, part)
    weights = values.sub_(rows.sums[..., None]).exp_()
    changes = (_by_group(rows.gradient, value) @ value[:, :, None].mT).flatten(1, 2).to(rows.sums.dtype)
    means = (rows.gradient.to(rows.sums.dtype) * rows.output).sum(dim=-1, keepdim=True)  # [b, h, q, 1]
    changes.sub_(means).mul_(weights).mul_(scores.scale)
    if slope is not None:
        changes.mul_(slope)
    return weights.to(rows.query.dtype), changes.to(rows.query.dtype)


@dataclass(frozen=True, kw_only=True)
class TileMask:
    """What the queries of a `Tile` see: all where `offset` is None. Made for a tile, never for a sequence."""

    offset: int | None
    window: int | None
    queries: int
    keys: int

    @property
    def is_causal(self) -> bool:
        """Whether it is the triangle that kernels know without a mask.

        Kernels of CPUs align its corner with the first key, those of GPUs with the last one.
        """
        return self.offset == 0 and self.window is None and self.queries == self.keys

    def visible(self, rows: slice, device: torch.device) -> Tensor:
        """Return which keys these queries see, bool [q, k]."""
        assert self.offset is not None
        queries = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.offset
        keys = torch.arange(self.keys, device=device)
        seen = keys <= queries
        return seen if self.window is None else seen & (keys > queries - self.window)

    def bias(self, like: Tensor) -> Tensor | None:
        """Return 0 where a query sees a key and -inf elsewhere [1, 1, q, k]; None where no mask is needed."""
        if self.offset is None or self.is_causal:
            return None
        hidden = self.visible(slice(0, self.queries), like.device).logical_not()
        bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return bias.masked_fill_(hidden, -torch.inf)[None, None]


def _has_flash(query: Tensor, scores: Scores, mask: TileMask) -> bool:
    """Whether PyTorch's flash attention computes the tile on a GPU: in 16 bits, of Ampere or later."""
    size = query.shape[-1]
    fits = query.dtype in (torch.float16, torch.bfloat16) and size <= 256 and size % 8 == 0
    takes = query.is_cuda and fits and scores.softcap is None and (mask.offset is None or mask.is_causal)
    # Tensors without memory say that they are on a GPU where there is none.
    return takes and (not torch.cuda.is_available() or torch.cuda.get_device_capability(query.device) >= (8, 0))


def _parts(query: Tensor, key: Tensor) -> list[slice]:
    """Cut queries such that the scores of a part are few."""
    samples, heads, count = query.shape[:3]
    size = max(1, MOST_SCORES // max(1, samples * heads * key.shape[2]))
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]


def _scores(query: Tensor, key: Tensor, scores: Scores, mask: TileMask, part: slice) -> tuple[Tensor, Tensor | None]:
    """Return the masked scores of queries [b, h, q, k], and their slope by the products where tanh bounds them."""
    values = (_by_group(query, key) @ key[:, :, None].mT).flatten(1, 2).to(exact(query)).mul_(scores.scale)
    slope = None
    if scores.softcap is not None:
        values.div_(scores.softcap).tanh_()
        slope = 1 - values.square()
        values.mul_(scores.softcap)
    if mask.offset is not None:
        values.masked_fill_(mask.visible(part, query.device).logical_not(), -torch.inf)
    return values, slope


def _by_group(tensor: Tensor, like: Tensor) -> Tensor:
    """Heads beside the key-value head that they share, [b, h, ...] -> [b, g, r, ...]."""
    grouped: Tensor = tensor.unflatten(1, (like.shape[1], -1))
    return grouped
