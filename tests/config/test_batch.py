"""How a global batch splits."""

import pytest

from toolkit.config.layout import Batch
from toolkit.errors import BatchError


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "dp", "accumulation"),
    [(8, 2, 4, 1), (8, 2, 1, 4), (8, 8, 1, 1), (96, 2, 3, 16)],
)
def test_global_is_micro_times_accumulation_times_dp(
    global_batch_size: int, micro_batch_size: int, dp: int, accumulation: int
) -> None:
    assert (
        Batch.resolve(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp=dp).accumulation
        == accumulation
    )


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_every_position_is_computed_once_whatever_dp_is(dp: int, micro_batch_size: int) -> None:
    batch = Batch.resolve(global_batch_size=24, micro_batch_size=micro_batch_size, dp=dp)
    starts = [
        batch.block_start(accumulation_step=step, data_rank=rank)
        for step in range(batch.accumulation)
        for rank in range(dp)
    ]
    assert starts == list(range(0, 24, micro_batch_size))


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "dp", "sizes"),
    [
        (10, 4, 2, {"global_batch_size": "8 or 16", "micro_batch_size": "one of 1, 5"}),
        (3, 4, 1, {"global_batch_size": "4", "micro_batch_size": "one of 1, 3"}),
        (7, 1, 8, {"global_batch_size": "8"}),
        (2520, 11, 1, {"global_batch_size": "2519 or 2530", "micro_batch_size": "one of 1, 2, 3, 1260, 2520"}),
    ],
)
def test_a_batch_that_does_not_divide_names_sizes_that_do(
    global_batch_size: int, micro_batch_size: int, dp: int, sizes: dict[str, str]
) -> None:
    with pytest.raises(BatchError) as caught:
        Batch.resolve(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp=dp)
    remedy = {field: str(allowed) for field, allowed in caught.value.refusal.remedy}
    assert remedy == {f"batch.{name}": allowed for name, allowed in sizes.items()}
