"""Embedding, LM head and loss of Megatron-Core, and full recomputation of layers.

- megatron/core/models/common/embeddings/language_model_embedding.py: word and position embeddings are added, transposed
  to [s, b, h], copied, and dropped out; with tensor parallelism foreign words are masked.
- megatron/core/tensor_parallel/cross_entropy.py: logits are converted to fp32 beside the 16-bit ones that GPTModel's
  frame holds, and everything after is in that fp32 tensor's memory: softmax is kept, and becomes the gradient.
  fused_cross_entropy.py: the compiled kernel writes its exponentials into a new tensor beside its input.
  TransformerEngine's kernel (pytorch/triton/cross_entropy.py) turns the logits into their gradient where they lie.
"""

from published.megatron_layer import column_linear, layer, norm
from published.megatron_setup import Setup
from published.megatron_tape import GpuTape
from toolkit.estimate.sizes.operations import Gradients, Kept, add, dropout, elementwise, to
from toolkit.estimate.sizes.tape import Tensor
from toolkit.estimate.sizes.views import make_contiguous, transpose

_INT64 = 8


def embed(c: Setup, tape: GpuTape, ids: Tensor, tied: Tensor | None) -> Tensor:
    """Token ids [b, s] -> [s, b, h]."""
    rows = (c.vocab, c.h)
    weight = tape.parameter(rows, 2) if tied is None else tied
    own = tape.new(ids.shape, _INT64) if c.tp > 1 else ids
    found = tape.new((c.b, c.s, c.h), 2)
    tape.record([found], [weight], [own], lambda g, kept: [tape.new(rows, 2)])
    if c.positions:
        table = tape.parameter((c.positions, c.h), 2)
        places = tape.new((c.b, c.s, c.h), 2)
        tape.record([places], [table], [ids], lambda g, kept: [tape.new((c.positions, c.h), 2)])
        found = add(found, places)
        del places
    x = make_contiguous(transpose(found, 0, 1))
    del found
    if c.sp:
        x = _scattered(c, x)
    return dropout(x, c.dropout)


def _scattered(c: Setup, x: Tensor) -> Tensor:
    tape, shape = x.tape, x.shape
    y = tape.new((shape[0] // c.tp, *shape[1:]), 2)
    tape.record([y], [x], [], lambda g, kept: [tape.new(shape, 2)])
    return y


def head(c: Setup, x: Tensor, tied: Tensor | None) -> Tensor:
    """The final norm, logits [s, b, v/t] in 16 bits, and the loss of each token in fp32."""
    normed = norm(c, x)
    del x
    logits = column_linear(c, normed, c.vocab, bias=False, weight=tied)
    del normed
    return _loss(c, logits)


def _loss(c: Setup, logits: Tensor) -> Tensor:
    tape = logits.tape
    if c.loss == "in place":
        loss = tape.new((c.s, c.b), 4)
        tape.record([loss], [logits], [logits], lambda g, kept: [kept[0].alias()])
        return loss
    with tape.no_grad():
        softmax = to(logits, 4)
        if c.loss == "compiled":
            softmax = elementwise(softmax)
        targets = tape.new((c.s, c.b), _INT64)
        mask = tape.new((c.s, c.b), 1)
    loss = tape.new((c.s, c.b), 4)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        return [to(kept[0], 2)]

    tape.record([loss], [logits], [softmax, mask, targets], backward)
    return loss


def layers(c: Setup, x: Tensor, count: int) -> Tensor:
    """So many decoder layers; with full recomputation only their inputs are kept."""
    for _ in range(count):
        x = _recomputed(c, x) if c.recompute else layer(c, x)
    return x


def _recomputed(c: Setup, x: Tensor) -> Tensor:
    tape = x.tape
    with tape.no_grad():
        y = layer(c, x)
    y = y.alias()

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return tape.replay(lambda hidden: layer(c, hidden), [kept[0]], g[0])

    tape.record([y], [x], [x], backward)
    return y
