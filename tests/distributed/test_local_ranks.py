"""Forked ranks: results in order, and failures that name the rank."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.errors import DataError
from toolkit.train.local_ranks import RankFailedError

Ranks = Callable[..., list[Any]]


def test_results_come_in_order_of_rank(ranks: Ranks) -> None:
    assert ranks(lambda: dist.get_rank() * 10, 3) == [0, 10, 20]


def test_ranks_are_joined_in_one_group(ranks: Ranks) -> None:
    def total() -> torch.Tensor:
        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        return value

    assert [value.item() for value in ranks(total, 4)] == [10.0] * 4


def test_a_toolkit_error_of_a_rank_is_raised_here(ranks: Ranks) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise DataError("no text")
        time.sleep(60)

    with pytest.raises(DataError, match="no text"):
        ranks(fail, 2)


def test_another_error_names_the_rank_with_its_traceback(ranks: Ranks) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("of mine")
        time.sleep(60)

    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed.*ZeroDivisionError: of mine"):
        ranks(fail, 2)


def test_a_rank_that_dies_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match="rank 1 died"):
        ranks(lambda: os._exit(9) if dist.get_rank() == 1 else time.sleep(60), 2)


def test_a_rank_that_hangs_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match=r"ranks \[1\] did not finish"):
        ranks(lambda: time.sleep(60) if os.environ["RANK"] == "1" else None, 2, timeout_seconds=3, joined=False)
