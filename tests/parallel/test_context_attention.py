"""The attention of context parallelism against plain formulas: what is seen, outputs, gradients, balance and bytes."""

import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.errors import ModelError
from toolkit.parallel.context.attention import SequenceView, attend, attending, mask
from toolkit.parallel.context.exchange import Exchange, ExchangeKind, NoExchange, make_exchange
from toolkit.parallel.context.sequence import TILE, SequenceSlice, Tile

Ranks = Callable[..., list[Any]]
LENGTH = 48
STARTS = ((0, 5, 30), (0, 17))
RANKS = (1, 2, 4)


def seen(sample: int, query: int, key: int, window: int | None, chunk: int | None) -> bool:
    """Whether a position sees another, by definition: an earlier one of its document, in its window and chunk."""
    starts = [max(start for start in STARTS[sample] if start <= position) for position in (query, key)]
    is_near = window is None or query - key < window
    is_in_chunk = chunk is None or (query - starts[0]) // chunk == (key - starts[0]) // chunk
    return starts[0] == starts[1] and key <= query and is_near and is_in_chunk


def pairs_of(tile: Tile) -> list[tuple[int, int]]:
    queries = range(tile.queries.start, tile.queries.stop)
    keys = range(tile.keys.start, tile.keys.stop)
    found = []
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            last = math.inf if tile.offset is None else i + tile.offset
            first = -math.inf if tile.window is None else last - tile.window
            if first < j <= last:
                found.append((query, key))
    assert len(found) == tile.pairs
    assert len({query for query, _ in found}) == len(queries), "a query of the tile sees nothing of it"
    return found


@pytest.mark.parametrize("chunk", [None, 4, 9])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_tiles_have_each_visible_pair_once(
    exchange: ExchangeKind, ranks: int, window: int | None, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.parallel.context.sequence.TILE", 5)
    found: list[tuple[int, int, int]] = []
    for rank in range(ranks):
        sequence = SequenceSlice(rank=rank, ranks=ranks, length=LENGTH, starts=STARTS)
        positions = sequence.positions()
        every = [run for runs in sequence.runs for run in runs]
        for run in [range(LENGTH)] if exchange == "gather" else every:
            for tile in sequence.tiles(run, window=window, chunk=chunk):
                pieces = list(tile.split_keys(11))
                assert tile.offset is not None or max(piece.keys.stop - piece.keys.start for piece in pieces) <= 11
                pairs = [(positions[query], run[key]) for piece in pieces for query, key in pairs_of(piece)]
                found += [(sample, *pair) for sample in range(*tile.rows.indices(2)) for pair in pairs]
    wanted = {
        (sample, query, key)
        for sample in range(2)
        for query in range(LENGTH)
        for key in range(LENGTH)
        if seen(sample, query, key, window, chunk)
    }
    assert sorted(found) == sorted(wanted)


def test_a_mask_is_no_larger_than_a_tile_and_its_window() -> None:
    window = 100
    sequence = SequenceSlice(rank=0, ranks=2, length=1 << 16, starts=((0,),))
    tiles = sequence.tiles(range(1 << 16), window=window)
    assert tiles
    assert max((t.queries.stop - t.queries.start) * (t.keys.stop - t.keys.start) for t in tiles) <= TILE * (
        TILE + window
    )


def imbalance(ranks: int, length: int, starts: tuple[int, ...], window: int | None = None) -> float:
    """Pairs of a query and a key on the rank with most, over the mean."""
    work = [
        sum(
            tile.pairs
            for tile in SequenceSlice(rank=rank, ranks=ranks, length=length, starts=(starts,)).tiles(
                range(length), window=window
            )
        )
        for rank in range(ranks)
    ]
    return max(work) * ranks / sum(work)


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_every_rank_has_the_same_causal_work(ranks: int, window: int | None) -> None:
    assert imbalance(ranks, 1 << 14, (0,), window) <= 1.05


@pytest.mark.parametrize("mean", [500, 4000, 16000])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_has_the_same_work_of_documents(ranks: int, mean: int) -> None:
    chance = random.Random(mean)
    length = 1 << 15
    starts = [0]
    while (following := starts[-1] + 1 + int(chance.expovariate(1 / mean))) < length:
        starts.append(following)
    assert imbalance(ranks, length, tuple(starts)) <= 1.05


@pytest.mark.parametrize("length", [48, 96, 1 << 15])
@pytest.mark.parametrize("starts", [((0,),), ((0, 5, 30), (0, 17)), ((0, 1, 2, 3),)])
def test_ranks_hold_each_position_once_and_as_many(length: int, starts: tuple[tuple[int, ...], ...]) -> None:
    for count in (1, 2, 4, 8):
        runs = SequenceSlice(rank=0, ranks=count, length=length, starts=starts).runs
        held = [[position for run in each for position in run] for each in runs]
        assert {len(each) for each in held} == {length // count}
        assert sorted(position for each in held for position in each) == [*range(length)]
        assert all(each == sorted(each) for each in held)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Attention by its formula, with a mask of all pairs."""
    window, chunk, cap, sinks = (options.get(name) for name in ("window", "chunk", "softcap", "s_aux"))
    visible = torch.tensor(
        [[[seen(b, i, j, window, chunk) for j in range(LENGTH)] for i in range(LENGTH)] for b in range(2)]
    )
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * options["scaling"]
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(2, -1, LENGTH, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :LENGTH]
    return (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2)


def inputs(value_size: int = 8) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    shapes = [(2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, value_size), (4,), (2, LENGTH, 4, value_size)]
    return [torch.randn(shape, generator=chance, dtype=torch.float64) for shape in shapes]


KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 6},
    "chunks": {"chunk": 7},
    "softcap": {"softcap": 1.5, "window": 6},
    "sinks": {"s_aux": True, "window": 9},
    "latent": {"value_size": 5},
}


def differences(exchange: ExchangeKind | None, kind: str, *, in_graph: bool = False) -> list[float]:
    """How far output and gradients of this rank are from those of the formula, relative to their norms."""
    options = {"scaling": 0.3, **KINDS[kind]}
    q, k, v, sinks, gradient = inputs(options.pop("value_size", 8))
    options["s_aux"] = sinks if options.get("s_aux") else None
    leaves = [q, k, v, *([sinks] if options["s_aux"] is not None else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    whole = plain(q, k, v, options)
    wanted = torch.autograd.grad(whole, leaves, gradient)
    ranks, rank = (1, 0) if exchange is None else (dist.get_world_size(), dist.get_rank())
    group: Any = None if exchange is None else dist.group.WORLD
    sequence = SequenceSlice(rank=rank, ranks=ranks, length=LENGTH, starts=STARTS)
    own = torch.tensor(sequence.positions())
    view = SequenceView(
        sequence=sequence,
        exchange=make_exchange(group, exchange or "gather"),
        window=options.pop("window", None),
        chunk=options.pop("chunk", None),
    )
    compute: Any = torch.compile(attend, backend="aot_eager", fullgraph=True) if in_graph else attend
    operands = [each[:, :, own] for each in (q, k, v)]
    output, _ = compute(torch.nn.Identity(), *operands, view.with_token(), **options)
    found = list(torch.autograd.grad(output, leaves, gradient[:, own]))
    for each in found:
        if exchange is not None:
            dist.all_reduce(each)
    compared = [(output, whole[:, own]), *zip(found, wanted, strict=True)]
    return [float(((got - right).norm() / right.norm()).detach()) for got, right in compared]


@pytest.mark.parametrize("option", [{"softcap": 1.5}, {"s_aux": torch.zeros(2)}], ids=["softcap", "s_aux"])
def test_what_pytorch_would_leave_out_is_refused_outside_of_a_forward_pass_of_an_engine(option: dict[str, Any]) -> None:
    operands = [torch.zeros(1, 2, 4, 8) for _ in range(3)]
    with pytest.raises(ModelError, match=f"takes {next(iter(option))} inside of"):
        attend(torch.nn.Identity(), *operands, None, **option)
    on_meta = [operand.to("meta") for operand in operands]
    assert attend(torch.nn.Identity(), *on_meta, None, **option)[0].shape == (1, 4, 2, 8)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_attends_as_the_formula_says(kind: str, in_graph: bool) -> None:
    assert max(differences(None, kind, in_graph=in_graph)) < 1e-12


def test_one_graph_serves_all_views_and_keeps_none_of_them() -> None:
    torch._dynamo.reset()
    query = torch.randn(1, 2, LENGTH, 8, requires_grad=True)
    starts = [((0,),), ((0, 9),), ((0, 20, 30),)]
    views = [
        SequenceView(
            sequence=SequenceSlice(rank=0, ranks=1, length=LENGTH, starts=each), exchange=NoExchange(), window=window
        )
        for each in starts
        for window in (None, 6)
    ]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for view in views:
        arguments = (torch.nn.Identity(), query, query, query)
        gradients = [
            torch.autograd.grad(compute(*arguments, view.with_token())[0].square().sum(), query)[0]
            for compute in (compiled, attend)
        ]
        assert torch.equal(*gradients)
    assert counter.frame_count == 1
    kept = [weakref.ref(view) for view in views]
    views.clear()
    del view
    assert [each() for each in kept] == [None] * len(kept)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_ranks_attend_as_the_formula_says(exchange: ExchangeKind, count: int, ranks: Ranks) -> None:
    found = ranks(_all_differences, count, exchange)
    assert max(difference for rank in found for each in rank.values() for difference in each) < 1e-12, found


def _all_differences(exchange: ExchangeKind) -> dict[str, list[float]]:
    return {kind: differences(exchange, kind) for kind in KINDS}


def test_blocks_that_merge_without_their_log_sum_exp_are_caught(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def average(merged: Any, tile: Tile, output: torch.Tensor, sums: torch.Tensor) -> None:
        at = (tile.rows, slice(None), tile.queries)
        is_first = torch.isneginf(merged._sums[at])[..., None]
        merged._output[at] = torch.where(is_first, output, (merged._output[at] + output) / 2)
        merged._sums[at] = torch.logaddexp(merged._sums[at], sums)

    monkeypatch.setattr("toolkit.parallel.context.attention._Merged.add", average)
    assert all(found[0] > 0.01 for found in ranks(differences, 2, "ring", "causal"))


def test_a_block_that_counts_twice_is_caught(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.parallel.context.exchange.RingExchange._owner", lambda ring, step: ring._rank)
    assert all(found[0] > 0.01 for found in ranks(differences, 2, "ring", "causal"))


def test_chunks_in_the_order_of_ranks_are_caught(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each rank had consecutive positions, where it has the first and the last."""

    def in_order_of_ranks(every: torch.Tensor, sequence: Any) -> torch.Tensor:
        return torch.cat(list(every), dim=2)

    monkeypatch.setattr("toolkit.parallel.context.exchange._in_order", in_order_of_ranks)
    assert all(found[0] > 0.01 for found in ranks(differences, 2, "gather", "causal"))


def sent_bytes(exchange: ExchangeKind) -> tuple[int, int, int]:
    """Bytes that this rank sends in a forward and in a backward pass of a layer, and those of its keys and values."""
    sent: list[int] = []
    gather, scatter, send = dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.batch_isend_irecv
    others = dist.get_world_size() - 1

    def counted_gather(out: torch.Tensor, local: torch.Tensor, **options: Any) -> Any:
        sent.append(others * local.nbytes)
        return gather(out, local, **options)

    def counted_scatter(out: torch.Tensor, whole: torch.Tensor, **options: Any) -> Any:
        sent.append(others * out.nbytes)
        return scatter(out, whole, **options)

    def counted_send(operations: list[Any]) -> Any:
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return send(operations)

    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = counted_gather, counted_scatter
    dist.batch_isend_irecv = counted_send
    try:
        q, k, v, _, gradient = (x.bfloat16() for x in inputs())
        sequence = SequenceSlice(rank=dist.get_rank(), ranks=dist.get_world_size(), length=LENGTH, starts=STARTS)
        own = torch.tensor(sequence.positions())
        group: Any = dist.group.WORLD
        view = SequenceView(sequence=sequence, exchange=make_exchange(group, exchange))
        leaves = [x[:, :, own].requires_grad_() for x in (q, k, v)]
        output, _ = attend(torch.nn.Identity(), *leaves, view)
        forward = sum(sent)
        output.backward(gradient[:, own])
        return forward, sum(sent) - forward, k.nbytes + v.nbytes
    finally:
        dist.all_gather_into_tensor, dist.reduce_scatter_tensor = gather, scatter
        dist.batch_isend_irecv = send


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_a_layer_sends_the_bytes_of_the_closed_form(exchange: ExchangeKind, count: int, ranks: Ranks) -> None:
    """(c - 1) / c of keys and values forward; these again and as many bytes of gradients backward."""
    for forward, backward, whole in ranks(sent_bytes, count, exchange):
        assert forward == whole * (count - 1) // count
        assert backward == 2 * forward


def test_nothing_of_a_layer_grows_with_the_square_of_the_sequence() -> None:
    sizes = {length: _largest_tensor(length) for length in (2048, 4096, 8192)}
    assert sizes[8192] <= 4.1 * sizes[2048]


def _largest_tensor(length: int) -> int:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            nonlocal largest
            result = function(*arguments, **(keywords or {}))
            for each in torch.utils._pytree.tree_leaves(result):
                if isinstance(each, torch.Tensor):
                    largest = max(largest, each.numel())
            return result

    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    rng = random.Random(0)
    starts = (0, *sorted(rng.sample(range(1, length), 5)))
    view = SequenceView(
        sequence=SequenceSlice(rank=0, ranks=1, length=length, starts=(starts,)), exchange=NoExchange(), window=64
    )
    with Watch():
        attend(torch.nn.Identity(), q, k, v, view)[0].sum().backward()
    return largest


class TestMask:
    def test_it_is_a_view_of_the_sequences_that_run(self) -> None:
        sequence = SequenceSlice(rank=0, ranks=1, length=LENGTH, starts=STARTS)
        exchange: Exchange = NoExchange()
        config = _config(attention_chunk_size=None)
        with attending(sequence, exchange):
            assert mask(config=config) == SequenceView(sequence=sequence, exchange=exchange)
            assert mask(config=config, local_size=6).window == 6

    def test_chunks_are_no_window(self) -> None:
        with attending(SequenceSlice(rank=0, ranks=1, length=LENGTH, starts=STARTS), NoExchange()):
            view = mask(config=_config(attention_chunk_size=6), local_size=6)
        assert (view.window, view.chunk) == (None, 6)


def _config(**fields: Any) -> Any:
    class Config:
        model_type = "llama"

        def get_text_config(self, decoder: bool) -> Any:
            return self

    config = Config()
    vars(config).update(fields)
    return config
