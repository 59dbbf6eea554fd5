"""What the attention of context parallelism does with a sequence whose values tell which key each of them is.

Before the first step, ranks attend to a random sequence in which the value at a position is one there and zero
elsewhere. The output of a query then is its weight on each key, which a softmax over all visible keys gives too: keys
that it must not see, blocks that count twice, and blocks that are merged without their log-sum-exp tell themselves
apart.

Dims: h heads, n positions of a rank, s positions of the sequence, d size of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from toolkit.engines.base import Engine
from toolkit.parallel.context.attention import SequenceView, attend
from toolkit.parity.run.observe import gather_on_rank_0

Tensor = torch.Tensor
_LONGEST = 1024
"""Positions of a sequence that is probed: weights have as many numbers for each query."""
_SIZE = 8
_SAME = 1e-3


def attention_fault(engine: Engine) -> str:
    """Return what is wrong with the attention over shared sequences, as a clause; empty where nothing is, or where no
    ranks share sequences. A collective call; complete on rank 0.
    """
    context = engine.context
    if context is None or context.group is None:
        return ""
    view = context.view()
    if view.sequence.length > _LONGEST:
        return ""
    # An earlier forward pass, as that of a reference, may have left the positions of its documents.
    with context.attending(view.sequence):
        fault = _fault(view, context.positions, engine.device)
    return next((clause for clause in gather_on_rank_0(fault) if clause), "")


def _fault(view: SequenceView, positions: Tensor, device: torch.device) -> str:
    length = view.sequence.length
    heads = 1 if view.heads is None else view.heads.size()
    samples = len(view.sequence.starts)
    exact: dict[str, Any] = {"dtype": torch.float64}  # fp32 may be rounded to TF32 in products on a GPU
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, length, _SIZE, generator=generator, **exact).to(device) for _ in range(2))
    mine = positions.to(device)
    identity = torch.eye(length, device=device, **exact).expand(samples, heads, -1, -1)

    def shared(query: Tensor, key: Tensor) -> Tensor:
        queries = query.expand(samples, -1, -1, -1)[:, :, mine]
        keys = key.expand(samples, -1, -1, -1)[:, :, mine]
        output, _ = attend(nn.Module(), queries, keys, identity[:, :, mine], view)
        by_head: Tensor = output.transpose(1, 2)[0]  # [h, n, s]
        return by_head

    hidden = torch.arange(length, device=device) > mine[:, None]
    factors = torch.randn(heads, len(mine), length, generator=generator, **exact).to(device)
    weights, gradients = _with_gradients(shared, query, key, factors)

    def whole(query: Tensor, key: Tensor) -> Tensor:
        scores = query[0, :, mine] @ key[0].mT / _SIZE**0.5
        weights: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return weights

    wanted, right = _with_gradients(whole, query, key, factors)
    fault = _of_weights(weights, wanted, hidden)
    if fault:
        return fault
    # Gradients of keys are sums over the queries of all ranks, which the other ranks' factors enter: those of queries
    # are a rank's own.
    off = (gradients - right)[:, mine].norm() > _SAME * right.norm()
    return "the gradients of its queries are wrong where the forward pass is right" if off else ""


def _with_gradients(
    run: Callable[[Tensor, Tensor], Tensor], query: Tensor, key: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weights [h, n, s] and the gradient of the queries [h, s, d]."""
    query = query.clone().requires_grad_()
    key = key.clone().requires_grad_()
    weights = run(query, key)
    (weights * factors).sum().backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None
    return weights.detach(), query.grad[0]


def _of_weights(weights: Tensor, wanted: Tensor, hidden: Tensor) -> str:
    """Name the mistake by the weights [h, n, s] that queries put on keys."""
    if torch.allclose(weights, wanted, rtol=_SAME, atol=_SAME**2):
        return ""
    seen = ~hidden.expand_as(weights)
    unseen_weight = weights[~seen].abs().sum() / weights.abs().sum()
    is_lost = (weights[seen] < _SAME * wanted[seen]).any()
    if unseen_weight > _SAME or is_lost:
        mistake = "put weight on later positions" if unseen_weight > _SAME else "put none on positions that they see"
        return f"queries {mistake}: keys and values of chunks are in another order than their positions"
    ratios = torch.where(seen, weights / wanted, torch.nan)
    least = ratios.nan_to_num(torch.inf).amin(dim=-1, keepdim=True)
    multiples = (ratios / least)[seen]
    if ((multiples - multiples.round()).abs() < _SAME * multiples).all() and multiples.max() > 1.5:
        times = int(multiples.max().round())
        return f"queries count some keys {times} times as much as others: a block is merged {times} times"
    return "queries weigh some keys more than a softmax over all of them does: blocks merge without their log-sum-exp"
