"""Attention for transformers' attention interface that knows positions and documents, and never makes a mask.

`mask` is registered as the function that makes masks. It returns a `SequenceView`: the part of the sequences that this
rank holds, with the window or the chunks of the layer. The model hands it to `attend`, registered as the attention
function, where a mask would arrive; so it is right where a layer is recomputed, and with several micro-batches in a
pipeline.

In the graph of a compiled layer this attention, with its exchange, is one operation, and its backward pass another one.
They find the view by its token, a tensor that the graph takes as an input and saves for its backward pass: so one graph
serves all micro-batches, and layers with and without a window.

Dims: b samples, h heads, g key-value heads, s positions of a sequence, n positions on this rank, d size of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from toolkit.errors import ModelError
from toolkit.parallel.context import kernels
from toolkit.parallel.context.exchange import Exchange, KeyValues
from toolkit.parallel.context.heads import own_heads, repeated, to_heads, to_positions
from toolkit.parallel.context.kernels import QueryRows, Scores, TileMask, exact
from toolkit.parallel.context.sequence import SequenceSlice, Tile

NAME = "context_parallel"
"""The name of this attention in transformers."""
Tensor = torch.Tensor


_VIEW = "view_of_sequences"
"""Name of the attribute of a token's storage that has its SequenceView."""


@dataclass(kw_only=True)  # not frozen: the compiler would compile a layer again for each value of a field
class SequenceView:
    """What takes the place of a mask: the sequences of a micro-batch as a rank and a layer see them."""

    sequence: SequenceSlice
    exchange: Exchange
    heads: dist.ProcessGroup | None = None
    """Ranks with which this one exchanges heads for positions; the view is that of all their positions."""
    window: int | None = None
    chunk: int | None = None
    token: Tensor | None = field(default=None, compare=False)
    """What stands for the view in graphs, int64 [1] on the CPU; None for a view that is handed to no layer."""

    def with_token(self) -> "SequenceView":
        """Return the view with a token. Tensors and views keep each other in memory one way only."""
        token = torch.zeros(1, dtype=torch.int64, device="cpu")
        setattr(token.untyped_storage(), _VIEW, self)
        return replace(self, token=token)

    def tiles(self, keys: range) -> list[Tile]:
        """Return what this rank's queries see of the keys at these positions."""
        return self.sequence.tiles(keys, window=self.window, chunk=self.chunk)


class _Current:
    """How a layer without a window sees the sequences of the forward pass that runs; None while none does."""

    view: SequenceView | None = None


def register() -> None:
    """Make this attention known to transformers. A second call changes nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


@contextmanager
def attending(sequence: SequenceSlice, exchange: Exchange, heads: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Let the forward pass inside attend within these sequences; `heads` as in `SequenceView`."""
    before = _Current.view
    _Current.view = SequenceView(sequence=sequence, exchange=exchange, heads=heads)
    try:
        yield
    finally:
        _Current.view = before


def mask(*arguments: Any, config: Any = None, local_size: int | None = None, **options: Any) -> Any:
    """Return the `SequenceView` of a layer; outside of `attending` what transformers makes for its own kernel.

    Raises ModelError for a family that sees anything but earlier positions, a window or chunks of them.
    """
    if _Current.view is None:
        return sdpa_mask(*arguments, config=config, local_size=local_size, **options)
    if options.get("use_vmap"):
        reason = "its masks are functions of its own"
        remedies = ("parallel.cp", 1), ("model.attn_implementation", "auto")
        raise ModelError.of("model_type", config.model_type, reason, *remedies)
    text = config.get_text_config(decoder=True)
    is_chunked = local_size is not None and getattr(text, "attention_chunk_size", None) == local_size
    view = replace(
        _Current.view,
        window=None if is_chunked else local_size,
        chunk=local_size if is_chunked else None,
    )
    return view.with_token()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend from this rank's queries [b, h, n, d] to the keys and values [b, g, n, d] of all ranks; [b, n, h, d].

    `softcap` bounds scores by tanh (Gemma 2), `s_aux` [h] are attention sinks (GPT-OSS). A layer's window is that of
    its `SequenceView`. Raises ModelError for dropout between queries and keys, and outside of `attending` for what
    PyTorch's own attention would leave out.
    """
    if not isinstance(attention_mask, SequenceView):
        if not query.is_meta:  # without values nothing is lost: the structure of a model is found so
            _check_plain(softcap, s_aux)
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    if dropout:
        reason = "context parallelism has no dropout between queries and keys"
        raise ModelError.of("model.overrides", "attention dropout", reason, "set it to 0.0 there", ("parallel.cp", 1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (_as_autocast(each) for each in (query, key, value))
    group = attention_mask.heads
    if group is not None:
        key, value = (repeated(each, group.size()) for each in (key, value))
        query, key, value = (to_heads(each, group) for each in (query, key, value))
        s_aux = None if s_aux is None else own_heads(s_aux, group)
    if torch.compiler.is_compiling():
        assert attention_mask.token is not None
        output = _attend(query, key, value, s_aux, attention_mask.token, scale, softcap)[0].transpose(1, 2)
    else:
        output = _Attention.apply(query, key, value, s_aux, attention_mask, Scores(scale=scale, softcap=softcap))
    if group is not None:
        output = to_positions(output, group)
    return output.transpose(1, 2).contiguous(), None


def _check_plain(softcap: float | None, s_aux: Tensor | None) -> None:
    """Raise ModelError for bounded scores and attention sinks, which PyTorch's own attention does not have."""
    for name, option in (("softcap", softcap), ("s_aux", s_aux)):
        if option is not None:
            reason = f"{NAME} takes {name} inside of `attending` alone, and PyTorch's own attention leaves it out"
            raise ModelError.of("model.attn_implementation", NAME, reason, "let an engine of the toolkit run the model")


def _as_autocast(operand: Tensor) -> Tensor:
    """Cast an operand as autocast does before PyTorch's own attention: rotary embeddings leave queries in fp32."""
    device = operand.device.type
    return operand.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else operand


class _Attention(torch.autograd.Function):
    """(queries [b, h, n, d], keys, values [b, g, n, d], sinks [h] or None) -> [b, h, n, d].

    Saves what is this rank's: keys and values of others are exchanged again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, view: SequenceView, scores: Scores
    ) -> Tensor:
        output, sums = _merged_output(query, key, value, sinks, view, scores)
        ctx.save_for_backward(query, key, value, sinks, output, sums)
        ctx.view = view
        ctx.scores = scores
        return output

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Any:
        query, key, value, sinks, output, sums = ctx.saved_tensors
        of_inputs = _gradients(received[0], query, key, value, output, sums, ctx.view, ctx.scores)
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            of_sinks = _gradient_of_sinks(received[0], sinks, output, sums)
        return *of_inputs, of_sinks, None, None


@torch.library.custom_op("dstk::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    token: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output of `_Attention`, as [b, n, h, d], and the log-sum-exp [b, h, n]."""
    view: SequenceView = getattr(token.untyped_storage(), _VIEW)
    output, sums = _merged_output(query, key, value, sinks, view, Scores(scale=scale, softcap=softcap))
    return output.transpose(1, 2).contiguous(), sums


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    samples, heads, positions = query.shape[:3]
    output = query.new_empty((samples, positions, heads, value.shape[-1]))
    return output, query.new_empty((samples, heads, positions), dtype=exact(query))


@torch.library.custom_op("dstk::gradients_of_attention", mutates_args=())
def _gradients_of_attention(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    output: Tensor,
    sums: Tensor,
    token: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks from that of the output [b, n, h, d]."""
    view: SequenceView = getattr(token.untyped_storage(), _VIEW)
    scores = Scores(scale=scale, softcap=softcap)
    gradient = gradient.transpose(1, 2)
    output = output.transpose(1, 2)
    of_query, of_key, of_value = _gradients(gradient, query, key, value, output, sums, view, scores)
    of_sinks = query.new_empty(0) if sinks is None else _gradient_of_sinks(gradient, sinks, output, sums)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous(), of_sinks


@_gradients_of_attention.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), of_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, token, scale, softcap = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, token)
    ctx.scale = scale
    ctx.softcap = softcap


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: each time, a checkpoint or a hook would unpack all again
    of_query, of_key, of_value, of_sinks = _gradients_of_attention(gradient, *saved, ctx.scale, ctx.softcap)
    has_sinks = saved[3] is not None
    return of_query, of_key, of_value, of_sinks if has_sinks else None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)
OPERATION = torch.ops.dstk.attend.default
"""`_attend`, which has shapes without values: recordings run it."""
GRADIENTS_OPERATION = torch.ops.dstk.gradients_of_attention.default
"""What its backward pass runs."""


def _merged_output(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, view: SequenceView, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return the output [b, h, n, d] and the log-sum-exp [b, h, n] over the keys of all ranks."""
    merged = _Merged(query, value.shape[-1])
    for part in view.exchange.parts(key, value, view.sequence):
        for block in part.blocks():
            for tile in view.tiles(block.runs[0]):
                q, k, v = _padded(*_operands(query, block, tile))
                merged.add(tile, *kernels.attend(q, k, v, scores, _mask(tile)))
    return merged.finish(sinks)


def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    view: SequenceView,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's queries, keys and values from that of the output."""
    if gradient.stride(-1) != 1:
        gradient = gradient.contiguous()  # kernels need the numbers of a head side by side
    of_query = torch.zeros_like(query, dtype=exact(query))
    # A kernel on a GPU may have the gradients of keys and values for each query head at first.
    most_keys = max(1, query.shape[2] // 2)

    def add(tile: Tile, block: KeyValues, sums_of_block: KeyValues) -> None:
        operands = _operands(query, block, tile)
        outputs = (each[tile.rows, :, tile.queries] for each in (gradient, output))
        q, k, v, g, o = _padded(*operands, *outputs)
        rows = QueryRows(query=q, gradient=g, output=o, sums=sums[tile.rows, :, tile.queries])
        of_tile = kernels.gradients(rows, k, v, scores, _mask(tile))
        of_query[tile.rows, :, tile.queries] += of_tile[0][..., : query.shape[-1]]
        sums_of_block.key[tile.rows, :, tile.keys] += of_tile[1][..., : key.shape[-1]]
        sums_of_block.value[tile.rows, :, tile.keys] += of_tile[2][..., : value.shape[-1]]

    def compute(part: KeyValues) -> KeyValues:
        sums_of_part = part.zero_sums()
        for block, sums_of_block in zip(part.blocks(), sums_of_part.blocks(), strict=True):
            for tile in view.tiles(block.runs[0]):
                for piece in tile.split_keys(most_keys):
                    add(piece, block, sums_of_block)
        return sums_of_part

    of_key, of_value = view.exchange.gradients(key, value, view.sequence, compute)
    return of_query.to(query.dtype), of_key, of_value


def _gradient_of_sinks(gradient: Tensor, sinks: Tensor, output: Tensor, sums: Tensor) -> Tensor:
    """A sink is a key whose value is zero: its weight's gradient is minus the mean of the others'."""
    weights = (sinks.to(sums.dtype)[:, None] - sums).exp()  # [b, h, n]
    means = (gradient.to(sums.dtype) * output.to(sums.dtype)).sum(dim=-1)
    return -(weights * means).sum(dim=(0, 2)).to(sinks.dtype).view(sinks.shape)


class _Merged:
    """The output of tiles that share queries, merged by their log-sum-exp (Dao 2023, section 3.1.1), in fp32 at
    least."""

    def __init__(self, query: Tensor, size: int) -> None:
        self._dtype = query.dtype
        samples, heads, positions = query.shape[:3]
        # In memory as the layer's next product takes it, [b, n, h, d]: then it is kept once.
        output = torch.zeros((samples, positions, heads, size), dtype=exact(query), device=query.device)
        self._output = output.transpose(1, 2)
        self._sums = torch.full(query.shape[:3], -torch.inf, dtype=exact(query), device=query.device)

    def add(self, tile: Tile, output: Tensor, sums: Tensor) -> None:
        """Merge the output of a tile and its log-sum-exp."""
        at = (tile.rows, slice(None), tile.queries)
        total = torch.logaddexp(self._sums[at], sums)
        earlier = (self._sums[at] - total).exp()[..., None]
        addition = (sums - total).exp()[..., None]
        merged = self._output[at]
        merged.mul_(earlier).addcmul_(output[..., : merged.shape[-1]], addition)
        self._sums[at] = total

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, in the dtype of the queries, and the log-sum-exp, in which sinks take part."""
        if sinks is not None:
            total = torch.logaddexp(self._sums, sinks.to(self._sums.dtype).view(1, -1, 1))
            self._output *= (self._sums - total).exp()[..., None]
            self._sums = total
        return self._output.to(self._dtype), self._sums


def _mask(tile: Tile) -> TileMask:
    queries = tile.queries.stop - tile.queries.start
    keys = tile.keys.stop - tile.keys.start
    return TileMask(offset=tile.offset, window=tile.window, queries=queries, keys=keys)


def _operands(query: Tensor, block: KeyValues, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    keys = (tile.rows, slice(None), tile.keys)
    return query[tile.rows, :, tile.queries], block.key[keys], block.value[keys]


def _padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad heads with zeros to the largest size, which kernels take: latent attention has smaller values than keys."""
    size = max(each.shape[-1] for each in tensors)
    return tuple(
        each if each.shape[-1] == size else nn.functional.pad(each, (0, size - each.shape[-1])) for each in tensors
    )
