"""Samples: next-token labels, every target once an epoch, and an order that no layout can change."""

import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from toolkit.batch import Batch
from toolkit.errors import DataError
from toolkit.train.data.permutation import permute
from toolkit.train.data.prefetch import Prefetcher
from toolkit.train.data.samples import IGNORED, Samples

EOS = 0


def corpus(lengths):
    """Documents of distinct tokens, so that a token is its own place; each ends in EOS."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    stream = np.arange(1, ends[-1] + 1, dtype=np.uint32)
    stream[ends[1:] - 1] = EOS
    return SimpleNamespace(eos_id=EOS, tokens=lambda split: stream, document_offsets=lambda split: ends)


def samples(lengths, **fields):
    defaults = {"seq_len": 4, "packing": "packed", "split": "train", "seed": 7, "global_size": 6}
    return Samples(corpus(lengths), **{**defaults, **fields})


def test_packed_labels_are_the_next_tokens():
    assert [array.tolist() for array in samples([3, 20]).tokens(1)] == [[5, 6, 7, 8], [6, 7, 8, 9]]


@pytest.mark.parametrize("total", [5, 8, 9, 10, 401])
def test_packed_makes_every_token_but_the_first_and_the_rest_a_target_once(total):
    made = samples([total])
    targets = np.concatenate([made.tokens(index)[1] for index in range(len(made))])
    stream = [*range(1, total), EOS]
    assert targets.tolist() == stream[1 : 1 + (total - 1) // 4 * 4]


def test_padded_holds_one_document_and_ignores_the_rest():
    assert [array.tolist() for array in samples([3, 9], packing="padded").tokens(0)] == [
        [1, 2, EOS, EOS],
        [2, EOS, IGNORED, IGNORED],
    ]


@pytest.mark.parametrize("lengths", [[2], [3, 9, 5, 6, 2, 17], [1, 5, 1, 4, 1], [4, 5, 6]])
def test_padded_makes_every_token_but_the_first_of_a_document_a_target_once(lengths):
    made = samples(lengths, packing="padded")
    pairs = []
    for index in range(len(made)):
        input_ids, labels = made.tokens(index)
        pairs += [(int(i), int(t)) for i, t in zip(input_ids, labels, strict=True) if t != IGNORED]
    stream, ends = corpus(lengths).tokens("train").tolist(), np.cumsum(lengths).tolist()
    inside = [(a, b) for i, (a, b) in enumerate(pairwise(stream), start=1) if i not in ends]
    assert pairs == inside


def test_isolated_positions_start_with_each_document_and_its_first_token_is_no_target():
    made = samples([3, 1, 6, 2, 9], packing="isolated", seq_len=10)
    assert [made.position_ids(index).tolist() for index in (0, 1)] == [
        [0, 1, 2, 0, 0, 1, 2, 3, 4, 5],
        [0, 1, 0, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert [made.tokens(index)[1].tolist() for index in (0, 1)] == [
        [2, EOS, IGNORED, IGNORED, 6, 7, 8, 9, EOS, IGNORED],
        [EOS, IGNORED, 14, 15, 16, 17, 18, 19, 20, EOS],
    ]


def test_a_document_that_a_window_cuts_goes_on_at_position_0():
    assert samples([3, 20], packing="isolated").position_ids(1).tolist() == [0, 1, 2, 3]


def test_isolated_keeps_documents_apart_where_no_end_of_text_token_stands():
    cut = corpus([6, 7])
    cut.tokens("train")[:] = np.arange(1, 14)
    made = Samples(cut, seq_len=12, packing="isolated", split="train", seed=7, global_size=6)
    assert made.position_ids(0).tolist() == [*range(6), *range(6)]
    assert made.tokens(0)[1][5] == IGNORED


def test_isolated_has_the_tokens_and_the_order_of_packed():
    lengths = [3, 9, 5, 1, 6, 2, 17, 30]
    packed, isolated = (samples(lengths, packing=packing).batch(3, range(6)) for packing in ("packed", "isolated"))
    assert (packed.input_ids == isolated.input_ids).all()
    kept = isolated.labels != IGNORED
    assert (packed.labels[kept] == isolated.labels[kept]).all()


@pytest.mark.parametrize("lengths", [[2, 3], [3, 9, 5, 6, 2, 17], [1, 5, 1, 4, 1], [4, 5, 6]])
def test_isolated_makes_the_targets_of_padded(lengths):
    def pairs(packing):
        made = samples(lengths, packing=packing, seq_len=1)
        rows = np.concatenate([np.stack(made.tokens(index)) for index in range(len(made))], axis=1)
        return rows[:, rows[1] != IGNORED].tolist()

    assert pairs("isolated") == pairs("padded")


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_only_isolated_samples_have_positions(packing):
    assert samples([3, 9], packing=packing).batch(0, [0]).position_ids is None


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 64, 97, 1000, 65_537, 1_000_000])
def test_the_order_of_an_epoch_is_a_bijection(size):
    index = np.arange(size)
    image = permute(index, np.zeros_like(index), size=size, seed=3)
    assert (np.sort(image) == index).all()


@pytest.mark.parametrize("other", [{"seed": 4, "epoch": 0}, {"seed": 3, "epoch": 1}])
def test_epochs_and_seeds_have_their_own_order(other):
    index = np.arange(1000)
    base = permute(index, np.full(1000, 0), size=1000, seed=3)
    changed = permute(index, np.full(1000, other["epoch"]), size=1000, seed=other["seed"])
    assert (base == changed).mean() < 0.02


def test_the_order_mixes_neighbours():
    image = permute(np.arange(10_000), np.zeros(10_000, dtype=int), size=10_000, seed=0)
    assert abs(np.corrcoef(np.arange(10_000), image)[0, 1]) < 0.05
    assert (np.diff(image) == 1).mean() < 0.005


def test_every_order_of_three_comes_up_about_equally_often():
    epochs = np.repeat(np.arange(6000), 3)
    orders = permute(np.tile(np.arange(3), 6000), epochs, size=3, seed=1).reshape(-1, 3)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 6
    assert counts.min() > 850


def test_a_billion_samples_are_ordered_without_a_table():
    index = np.array([0, 1, 999_999_999])
    image = permute(index, np.zeros(3, dtype=int), size=10**9, seed=0)
    assert len(set(image.tolist())) == 3
    assert image.max() < 10**9


def test_each_epoch_gives_each_sample_once_even_across_a_step():
    made = samples([41], global_size=7)
    flat = np.concatenate([made.sample_ids(step, range(7)) for step in range(10)])
    assert len(made) == 10
    assert all(sorted(epoch) == list(range(10)) for epoch in flat.reshape(7, 10).tolist())


@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_the_global_batch_is_the_same_on_any_number_of_ranks(dp):
    made = samples([401])
    batch = Batch.resolve(global_size=6, micro_size=1, dp=dp)
    starts = [(step, rank) for step in range(batch.accumulation) for rank in range(dp)]
    blocks = [range(at := batch.block_start(accumulation_step=s, data_rank=r), at + 1) for s, r in starts]
    together = {p: int(made.sample_ids(5, [p])[0]) for block in blocks for p in block}
    assert [together[p] for p in range(6)] == made.sample_ids(5, range(6)).tolist()


def test_the_validation_split_keeps_its_order():
    assert samples([41], split="eval").sample_ids(1, range(6)).tolist() == [6, 7, 8, 9, 0, 1]


def test_a_batch_stacks_the_samples_at_its_positions():
    made = samples([401])
    batch = made.batch(3, [4, 1])
    rows = [made.tokens(index) for index in made.sample_ids(3, [4, 1]).tolist()]
    assert batch.input_ids.tolist() == [input_ids.tolist() for input_ids, _ in rows]
    assert batch.labels.tolist() == [labels.tolist() for _, labels in rows]


@pytest.mark.parametrize("packing", ["packed", "isolated", "padded"])
def test_the_target_count_is_the_number_of_labels(packing):
    made = samples([3, 9, 5, 1, 6, 2, 17, 30], packing=packing)
    for step in range(9):
        assert made.target_count(step, range(6)) == (made.batch(step, range(6)).labels != IGNORED).sum()


@pytest.mark.parametrize("packing", ["packed", "isolated", "padded"])
def test_the_target_count_reads_no_token(packing):
    made = samples([3, 9, 5], packing=packing)
    made._tokens = None
    assert made.target_count(0, range(6)) > 0


def test_samples_are_int64():
    batch = samples([41], packing="isolated").batch(0, [0])
    assert {array.dtype for array in (batch.input_ids, batch.labels, batch.position_ids)} == {np.dtype(np.int64)}


@pytest.mark.parametrize("index", [-1, 10])
def test_a_sample_outside_is_an_index_error(index):
    with pytest.raises(IndexError):
        samples([41]).tokens(index)


@pytest.mark.parametrize("packing", ["packed", "isolated", "padded"])
def test_a_split_without_a_sample_says_what_to_do(packing):
    with pytest.raises(DataError, match=r"data.seq_len=4: the eval split has 1 tokens, .*raise data.eval_fraction"):
        samples([1], packing=packing, split="eval")


def test_the_prefetcher_gives_the_batches_of_its_schedule_in_order():
    made = samples([401])
    schedule = [(step, [0, 3]) for step in range(7)]
    with Prefetcher(made, schedule) as batches:
        got = [batch.input_ids for batch in batches]
    want = [torch.from_numpy(made.batch(*asked).input_ids) for asked in schedule]
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_the_prefetcher_hands_positions_on():
    made = samples([3, 9, 5, 30], packing="isolated")
    with Prefetcher(made, [(0, [0, 3])]) as batches:
        assert torch.equal(next(batches).position_ids, torch.from_numpy(made.batch(0, [0, 3]).position_ids))


def test_the_prefetcher_raises_an_error_of_its_thread_where_the_batch_is_asked_for():
    def schedule():
        yield 0, [0]
        raise ValueError("broken schedule")

    batches = Prefetcher(samples([41]), schedule())
    next(batches)
    with pytest.raises(ValueError, match="broken schedule"):
        next(batches)


def test_the_prefetcher_builds_no_further_than_its_depth():
    asked = []

    def schedule():
        for step in range(100):
            asked.append(step)
            yield step, [0]

    with Prefetcher(samples([41]), schedule(), depth=2) as batches:
        next(batches)
        next(batches)
        # Two given, two ready, one in the hands of the thread. Before it is closed: closing makes room for one more.
        assert len(asked) <= 5


def test_closing_the_prefetcher_ends_its_thread():
    before = threading.active_count()
    batches = Prefetcher(samples([41]), ((step, [0]) for step in range(10**9)))
    next(batches)
    batches.close()
    batches.close()
    assert threading.active_count() == before
    assert list(batches) == []


def test_closing_ends_a_thread_that_still_has_to_say_that_it_is_through():
    batches = Prefetcher(samples([41]), [(0, [0]), (1, [0])], depth=1)
    while not batches._ready.full():
        time.sleep(0.01)
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    closing.join(timeout=20)
    assert not closing.is_alive()
