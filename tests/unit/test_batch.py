"""How a global batch splits."""

import pytest

from toolkit.batch import Batch
from toolkit.errors import BatchError


@pytest.mark.parametrize(
    ("global_size", "micro_size", "dp", "accumulation"), [(8, 2, 4, 1), (8, 2, 1, 4), (8, 8, 1, 1), (96, 2, 3, 16)]
)
def test_global_is_micro_times_accumulation_times_dp(
    global_size: int, micro_size: int, dp: int, accumulation: int
) -> None:
    assert Batch.resolve(global_size=global_size, micro_size=micro_size, dp=dp).accumulation == accumulation


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro_size", [1, 2])
def test_every_position_is_computed_once_whatever_dp_is(dp: int, micro_size: int) -> None:
    batch = Batch.resolve(global_size=24, micro_size=micro_size, dp=dp)
    starts = [
        batch.block_start(accumulation_step=step, data_rank=rank)
        for step in range(batch.accumulation)
        for rank in range(dp)
    ]
    assert starts == list(range(0, 24, micro_size))


@pytest.mark.parametrize(
    ("global_size", "micro_size", "dp", "advice"),
    [
        (10, 4, 2, "Set batch.global_size to 8 or 16, or batch.micro_size to one of 1, 5."),
        (3, 4, 1, "Set batch.global_size to 4, or batch.micro_size to one of 1, 3."),
        (7, 1, 8, "Set batch.global_size to 8."),
        (2520, 11, 1, "Set batch.global_size to 2519 or 2530, or batch.micro_size to one of 1, 2, 3, 1260, 2520."),
    ],
)
def test_a_batch_that_does_not_divide_names_sizes_that_do(
    global_size: int, micro_size: int, dp: int, advice: str
) -> None:
    with pytest.raises(BatchError) as caught:
        Batch.resolve(global_size=global_size, micro_size=micro_size, dp=dp)
    assert str(caught.value).endswith(advice)
