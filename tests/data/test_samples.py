"""Samples: next-token labels, every target once per epoch, and the same order in every layout."""

import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused

from toolkit.config.layout import Batch
from toolkit.data.permutation import permute
from toolkit.data.samples.loader import prefetched
from toolkit.data.samples.samples import Samples
from toolkit.errors import DataError
from toolkit.parallel.loss import IGNORE

EOS = 0


def corpus(lengths):
    """Documents of distinct tokens, so that a token is its own place; each ends in EOS."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    stream = np.arange(1, ends[-1] + 1, dtype=np.uint32)
    stream[ends[1:] - 1] = EOS
    return SimpleNamespace(
        eos_id=EOS,
        tokenizer_vocab_size=1 << 20,
        tokens=lambda split: stream,
        document_offsets=lambda split: ends,
        weights=lambda split: None,
    )


def samples(lengths, **fields):
    defaults = {"seq_len": 4, "packing": "packed", "split": "train", "seed": 7, "global_batch_size": 6}
    return Samples(corpus(lengths), **{**defaults, **fields})


def test_packed_labels_are_the_next_tokens():
    assert [array.tolist() for array in samples([3, 20]).tokens(1)] == [[5, 6, 7, 8], [6, 7, 8, 9]]


@pytest.mark.parametrize("total", [5, 8, 9, 10, 401])
def test_packed_makes_every_token_except_the_first_and_the_remainder_a_target_once(total):
    split = samples([total])
    targets = np.concatenate([split.tokens(index)[1] for index in range(len(split))])
    stream = [*range(1, total), EOS]
    assert targets.tolist() == stream[1 : 1 + (total - 1) // 4 * 4]


def test_padded_has_one_document_and_ignores_the_padding():
    assert [array.tolist() for array in samples([3, 9], packing="padded").tokens(0)] == [
        [1, 2, EOS, EOS],
        [2, EOS, IGNORE, IGNORE],
    ]


@pytest.mark.parametrize("lengths", [[2], [3, 9, 5, 6, 2, 17], [1, 5, 1, 4, 1], [4, 5, 6]])
def test_padded_makes_every_token_except_the_first_of_a_document_a_target_once(lengths):
    split = samples(lengths, packing="padded")
    pairs = []
    for index in range(len(split)):
        input_ids, labels = split.tokens(index)
        pairs += [(int(i), int(t)) for i, t in zip(input_ids, labels, strict=True) if t != IGNORE]
    stream, ends = corpus(lengths).tokens("train").tolist(), np.cumsum(lengths).tolist()
    inside = [(a, b) for i, (a, b) in enumerate(pairwise(stream), start=1) if i not in ends]
    assert pairs == inside


def test_masked_documents_start_at_position_0_and_their_first_token_is_no_target():
    split = samples([3, 1, 6, 2, 9], document_masking=True, seq_len=10)
    assert [split.position_ids(index).tolist() for index in (0, 1)] == [
        [0, 1, 2, 0, 0, 1, 2, 3, 4, 5],
        [0, 1, 0, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert [split.tokens(index)[1].tolist() for index in (0, 1)] == [
        [2, EOS, IGNORE, IGNORE, 6, 7, 8, 9, EOS, IGNORE],
        [EOS, IGNORE, 14, 15, 16, 17, 18, 19, 20, EOS],
    ]


def test_a_document_that_crosses_into_the_next_window_restarts_at_position_0():
    assert samples([3, 20], document_masking=True).position_ids(1).tolist() == [0, 1, 2, 3]


def test_document_masking_needs_no_end_of_text_token():
    gapped = corpus([6, 7])
    gapped.tokens("train")[:] = np.arange(1, 14)
    sizes = {"seq_len": 12, "seed": 7, "global_batch_size": 6}
    split = Samples(gapped, packing="packed", document_masking=True, split="train", **sizes)
    assert split.position_ids(0).tolist() == [*range(6), *range(6)]
    assert split.tokens(0)[1][5] == IGNORE


def test_document_masking_keeps_the_tokens_and_the_order_of_packed():
    lengths = [3, 9, 5, 1, 6, 2, 17, 30]
    packed, masked = (samples(lengths, document_masking=on).batch(3, range(6)) for on in (False, True))
    assert (packed.input_ids == masked.input_ids).all()
    kept = masked.labels != IGNORE
    assert (packed.labels[kept] == masked.labels[kept]).all()


@pytest.mark.parametrize("lengths", [[2, 3], [3, 9, 5, 6, 2, 17], [1, 5, 1, 4, 1], [4, 5, 6]])
def test_document_masking_makes_the_targets_of_padded(lengths):
    def pairs(**data):
        split = samples(lengths, **data, seq_len=1)
        rows = np.concatenate([np.stack(split.tokens(index)) for index in range(len(split))], axis=1)
        return rows[:, rows[1] != IGNORE].tolist()

    assert pairs(document_masking=True) == pairs(packing="padded")


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_only_masked_documents_have_positions(packing):
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


def test_the_order_separates_adjacent_samples():
    image = permute(np.arange(10_000), np.zeros(10_000, dtype=int), size=10_000, seed=0)
    assert abs(np.corrcoef(np.arange(10_000), image)[0, 1]) < 0.05
    assert (np.diff(image) == 1).mean() < 0.005


def test_every_order_of_three_samples_is_about_equally_frequent():
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


def test_each_epoch_has_each_sample_once_even_across_steps():
    split = samples([41], global_batch_size=7)
    flat = np.concatenate([split.sample_ids(step, range(7)) for step in range(10)])
    assert len(split) == 10
    assert all(sorted(epoch) == list(range(10)) for epoch in flat.reshape(7, 10).tolist())


@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_the_global_batch_is_the_same_on_any_number_of_ranks(dp):
    split = samples([401])
    batch = Batch.resolve(global_batch_size=6, micro_batch_size=1, dp=dp)
    starts = [(step, rank) for step in range(batch.accumulation) for rank in range(dp)]
    blocks = [range(at := batch.block_start(accumulation_step=s, data_rank=r), at + 1) for s, r in starts]
    together = {p: int(split.sample_ids(5, [p])[0]) for block in blocks for p in block}
    assert [together[p] for p in range(6)] == split.sample_ids(5, range(6)).tolist()


def test_the_validation_split_keeps_its_order():
    assert samples([41], split="eval").sample_ids(1, range(6)).tolist() == [6, 7, 8, 9, 0, 1]


def test_a_batch_stacks_the_samples_at_its_positions():
    split = samples([401])
    batch = split.batch(3, [4, 1])
    rows = [split.tokens(index) for index in split.sample_ids(3, [4, 1]).tolist()]
    assert batch.input_ids.tolist() == [input_ids.tolist() for input_ids, _ in rows]
    assert batch.labels.tolist() == [labels.tolist() for _, labels in rows]


@pytest.mark.parametrize("data", [{}, {"document_masking": True}, {"packing": "padded"}])
def test_the_target_count_is_the_number_of_labels(data):
    split = samples([3, 9, 5, 1, 6, 2, 17, 30], **data)
    for step in range(9):
        assert split.target_count(step, range(6)) == (split.batch(step, range(6)).labels != IGNORE).sum()


@pytest.mark.parametrize("data", [{}, {"document_masking": True}, {"packing": "padded"}])
def test_the_target_count_reads_no_token(data):
    split = samples([3, 9, 5], **data)
    split._tokens = None
    assert split.target_count(0, range(6)) > 0


def test_samples_are_int64():
    batch = samples([41], document_masking=True).batch(0, [0])
    assert {tensor.dtype for tensor in (batch.input_ids, batch.labels, batch.position_ids)} == {torch.int64}


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_out_of_range_is_an_index_error(index):
    with pytest.raises(IndexError):
        samples([41]).tokens(index)


@pytest.mark.parametrize("data", [{}, {"document_masking": True}, {"packing": "padded"}])
def test_a_split_without_a_sample_says_what_to_do(data):
    with refused(DataError, "data.seq_len", remedy="raise data.eval_fraction"):
        samples([1], **data, split="eval")


def test_the_prefetcher_yields_micro_batches_in_order():
    split = samples([401])
    expected = [split.batch(step, [0, 3], dropout_seed=step) for step in range(7)]
    with prefetched(iter(expected)) as batches:
        got = list(batches)
    assert [batch.dropout_seed for batch in got] == [*range(7)]
    assert all(torch.equal(one.input_ids, other.input_ids) for one, other in zip(got, expected, strict=True))


def test_the_prefetcher_keeps_position_ids():
    split = samples([3, 9, 5, 30], document_masking=True)
    with prefetched([split.batch(0, [0, 3])]) as batches:
        assert torch.equal(next(batches).position_ids, split.batch(0, [0, 3]).position_ids)


def test_an_error_in_the_prefetch_thread_is_raised_in_the_main_thread():
    def micro_batches():
        yield samples([41]).batch(0, [0])
        raise ValueError("broken source")

    with prefetched(micro_batches()) as batches:
        next(batches)
        with pytest.raises(ValueError, match="broken source"):
            next(batches)


def test_the_prefetcher_builds_no_further_than_its_depth():
    built = []

    def micro_batches():
        for step in range(100):
            built.append(step)
            yield samples([41]).batch(step, [0])

    with prefetched(micro_batches(), depth=2) as batches:
        next(batches)
        next(batches)
        assert len(built) <= 4  # two taken, two ready or being built


def test_leaving_the_prefetcher_ends_its_thread():
    before = threading.active_count()
    with prefetched(samples([41]).batch(step, [0]) for step in range(10**9)) as batches:
        next(batches)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_the_order_of_many_positions_is_that_of_each(monkeypatch):
    """Positions are permuted in parts: at the ends of parts and of epochs as well."""
    split = samples([900])
    flat = np.arange(3 * len(split))
    expected = permute(flat % len(split), flat // len(split), size=len(split), seed=7)
    monkeypatch.setattr("toolkit.data.samples.samples._ORDERED", 64)
    assert split.sample_ids(0, flat).tolist() == expected.tolist()
    for step in (0, 10, 31):
        positions = range(6)
        assert split.sample_ids(step, positions).tolist() == expected[step * 6 : step * 6 + 6].tolist()
