"""The fingerprint of a batch: independent of the layout, different if anything in the batch differs."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.config.layout import Layout
from toolkit.data.samples.fingerprint import BatchFingerprints, format_fingerprint, hash_samples, read_step_numbers

SIZE, LENGTH = 12, 16
CHANCE = np.random.default_rng(3)
IDS = CHANCE.integers(0, 50_000, (SIZE, LENGTH))
LABELS = np.where(CHANCE.random((SIZE, LENGTH)) < 0.2, -100, np.roll(IDS, -1, axis=1))


def fingerprint(ids: np.ndarray = IDS, labels: np.ndarray = LABELS, positions: np.ndarray | None = None) -> int:
    return hash_samples(ids, labels, np.arange(len(ids)) if positions is None else positions)


@pytest.mark.parametrize("bounds", [(0, 12), (0, 6, 12), (0, 1, 2, 5, 12), tuple(range(13))])
def test_it_is_the_sum_of_what_ranks_read(bounds: tuple[int, ...]) -> None:
    shares = (hash_samples(IDS[a:b], LABELS[a:b], range(a, b)) for a, b in pairwise(bounds))
    assert sum(shares) % 2**64 == fingerprint()


def test_it_does_not_depend_on_who_reads_which_micro_batch() -> None:
    order = CHANCE.permutation(SIZE)
    assert fingerprint(IDS[order], LABELS[order], order) == fingerprint()


def test_it_differs_when_two_samples_swap_positions() -> None:
    order = np.arange(SIZE)
    order[[2, 7]] = order[[7, 2]]
    assert fingerprint(IDS[order], LABELS[order]) != fingerprint()


def test_it_differs_when_a_sample_is_read_twice() -> None:
    order = np.arange(SIZE)
    order[7] = 2
    assert fingerprint(IDS[order], LABELS[order]) != fingerprint()


def test_every_token_counts() -> None:
    seen = {fingerprint()}
    for place in np.ndindex(SIZE, LENGTH):
        other = IDS.copy()
        other[place] += 1
        seen.add(fingerprint(other))
    assert len(seen) == 1 + SIZE * LENGTH


def test_labels_count_for_themselves() -> None:
    labels = LABELS.copy()
    labels[0, 0] = 7
    assert fingerprint(labels=labels) != fingerprint()


def test_tokens_and_labels_are_not_interchangeable() -> None:
    assert fingerprint(LABELS, IDS) != fingerprint()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_it_does_not_depend_on_the_dtype(dtype: type) -> None:
    assert fingerprint(IDS.astype(dtype), LABELS.astype(dtype)) == fingerprint()


def test_tensors_are_read_as_arrays_are() -> None:
    assert hash_samples(torch.from_numpy(IDS), torch.from_numpy(LABELS), torch.arange(SIZE)) == fingerprint()


def test_parts_of_sequences_add_up_to_whole_ones() -> None:
    held = [(range(3), range(5, IDS.shape[1])), (range(3, 5),)]
    parts = [np.concatenate([np.arange(run.start, run.stop) for run in runs]) for runs in held]
    shares = [
        hash_samples(IDS[:, part], LABELS[:, part], np.arange(SIZE), runs)
        for part, runs in zip(parts, held, strict=True)
    ]
    assert sum(shares) % 2**64 == fingerprint()


def test_a_part_at_other_positions_is_another() -> None:
    first = hash_samples(IDS[:, :3], LABELS[:, :3], np.arange(SIZE), (range(3),))
    assert first != hash_samples(IDS[:, :3], LABELS[:, :3], np.arange(SIZE), (range(1, 4),))


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("total", [0, 7, 2**32 - 1, 2**53 + 1, 2**62 + 12_345])
def test_its_way_over_the_device_keeps_every_bit(total: int, stop: bool) -> None:
    """There are 53 bits in fp64, and 62 in the hashes of four million samples."""
    loader: Any = SimpleNamespace(layout=Layout(), report_phase=lambda phase: None)
    fingerprints = BatchFingerprints(loader)
    fingerprints.local_sums.append(total)
    numbers = fingerprints.step_numbers(torch.device("cpu"), stop=stop)
    assert numbers.dtype == torch.float64
    assert read_step_numbers(numbers.tolist()) == (format_fingerprint(total), stop, [])


def test_other_numbers_travel_with_it() -> None:
    loader: Any = SimpleNamespace(layout=Layout(), report_phase=lambda phase: None)
    fingerprints = BatchFingerprints(loader)
    fingerprints.local_sums.append(7)
    numbers = fingerprints.step_numbers(torch.device("cpu"), stop=False, count=4, others={1: 0.5, 3: 2.0})
    assert read_step_numbers(numbers.tolist()) == (format_fingerprint(7), False, [0.0, 0.5, 0.0, 2.0])


def test_it_is_written_with_sixteen_digits() -> None:
    assert format_fingerprint(255) == "00000000000000ff"
