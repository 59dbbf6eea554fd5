"""What counts as a spike, and how often a run may have an incident."""

import math
import statistics

import pytest

from toolkit.config.recipe import TrainSection
from toolkit.training.incidents import Incidents, SpikeDetector

LOSSES = [2.0, 2.2, 1.9, 2.1, 2.05, 1.95, 2.15, 2.0]


def detector(losses: list[float], *, sigmas: float = 6.0, window: int = 8) -> SpikeDetector:
    made = SpikeDetector(sigmas=sigmas, window=window)
    for loss in losses:
        made.add(loss)
    return made


def test_a_spike_lies_so_many_standard_deviations_above_the_mean() -> None:
    wanted = statistics.fmean(LOSSES) + 6 * statistics.stdev(LOSSES)
    assert detector(LOSSES).limit() == pytest.approx(wanted, rel=1e-12)


def test_only_the_window_counts() -> None:
    assert detector([100.0, -100.0, *LOSSES]).limit() == detector(LOSSES).limit()


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    assert detector(LOSSES[:-1]).limit() == math.inf


def test_nothing_is_a_spike_where_it_is_switched_off() -> None:
    assert detector(LOSSES, sigmas=0.0).limit() == math.inf


def incidents(most: int) -> Incidents:
    return Incidents(TrainSection(steps=10, max_incidents=most, spike_sigmas=6.0, spike_window=8))


def test_steps_skipped_in_a_row_are_limited() -> None:
    found = incidents(2)
    assert [found.may_skip() for _ in range(3)] == [True, True, False]


def test_a_good_step_ends_the_row() -> None:
    found = incidents(1)
    assert found.may_skip()
    found.went_well(2.0)
    assert found.may_skip()


def test_rollbacks_to_the_same_checkpoint_are_limited() -> None:
    found = incidents(2)
    assert [found.may_roll_back(100) for _ in range(3)] == [True, True, False]


def test_good_steps_between_do_not_make_the_same_checkpoint_another() -> None:
    found = incidents(1)
    assert found.may_roll_back(100)
    found.went_well(2.0)
    assert not found.may_roll_back(100)


def test_a_later_checkpoint_begins_a_new_count() -> None:
    found = incidents(1)
    assert found.may_roll_back(100)
    assert found.may_roll_back(200)


def test_losses_from_before_a_rollback_are_forgotten() -> None:
    found = incidents(1)
    for loss in LOSSES:
        found.went_well(loss)
    assert found.spikes.limit() < math.inf
    found.may_roll_back(100)
    assert found.spikes.limit() == math.inf
