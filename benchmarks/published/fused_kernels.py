"""What flash-attn's kernels keep for backward, and what their backward passes allocate."""

from collections.abc import Sequence

from toolkit.estimate.sizes.tape import Tensor

Gradients = Sequence[Tensor | None]

_SMS = {"hopper": 132, "ampere": 108}
"""Streaming multiprocessors: the norm's backward has a row of fp32 weight gradients for each."""


def rms_norm(x: Tensor, generation: str = "hopper") -> Tensor:
    """Triton's (flash_attn/ops/triton/layer_norm.py): keeps its input and 1/rms of each position."""
    tape = x.tape
    y, rms = tape.new(x.shape, x.itemsize), tape.new(x.shape[:-1], 4)
    weight = tape.parameter((x.shape[-1],), x.itemsize)

    def backward(g: Gradients, kept: Sequence[Tensor]) -> list[Tensor | None]:
        partial = tape.new((_SMS[generation], kept[0].shape[-1]), 4)
        dx, dw = tape.new(kept[0].shape, kept[0].itemsize), tape.new((kept[0].shape[-1],), kept[0].itemsize)
        del partial
        return [dx, dw]

    tape.record([y], [x, weight], [x, rms], backward)
    return y


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, samples: int) -> Tensor:
    """The kernel for samples of any length (csrc/flash_attn/flash_api.cpp, mha_varlen_fwd and mha_varlen_bwd).

    Operands are [samples * positions, heads, features]. Keeps them, its result, and each row's log-sum-exp in fp32.
    """
    tape = q.tape
    y = tape.new(q.shape, q.itemsize)
    rows = (samples, q.shape[1], q.shape[0] // samples)
    sums = tape.new(rows, 4)

    def backward(g: Gradients, kept: Sequence[Tensor]) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [tape.new(x.shape, x.itemsize) for x in kept[:3]]
        # In fp32: row sums, and the query's gradient, with room for 128 more rows a sample.
        held = tape.new(rows, 4), tape.new((kept[0].shape[0] + 128 * samples, *kept[0].shape[1:]), 4)
        del held
        return gradients

    tape.record([y], [q, k, v], [q, k, v, y, sums], backward)
    return y
