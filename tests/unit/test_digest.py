"""The digest of a batch: the same however ranks share it, another one where anything in it differs."""

from itertools import pairwise

import numpy as np
import pytest

from toolkit.train.data.digest import digest_name, share_of_digest

SIZE, LENGTH = 12, 16
CHANCE = np.random.default_rng(3)
IDS = CHANCE.integers(0, 50_000, (SIZE, LENGTH))
LABELS = np.where(CHANCE.random((SIZE, LENGTH)) < 0.2, -100, np.roll(IDS, -1, axis=1))


def digest(ids: np.ndarray = IDS, labels: np.ndarray = LABELS, places: np.ndarray | None = None) -> int:
    return share_of_digest(ids, labels, np.arange(len(ids)) if places is None else places)


@pytest.mark.parametrize("cuts", [(0, 12), (0, 6, 12), (0, 1, 2, 5, 12), tuple(range(13))])
def test_it_is_the_sum_of_what_ranks_read(cuts: tuple[int, ...]) -> None:
    shares = (share_of_digest(IDS[a:b], LABELS[a:b], range(a, b)) for a, b in pairwise(cuts))
    assert sum(shares) == digest()


def test_it_does_not_depend_on_who_reads_which_micro_batch() -> None:
    order = CHANCE.permutation(SIZE)
    assert digest(IDS[order], LABELS[order], order) == digest()


def test_it_differs_when_two_samples_swap_places() -> None:
    order = np.arange(SIZE)
    order[[2, 7]] = order[[7, 2]]
    assert digest(IDS[order], LABELS[order]) != digest()


def test_it_differs_when_a_sample_is_read_twice() -> None:
    order = np.arange(SIZE)
    order[7] = 2
    assert digest(IDS[order], LABELS[order]) != digest()


def test_every_token_counts() -> None:
    seen = {digest()}
    for place in np.ndindex(SIZE, LENGTH):
        other = IDS.copy()
        other[place] += 1
        seen.add(digest(other))
    assert len(seen) == 1 + SIZE * LENGTH


def test_labels_count_for_themselves() -> None:
    labels = LABELS.copy()
    labels[0, 0] = 7
    assert digest(labels=labels) != digest()


def test_tokens_and_labels_are_not_interchangeable() -> None:
    assert digest(LABELS, IDS) != digest()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_it_does_not_depend_on_the_dtype(dtype: type) -> None:
    assert digest(IDS.astype(dtype), LABELS.astype(dtype)) == digest()


def test_tensors_are_read_as_arrays_are() -> None:
    import torch

    assert share_of_digest(torch.from_numpy(IDS), torch.from_numpy(LABELS), torch.arange(SIZE)) == digest()


def test_a_million_samples_fit_63_bits() -> None:
    assert digest() < SIZE * 2**40


def test_it_is_written_with_sixteen_digits() -> None:
    assert digest_name(255) == "00000000000000ff"
