"""The validation split depends on the documents alone, and is neither empty nor everything."""

import numpy as np
import pytest
from refusals import refused

from toolkit.data.tokens.build_cache import BLOCK_TOKENS, choose_validation
from toolkit.errors import DataError


def split(lengths, fraction):
    ends, chosen = choose_validation(np.cumsum(lengths), fraction, name="corpus")
    return ends, chosen, np.diff(ends, prepend=0)


def test_nothing_is_held_out_when_the_fraction_is_zero():
    assert not split([5, 6], 0.0)[1].any()


def test_the_share_of_documents_is_the_fraction():
    _, chosen, _ = split(np.full(100_000, 10), 0.05)
    assert chosen.mean() == pytest.approx(0.05, rel=0.05)


def test_documents_stay_whole():
    lengths = np.arange(1, 500)  # 10 % of 499 are more than 20
    ends, _, _ = split(lengths, 0.1)
    assert ends.tolist() == np.cumsum(lengths).tolist()


def test_appending_documents_moves_none_of_the_others():
    short, long = split(np.full(5000, 100), 0.1)[1], split(np.full(9000, 100), 0.1)[1]
    assert (long[:5000] == short).all()


@pytest.mark.parametrize("lengths", [np.full(100, 41), np.full(5000, 2), [10] * 99 + [5000], [5000] + [10] * 99])
def test_a_tiny_fraction_of_documents_still_holds_out_a_block(lengths):
    _, chosen, sizes = split(lengths, 1e-9)
    assert sizes[chosen].sum() >= BLOCK_TOKENS
    assert not chosen.all()


@pytest.mark.parametrize("seed", range(5))
def test_a_small_share_of_uneven_documents_is_close_to_the_fraction(seed):
    lengths = np.random.default_rng(seed).lognormal(8, 1.5, size=500).astype(np.int64) + 1
    _, chosen, sizes = split(lengths, 0.02)
    assert sizes[chosen].sum() / lengths.sum() == pytest.approx(0.02, rel=0.35)


@pytest.mark.parametrize("lengths", [np.full(100, 50), [5000]])
def test_never_everything_is_held_out(lengths):
    assert not split(lengths, 0.999999)[1].all()


@pytest.mark.parametrize("lengths", [[50_000], [30_000, 1, 1, 20_000], [999] * 50])
def test_few_documents_are_held_out_in_blocks(lengths):
    _, chosen, sizes = split(lengths, 0.2)
    tokens = np.repeat(chosen, sizes)
    whole = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    blocks = tokens[:whole].reshape(-1, BLOCK_TOKENS)
    assert len(tokens) == sum(lengths)
    assert (blocks == blocks[:, :1]).all()
    assert blocks.any()
    assert not tokens[whole:].any()


def test_segments_of_a_block_split_never_cross_a_document():
    lengths = [3000, 3000, 3000]
    ends, _, _ = split(lengths, 0.3)
    assert set(np.cumsum(lengths)) <= set(ends.tolist())


def test_a_corpus_of_less_than_two_blocks_is_refused():
    with refused(DataError, "data.eval_fraction", "data.source", remedy=("data.eval_fraction", 0)):
        split([4095], 0.01)
    assert split([4096], 0.01)[1].any()
